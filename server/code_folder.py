"""A folder of somebody's code as prompts: passages to go on with, to explain, to change.

For ``headlong train --prompts FOLDER`` and ``headlong bench --dataset FOLDER``.
"""

from __future__ import annotations

import hashlib
import os
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Suffix: the word behind a fence.
LANGUAGES = {
    ".py": "python", ".pyi": "python", ".js": "javascript", ".jsx": "jsx", ".ts": "typescript", ".tsx": "tsx",
    ".java": "java", ".kt": "kotlin", ".scala": "scala", ".go": "go", ".rs": "rust", ".c": "c", ".h": "c", ".cc": "cpp",
    ".cpp": "cpp", ".hpp": "cpp", ".cs": "csharp", ".swift": "swift", ".rb": "ruby", ".php": "php", ".pl": "perl",
    ".lua": "lua", ".r": "r", ".jl": "julia", ".hs": "haskell", ".ml": "ocaml", ".ex": "elixir", ".exs": "elixir",
    ".erl": "erlang", ".clj": "clojure", ".dart": "dart", ".sh": "bash", ".sql": "sql", ".html": "html", ".css": "css",
    ".vue": "vue", ".svelte": "svelte", ".tf": "hcl", ".yaml": "yaml", ".yml": "yaml", ".toml": "toml",
}  # fmt: skip

_SKIPPED = frozenset("node_modules __pycache__ build dist target vendor venv env site-packages".split())
_LARGEST = 512 << 10  # bytes; larger files are generated
_LONGEST_LINE = 400  # characters; so are files with longer ones
_LONGEST = 900  # characters of a passage, about 250 tokens
_SHORTEST = 120

_CONTINUE = (
    "Continue this code from `{path}`.\n\n{half}",
    "Write what follows in `{path}`:\n\n{half}",
    "Complete this code.\n\n{half}",
)
_ASK = (
    "Explain this code from `{path}` step by step.\n\n{whole}",
    "Write tests for this code from `{path}`.\n\n{whole}",
    "Review this code and suggest improvements.\n\n{whole}",
    "Add comments to this code.\n\n{whole}",
    "Rewrite this code so that it is easier to read.\n\n{whole}",
    "Is there a bug in this code? Show the corrected code.\n\n{whole}",
    "Repeat this code with better error handling.\n\n{whole}",
    "What does this code do, and when can it fail?\n\n{whole}",
)


class CodeFolderError(Exception):
    """The folder holds no code that could be asked about."""


@dataclass(frozen=True, slots=True)
class Passage:
    """path: relative to the folder. text: whole lines."""

    path: str
    language: str
    text: str


def code_prompts(folder: Path, seed: int = 0) -> list[str]:
    """Of each passage one prompt to go on with it and one about it, shuffled; the same folder gives the same list.

    Raises CodeFolderError.
    """
    rng = random.Random(seed)
    prompts = []
    for passage in passages(folder):
        lines = passage.text.splitlines(keepends=True)
        half = "".join(lines[: (len(lines) + 1) // 2])
        for wordings in (_CONTINUE, _ASK):
            prompts.append(
                rng.choice(wordings).format(
                    path=passage.path, half=_fenced(passage, half), whole=_fenced(passage, passage.text)
                )
            )
    if not prompts:
        raise CodeFolderError(f"{folder} holds no code to ask about (files of source text, such as .py or .ts)")
    rng.shuffle(prompts)
    return prompts


def _fenced(passage: Passage, code: str) -> str:
    return f"```{passage.language}\n{code.rstrip()}\n```"


def passages(folder: Path) -> Iterator[Passage]:
    """In the order of the files' names. Hidden and generated files, and those that are no text, are passed over."""
    for path in _files(folder):
        text = _text(path)
        if text is not None:
            relative = path.relative_to(folder).as_posix()
            for part in _cut(text):
                yield Passage(relative, LANGUAGES[path.suffix.lower()], part)


def folder_digest(folder: Path) -> str:
    """Hex SHA-256 over the names and texts of the files that are asked about."""
    digest = hashlib.sha256()
    for path in _files(folder):
        text = _text(path)
        if text is not None:
            for part in (path.relative_to(folder).as_posix(), text):
                digest.update(hashlib.sha256(part.encode()).digest())
    return digest.hexdigest()


def folder_languages(folder: Path) -> dict[str, int]:
    """Passages of each language, most first."""
    return dict(Counter(passage.language for passage in passages(folder)).most_common())


def _files(folder: Path) -> Iterator[Path]:
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in _SKIPPED)
        for name in sorted(names):
            path = Path(place) / name
            if not name.startswith(".") and path.suffix.lower() in LANGUAGES and path.is_file():
                yield path


def _text(path: Path) -> str | None:
    try:
        if path.stat().st_size > _LARGEST:
            return None
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError):
        return None
    if "\0" in text or any(len(line) > _LONGEST_LINE for line in text.splitlines()):
        return None
    return text


def _cut(text: str) -> Iterator[str]:
    """Passages of whole lines that end, where possible, before a line at the margin that follows an empty one."""
    passage = ""
    for block in _blocks(text):
        if passage and len(passage) + len(block) > _LONGEST:
            yield from _long_enough(passage)
            passage = ""
        passage += block
    yield from _long_enough(passage)


def _blocks(text: str) -> Iterator[str]:
    block, after_empty = "", False
    for line in text.splitlines(keepends=True):
        begins = after_empty and not line[0].isspace()
        if block and (begins or len(block) + len(line) > _LONGEST):
            yield block
            block = ""
        block += line
        after_empty = not line.strip()
    if block:
        yield block


def _long_enough(passage: str) -> Iterator[str]:
    if len(passage.strip()) >= _SHORTEST:
        yield passage.strip("\n") + "\n"
