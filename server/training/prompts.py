"""Prompts to train draft heads on: the served model answers them, and the heads learn from its answers."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from server.code_folder import CodeFolderError, code_prompts
from server.errors import ApiError
from server.protocol.messages import TemplateMessage, template_messages
from server.training.likeness import without_near_duplicates, words
from server.training.recipe import SourceMissing, portions

LONGEST = 1200
"""Characters of a built-in prompt; longer ones would leave little room for the answer in a training sequence."""

_SHARED_WORDS = 8


class PromptError(Exception):
    """There are no prompts to train on; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """text: the user message to answer. source: where it came from. licence: SPDX identifier, empty for a user's own.
    before: the conversation up to that message."""

    text: str
    source: str
    licence: str
    before: tuple[TemplateMessage, ...] = ()

    @property
    def messages(self) -> list[TemplateMessage]:
        """The whole conversation, for a chat template."""
        return [*self.before, {"role": "user", "content": self.text}]


def built_in_prompts(seed: int) -> list[Prompt]:
    """The built-in recipe, shuffled; the same seed and installed packages give the same list.

    Raises PromptError when a needed package is missing.
    """
    try:
        drawn = portions(seed)
    except SourceMissing as error:
        raise PromptError(str(error)) from error
    prompts = [
        Prompt(text, portion.source, portion.licence)
        for portion in drawn
        for text in portion.texts
        if len(text) <= LONGEST
    ]
    random.Random(seed).shuffle(prompts)
    return prompts


def read_prompts(path: Path, seed: int = 0) -> list[Prompt]:
    """A user's file: JSON lines with ``prompt`` or ``messages``, when its name ends in .jsonl; else one prompt a line.
    Of a folder the code in it, see ``server.code_folder``.

    A conversation is used up to its last user message, which the model is to answer.
    Raises PromptError that names the line.
    """
    if path.is_dir():
        try:
            return [Prompt(text, path.resolve().name, "") for text in code_prompts(path, seed)]
        except CodeFolderError as error:
            raise PromptError(str(error)) from error
    try:
        # Split at line feeds alone: JSON may hold the other characters that Python takes for line ends.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(f"{path} cannot be read as a file of prompts: {error}") from error
    prompts = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            text, before = _from_json(line) if path.suffix == ".jsonl" else (line.strip(), ())
            prompts.append(Prompt(text, path.name, "", before))
        except ValueError as error:
            raise PromptError(f"{path}, line {number}: {error}") from error
    if not prompts:
        raise PromptError(f"{path} holds no prompt")
    return prompts


def _from_json(line: str) -> tuple[str, tuple[TemplateMessage, ...]]:
    """A user message and the conversation before it. Raises ValueError."""
    try:
        record: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error})") from error
    except RecursionError:
        raise ValueError("not JSON (nested too deep)") from None
    if not isinstance(record, dict) or not ("prompt" in record or "messages" in record):
        raise ValueError('expected a JSON object with "prompt" or "messages"')
    text, before = (record["prompt"], ()) if "prompt" in record else _last_turn(record["messages"])
    if not isinstance(text, str) or not text.strip():
        raise ValueError("the prompt must be text that is not empty")
    for said in (text, *(message["content"] for message in before)):
        if any("\ud800" <= character <= "\udfff" for character in said):
            raise ValueError("the prompt holds half of a surrogate pair, which is no text")
    return text, before


def _last_turn(given: object) -> tuple[str, tuple[TemplateMessage, ...]]:
    """The last user message and those before it. Raises ValueError."""
    if not isinstance(given, list):
        raise ValueError('"messages" must be a list of objects with "role" and "content"')
    try:
        messages = template_messages(given)
    except ApiError as error:
        raise ValueError(str(error)) from error
    for index in range(len(messages) - 1, -1, -1):
        if messages[index]["role"] == "user":
            return messages[index]["content"], tuple(messages[:index])
    raise ValueError('"messages" holds no user message')


def excluding(prompts: Iterable[Prompt], benchmarks: Sequence[str]) -> list[Prompt]:
    """Without prompts that share eight words in a row with a benchmark's text, or all of their words.

    Every message of a conversation counts. Words are compared in lower case and without punctuation. Near-duplicates
    of a benchmark's text are among them: texts so similar (``server.training.likeness``) have long runs in common.
    """
    measured = [words(text) for text in benchmarks]
    wholes = set(measured)
    runs = {run for found in measured for run in _runs(found)}
    kept = []
    for prompt in prompts:
        said = [words(message["content"]) for message in prompt.messages]
        if wholes.isdisjoint(said) and all(runs.isdisjoint(_runs(found)) for found in said):
            kept.append(prompt)
    return kept


def _runs(found: tuple[str, ...]) -> set[tuple[str, ...]]:
    return {found[i : i + _SHARED_WORDS] for i in range(len(found) - _SHARED_WORDS + 1)}


def distinct(prompts: Iterable[Prompt]) -> list[Prompt]:
    """The first of each text or conversation, whatever its case, spacing and punctuation."""
    first: dict[tuple[tuple[str, ...], ...], Prompt] = {}
    for prompt in prompts:
        key = tuple(words(message["content"]) or (message["content"],) for message in prompt.messages)
        first.setdefault(key, prompt)
    return list(first.values())


def different(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Without near-duplicates of prompts before them, so that none stands on both sides of the split into prompts to
    train on and to test on. System messages do not count: a user's conversations may all begin with the same one."""
    said = [
        "\n".join(message["content"] for message in prompt.messages if message["role"] in ("user", "assistant"))
        for prompt in prompts
    ]
    return [prompts[index] for index in without_near_duplicates(said)]
