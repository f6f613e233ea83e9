"""Which prompts are trained on: a user's or the built-in ones, each once, never those that measure the heads."""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from server.bench.datasets import DatasetError, load_dataset
from server.code_folder import folder_digest, folder_languages
from server.training.config import PromptSection
from server.training.likeness import SHINGLE, THRESHOLD
from server.training.prompts import Prompt, PromptError, built_in_prompts, different, distinct, excluding, read_prompts
from server.training.recipe import CHAT_PACKAGE
from server.version import VERSION

# Their prompts measure the heads, so nothing trains on them.
BENCHMARKS = ("mt-bench", "humaneval", "edits")


@dataclass(frozen=True, slots=True)
class Selection:
    """The prompts to train on, and what run.yaml says about them: nothing of a user's but the name of the file or
    folder and its hash."""

    prompts: list[Prompt]
    facts: dict[str, Any]


def training_prompts(section: PromptSection) -> Selection:
    """The prompts of a file, a folder of code or the built-in recipe, without repetitions, near-duplicates and those of
    installed benchmarks.

    Raises PromptError.
    """
    path = None if section.file is None else Path(section.file).expanduser()
    read = built_in_prompts(section.seed) if path is None else read_prompts(path, section.seed)
    once = distinct(read)
    unlike = different(once)
    benchmarks = _benchmarks()
    kept = excluding(unlike, [text for texts in benchmarks.values() for text in texts or ()])
    if not kept:
        raise PromptError(f"every prompt of {section.file} is one of a benchmark, and those measure the heads")
    facts = {
        "prompts": _sources(kept),
        "selection": {
            "read": len(read),
            "repeated": len(read) - len(once),
            "nearly_repeated": len(once) - len(unlike),
            "of_benchmarks": len(unlike) - len(kept),
            "kept": len(kept),
            "conversations": sum(bool(prompt.before) for prompt in kept),
            "shingle_words": SHINGLE,
            "jaccard": THRESHOLD,
        },
        "benchmarks": {name: None if texts is None else len(texts) for name, texts in benchmarks.items()},
        "languages": {"text": "English", "code": "mostly Python"} if path is None else _languages(path),
    }
    if path is not None:
        facts["given"] = _given(path)
    return Selection(kept, facts)


def _benchmarks() -> dict[str, Sequence[str] | None]:
    """Their prompts; None for one that is not installed, so cannot have been used to measure either."""
    found: dict[str, Sequence[str] | None] = {}
    for name in BENCHMARKS:
        try:
            found[name] = load_dataset(name).prompts
        except DatasetError:
            found[name] = None
    return found


def _sources(prompts: Sequence[Prompt]) -> list[dict[str, Any]]:
    counts = Counter((prompt.source, prompt.licence) for prompt in prompts)
    return [
        {"source": source, "licence": licence or None, "from": _origin(source, licence), "prompts": count}
        for (source, licence), count in counts.items()
    ]


def _origin(source: str, licence: str) -> str | None:
    """Package or program with its version; None for a user's own prompts."""
    if not licence:
        return None
    if source == "cpython":
        return f"the standard library of Python {platform.python_version()}"
    if source == CHAT_PACKAGE:
        return f"package {CHAT_PACKAGE} {importlib.metadata.version(CHAT_PACKAGE)}"
    return f"headlong {VERSION}"


def _given(path: Path) -> dict[str, str]:
    if path.is_dir():
        return {"kind": "folder of code", "name": path.resolve().name, "sha256": folder_digest(path)}
    return {"kind": "file", "name": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}


def _languages(path: Path) -> dict[str, Any] | None:
    """Passages by programming language, of a folder of code; what language text is in is not looked into."""
    return {"passages": folder_languages(path)} if path.is_dir() else None
