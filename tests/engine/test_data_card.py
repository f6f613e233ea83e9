"""The data card says what run.yaml says, and nothing that it does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from engine.data_card import DATA_CARD, data_card

PRETRAINED = Path(__file__).parents[2] / "heads" / "pretrained"

RUN: dict[str, Any] = {
    "headlong": "0.1.0",
    "git_commit": "abc",
    "start_from": "first",
    "start_trained": {"tokens": 77, "dataset_digest": "d0"},
    "packages": {"chatterbot-corpus": "1.3.3"},
    "prompts": [
        {"source": "chat", "licence": "Apache-2.0", "from": "headlong 0.1.0", "prompts": 30},
        {"source": "mine|x.txt", "licence": None, "from": None, "prompts": 20},
    ],
    "given": {"kind": "file", "name": "mine|x.txt", "sha256": "f00"},
    "selection": {
        "read": 60,
        "repeated": 4,
        "nearly_repeated": 5,
        "of_benchmarks": 1,
        "kept": 50,
        "conversations": 7,
        "shingle_words": 5,
        "jaccard": 0.8,
    },
    "benchmarks": {"mt-bench": 80, "humaneval": None},
    "languages": {"text": "English", "code": "mostly Python"},
    "method": "mtp",
    "model": {"path": "m", "name": "Tiny", "digest": "d1"},
    "computed": {"runner": "compiled", "quantization": "int8"},
    "answers": {"tokens": 900, "max_tokens": 16, "temperatures": [0.7, 1.0]},
    "training": {},
    "data": {
        "prompts_given": 50,
        "prompts_too_long": 2,
        "prompts_answered": 40,
        "loop": {"tokens": 8, "times": 3},
        "answers_cut_at_a_loop": 9,
        "answers_too_short": 1,
        "answers_repeated": 3,
        "answers": 36,
        "greedy_answers": 19,
        "held_out_share": 0.0625,
        "training_answers": 33,
        "held_out_answers": 3,
        "training_tokens": 420,
        "held_out_tokens": 31,
        "sources": [{"source": "chat", "answers": 36, "tokens": 451, "held_out_answers": 3}],
        "dataset_digest": "d2",
        "held_out_digest": "d3",
        "prompts_digest": "d4",
    },
    "versions": {"python": "3.11", "torch": "2.13"},
}


@pytest.mark.parametrize(
    "part",
    [
        "What the mtp heads in this folder",
        "| chat | headlong 0.1.0 | Apache-2.0 | 30 | 36 | 451 | 3 |",
        "| mine\\|x.txt | - | - | 20 | 0 | 0 | 0 |",
        "file `mine|x.txt`, SHA-256 `f00`",
        "Read: 60. Left out: 4 repeated (but for case and punctuation), 5 nearly repeated",
        "1 that share eight words",
        "Kept: 50, of which 7 are conversations",
        "compared with: mt-bench (80 prompts).",
        "Not installed, so not compared with: humaneval.",
        "Answered: 40 of 50; 2 left no room",
        "Languages: English; code: mostly Python.",
        "Written by Tiny (digest `d1`), runner compiled, quantization int8",
        "Every other prompt greedily, the others at temperatures 0.7, 1 in turn; at most 16 tokens each, 900 wanted",
        "Used: 36, of which 19 greedy.",
        "(8 tokens that occur 3 times): 9 answers. Left out: 1 shorter than two tokens, 3 that repeat",
        "further from the heads `first` (77 tokens, dataset digest `d0`)",
        "one in 16 is held out",
        "Trained on: 33 answers, 420 answer tokens.",
        "Held out: 3 answers, 31 answer tokens.",
        "SHA-256 of the prompts: `d4`.",
        "SHA-256 of prompts and answers trained on: `d2`.",
        "headlong 0.1.0, python 3.11, torch 2.13, chatterbot-corpus 1.3.3.",
        "Commit `abc`.",
        "Prompts were not compared with those of the heads it started from.",
    ],
)
def test_every_fact_is_said(part: str) -> None:
    assert part in data_card(RUN)


def test_languages_of_code_and_of_unknown_text() -> None:
    assert "passages by language: python 3, go 1." in data_card(
        RUN | {"languages": {"passages": {"python": 3, "go": 1}}}
    )
    assert "not looked into" in data_card(RUN | {"languages": None})


def test_what_run_yaml_does_not_say_is_left_out() -> None:
    """As of a run without prompts' counts, from a program that called the engine by itself."""
    least = {name: RUN[name] for name in ("method", "model", "computed", "answers")}
    card = data_card(least | {"data": {"training_tokens": 420, "held_out_tokens": 31, "dataset_digest": "d2"}})
    assert "## Prompts" not in card
    assert "None" not in card
    assert "- Trained on: 420 answer tokens.\n" in card
    for absent in ("Left out", "one in", "Languages", "Benchmarks", "Used", "further from"):
        assert absent not in card


@pytest.mark.parametrize(
    "folder", sorted(path.parent for path in PRETRAINED.glob("*/run.yaml")), ids=lambda path: path.name
)
def test_heads_that_come_along_have_the_card_of_their_run(folder: Path) -> None:
    assert (folder / DATA_CARD).read_text() == data_card(yaml.safe_load((folder / "run.yaml").read_text()))
