"""Prompts to train draft heads on: the served model answers them, and the heads learn from its answers."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from server.code_folder import CodeFolderError, code_prompts
from server.prompt_file import PromptFileError, read_prompt_file
from server.protocol.messages import TemplateMessage
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
    """A user's file, see ``server.prompt_file``, or the code in a folder, see ``server.code_folder``.

    Raises PromptError that names the line.
    """
    if path.is_dir():
        try:
            return [Prompt(text, path.resolve().name, "") for text in code_prompts(path, seed)]
        except CodeFolderError as error:
            raise PromptError(str(error)) from error
    try:
        turns = read_prompt_file(path)
    except PromptFileError as error:
        raise PromptError(str(error)) from error
    return [Prompt(text, path.name, "", before) for text, before in turns]


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
