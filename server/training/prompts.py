"""Prompts to train draft heads on: the served model answers them, and the heads learn from its answers."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from server.code_folder import CodeFolderError, code_prompts
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
    """A user's file: JSON lines with ``prompt`` or ``messages``, when its name ends in .jsonl; else one prompt a line.
    Of a folder the code in it, see ``server.code_folder``.

    Of ``messages`` only the last user message is used: single turns. Repeated texts are kept once.
    Raises PromptError that names the line.
    """
    if path.is_dir():
        try:
            return _distinct(Prompt(text, path.resolve().name, "") for text in code_prompts(path, seed))
        except CodeFolderError as error:
            raise PromptError(str(error)) from error
    try:
        # Split at line feeds alone: JSON may hold the other characters that Python takes for line ends.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(f"{path} cannot be read as a file of prompts: {error}") from error
    texts = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            texts.append(_from_json(line) if path.suffix == ".jsonl" else line.strip())
        except ValueError as error:
            raise PromptError(f"{path}, line {number}: {error}") from error
    if not texts:
        raise PromptError(f"{path} holds no prompt")
    return _distinct(Prompt(text, path.name, "") for text in texts)


def _from_json(line: str) -> str:
    """Raises ValueError."""
    try:
        record: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error})") from error
    except RecursionError:
        raise ValueError("not JSON (nested too deep)") from None
    if not isinstance(record, dict) or not ("prompt" in record or "messages" in record):
        raise ValueError('expected a JSON object with "prompt" or "messages"')
    text = record["prompt"] if "prompt" in record else _last_user_message(record["messages"])
    if not isinstance(text, str) or not text.strip():
        raise ValueError("the prompt must be text that is not empty")
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError("the prompt holds half of a surrogate pair, which is no text")
    return text


def _last_user_message(messages: object) -> object:
    """Raises ValueError."""
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ValueError('"messages" must be a list of objects with "role" and "content"')
    for message in reversed(messages):
        if message.get("role") == "user":
            return message.get("content")
    raise ValueError('"messages" holds no user message')


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
