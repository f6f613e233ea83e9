"""Fills our own prompt templates (``configs/train/topics.yaml``) with words and numbers."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

TOPICS_FILE = Path(__file__).parents[2] / "configs" / "train" / "topics.yaml"
"""In the source tree, beside the other configurations."""

_SLOT = re.compile(r"\{(?:(?P<low>\d+)-(?P<high>\d+)|(?P<word>[a-z_]+))\}")
_SENTENCE_START = re.compile(r"(?:^|[.!?]\s)$")


@dataclass(frozen=True, slots=True)
class Topics:
    """words: list name -> entries. tasks: kind of task -> templates; code and chat: templates."""

    words: Mapping[str, Sequence[str]]
    tasks: Mapping[str, Sequence[str]]
    code: Sequence[str]
    chat: Sequence[str]


def load_topics(path: Path = TOPICS_FILE) -> Topics:
    """Raises OSError."""
    content: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return Topics(**content)


def fill(template: str, words: Mapping[str, Sequence[str]], rng: random.Random) -> str:
    """Every slot gets a drawn word or number; within one text no entry of a list comes twice while others are left."""
    left: dict[str, list[str]] = {}

    def draw(slot: re.Match[str]) -> str:
        if slot["word"] is None:
            return str(rng.randint(int(slot["low"]), int(slot["high"])))
        entries = left.get(slot["word"])
        if not entries:
            entries = left[slot["word"]] = list(words[slot["word"]])
            rng.shuffle(entries)
        entry = _SLOT.sub(draw, entries.pop())
        starts_sentence = _SENTENCE_START.search(slot.string[: slot.start()]) is not None
        return entry[:1].upper() + entry[1:] if starts_sentence else entry

    text = _SLOT.sub(draw, template).strip()
    return text[:1].upper() + text[1:]


def sample(templates: Sequence[str], words: Mapping[str, Sequence[str]], count: int, rng: random.Random) -> list[str]:
    """``count`` different texts, the templates in turn; fewer when the templates have no more to give."""
    return list(itertools.islice(_distinct(templates, words, count, rng), count))


def _distinct(
    templates: Sequence[str], words: Mapping[str, Sequence[str]], count: int, rng: random.Random
) -> Iterator[str]:
    seen: set[str] = set()
    rounds = 4 * (count // len(templates) + 1)
    for template in itertools.chain.from_iterable(itertools.repeat(templates, rounds)):
        text = fill(template, words, rng)
        if text not in seen:
            seen.add(text)
            yield text
