"""A folder of code as prompts: what is read, what is passed over, where it is cut."""

from __future__ import annotations

from pathlib import Path

import pytest

from server.bench.datasets import DatasetError, load_dataset
from server.code_folder import CodeFolderError, code_prompts, passages
from server.training.config import PromptSection
from server.training.prompts import PromptError, read_prompts
from server.training.selection import training_prompts

FUNCTION = '''def area_{0}(width: float, height: float) -> float:
    """The area of a rectangle, in square units of its sides."""

    checked = max(width, 0.0), max(height, 0.0)
    return checked[0] * checked[1] + {0}


'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "project"
    (root / "lib").mkdir(parents=True)
    (root / "lib" / "shapes.py").write_text("".join(FUNCTION.format(number) for number in range(9)))
    (root / "page.TS").write_text("export const answer = 42;\n" * 8)
    return root


def test_passages_are_whole_functions_in_order(folder: Path) -> None:
    found = list(passages(folder))
    shapes = [passage for passage in found if passage.path == "lib/shapes.py"]
    assert [(passage.path, passage.language) for passage in found if passage not in shapes] == [
        ("page.TS", "typescript")
    ]
    assert len(shapes) == 3
    assert all(passage.text.startswith("def area_") and len(passage.text) <= 900 for passage in shapes)
    code = (folder / "lib" / "shapes.py").read_text()
    assert "".join(passage.text for passage in shapes).split() == code.split()


def test_a_passage_is_gone_on_with_and_asked_about(folder: Path) -> None:
    prompts = code_prompts(folder)
    assert len(prompts) == 2 * len(list(passages(folder)))
    assert prompts == code_prompts(folder)
    assert prompts != code_prompts(folder, seed=1)
    whole = [prompt for prompt in prompts if prompt.count("answer = 42") == 8]
    half = [prompt for prompt in prompts if prompt.count("answer = 42") == 4]
    assert len(whole) == len(half) == 1
    assert half[0].endswith("```")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        (".hidden.py", FUNCTION.encode()),
        ("node_modules/x.js", FUNCTION.encode()),
        (".git/x.py", FUNCTION.encode()),
        ("notes.bin", FUNCTION.encode()),
        ("latin.py", FUNCTION.encode() + b"# \xe9\n"),
        ("zero.py", FUNCTION.encode() + b"\0\n"),
        ("minified.js", b"x = 1;" * 100),
        ("generated.py", FUNCTION.encode() * 4000),
        ("short.py", b"x = 1\n"),
    ],
)
def test_what_is_no_code_of_theirs_is_passed_over(folder: Path, name: str, content: bytes) -> None:
    expected = code_prompts(folder)
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(content)
    assert code_prompts(folder) == expected


def test_a_long_function_is_cut_between_lines(tmp_path: Path) -> None:
    code = "def long():\n" + "    total = total + 1  # once more\n" * 100
    (tmp_path / "long.py").write_text(code)
    parts = [passage.text for passage in passages(tmp_path)]
    assert "".join(parts) == code
    assert all(len(part) <= 900 for part in parts)


def test_a_folder_without_code_is_said(tmp_path: Path) -> None:
    with pytest.raises(CodeFolderError, match="holds no code"):
        code_prompts(tmp_path)
    with pytest.raises(PromptError, match=f"{tmp_path} holds no code"):
        read_prompts(tmp_path)
    with pytest.raises(DatasetError, match=f"{tmp_path} holds no code"):
        load_dataset(str(tmp_path))


def test_it_trains_and_measures(folder: Path) -> None:
    texts = {prompt.text for prompt in training_prompts(PromptSection(file=str(folder))).prompts}
    assert texts == set(code_prompts(folder)) == set(load_dataset(str(folder)).prompts)
