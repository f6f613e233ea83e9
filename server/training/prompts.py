"""Prompts to train draft heads on: the served model answers them, and the heads learn from its answers."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from server.code_folder import CodeFolderError, code_prompts
from server.prompt_file import PromptFileError, read_prompt_file
from server.training.recipe import SourceMissing, portions

LONGEST = 1200
"""Characters of a built-in prompt; longer ones would leave little room for the answer in a training sequence."""

_SHARED_WORDS = 8


class PromptError(Exception):
    """There are no prompts to train on; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """text: one user message. source: where it came from. licence: SPDX identifier, empty for a user's own."""

    text: str
    source: str
    licence: str


def built_in_prompts(seed: int) -> list[Prompt]:
    """The built-in recipe, each text once, shuffled; the same seed and installed packages give the same list.

    Raises PromptError when a needed package is missing.
    """
    try:
        drawn = portions(seed)
    except SourceMissing as error:
        raise PromptError(str(error)) from error
    prompts = _distinct(
        Prompt(text, portion.source, portion.licence)
        for portion in drawn
        for text in portion.texts
        if len(text) <= LONGEST
    )
    random.Random(seed).shuffle(prompts)
    return prompts


def read_prompts(path: Path, seed: int = 0) -> list[Prompt]:
    """A user's file, see ``server.prompt_file``, or the code in a folder, see ``server.code_folder``.

    Repeated texts are kept once. Raises PromptError that names the line.
    """
    if path.is_dir():
        try:
            return _distinct(Prompt(text, path.resolve().name, "") for text in code_prompts(path, seed))
        except CodeFolderError as error:
            raise PromptError(str(error)) from error
    try:
        texts = read_prompt_file(path)
    except PromptFileError as error:
        raise PromptError(str(error)) from error
    return _distinct(Prompt(text, path.name, "") for text in texts)


def excluding(prompts: Iterable[Prompt], benchmarks: Sequence[str]) -> list[Prompt]:
    """Without prompts that share eight words in a row with a benchmark's text, or all of their words.

    Words are compared in lower case and without punctuation.
    """
    measured = [_words(text) for text in benchmarks]
    wholes = set(measured)
    runs = {run for words in measured for run in _runs(words)}
    kept = []
    for prompt in prompts:
        words = _words(prompt.text)
        if words not in wholes and runs.isdisjoint(_runs(words)):
            kept.append(prompt)
    return kept


def _words(text: str) -> tuple[str, ...]:
    return tuple(re.findall(r"[^\W_]+", text.lower()))


def _runs(words: tuple[str, ...]) -> set[tuple[str, ...]]:
    return {words[i : i + _SHARED_WORDS] for i in range(len(words) - _SHARED_WORDS + 1)}


def _distinct(prompts: Iterable[Prompt]) -> list[Prompt]:
    """The first of each text, whatever its case, spacing and punctuation."""
    first: dict[tuple[str, ...], Prompt] = {}
    for prompt in prompts:
        first.setdefault(_words(prompt.text) or (prompt.text,), prompt)
    return list(first.values())
