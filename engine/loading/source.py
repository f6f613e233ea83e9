"""Finding the files of a model: a local folder, a GGUF file, a hub repository, or a file in an installed package."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engine.config import ModelConfig
from engine.errors import ModelLoadError
from engine.loading.hub import download
from engine.loading.package import find_gguf

PACKAGE_PREFIX = "package:"
GGUF_MAGIC = b"GGUF"
ORIGIN_FILE = "origin.json"  # names a model that training has changed, and what it was made from
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_QUANTISATION = re.compile(r"[._-](?:UD-)?(?:[IT]?Q\d\w*|B?F16|FP?16|FP?32|MXFP4\w*)$", re.IGNORECASE)
_SPLIT_GGUF = re.compile(r"-\d{5}-of-\d{5}$")


@dataclass(frozen=True, slots=True)
class FolderSource:
    """A folder in transformers' layout: config.json, safetensors, tokenizer files."""

    name: str
    folder: Path


@dataclass(frozen=True, slots=True)
class GgufSource:
    """A GGUF file, maybe cut into parts that make it up when joined in order.

    sha256: what the file's publisher says the joined bytes hash to, where it says so.
    """

    name: str
    parts: tuple[Path, ...]
    sha256: str | None = None


def resolve(model: ModelConfig, progress: Callable[[str], None]) -> FolderSource | GgufSource:
    """The source that ``model.path`` names. A hub id may download; nothing else touches the network.

    Raises ModelLoadError when there is no such thing.
    """
    path = Path(model.path).expanduser()
    is_hub_id = not model.path.startswith(PACKAGE_PREFIX) and not path.exists() and _is_hub_id(model.path)
    if model.revision is not None and not is_hub_id:
        raise ModelLoadError(f"model.revision is for hub ids alone, and {model.path} is not one.")
    if model.path.startswith(PACKAGE_PREFIX):
        found = find_gguf(model.path.removeprefix(PACKAGE_PREFIX))
        return GgufSource(base_name(found.file_name), found.parts, found.sha256)
    if path.is_dir():
        return FolderSource(_folder_name(path), path)
    if path.is_file():
        return _gguf_file(path)
    if is_hub_id:
        return FolderSource(model.path.split("/")[1], download(model, progress))
    raise ModelLoadError(
        f"There is no file or folder {model.path} (a hub id has the form owner/name, a package package:NAME)."
    )


def base_name(file_name: str) -> str:
    """A GGUF's file name without its ending and quantisation: ``SmolLM2-135M-Instruct.Q4_1.gguf`` is
    ``SmolLM2-135M-Instruct``."""
    stem = file_name.removesuffix(".gguf")
    return _QUANTISATION.sub("", stem) or stem


def _is_hub_id(text: str) -> bool:
    return _HUB_ID.fullmatch(text) is not None and text[0] not in ".~" and not text.endswith(".gguf")


def _folder_name(folder: Path) -> str:
    """The folder's own name; for a hub snapshot (models--owner--name/snapshots/commit) the repository's, for a changed
    model (``engine.changed_model``) the one it was given."""
    given = _given_name(folder)
    if given is not None:
        return given
    resolved = folder.resolve()
    repository = resolved.parent.parent.name
    if resolved.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.split("--")[-1]
    return resolved.name


def _given_name(folder: Path) -> str | None:
    try:
        name = json.loads((folder / ORIGIN_FILE).read_text(encoding="utf-8"))["name"]
    except (OSError, ValueError, KeyError, TypeError):  # none, or a file of the same name that is not ours
        return None
    return name if isinstance(name, str) and name else None


def _gguf_file(path: Path) -> GgufSource:
    try:
        with path.open("rb") as file:
            magic = file.read(len(GGUF_MAGIC))
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error.strerror}.") from error
    if magic != GGUF_MAGIC:
        raise ModelLoadError(f"{path} is not a GGUF file; a safetensors model is served by naming its folder.")
    if _SPLIT_GGUF.search(path.stem):
        raise ModelLoadError(f"{path} is one part of a split GGUF; merge the parts into one file first.")
    return GgufSource(base_name(path.name), (path,))
