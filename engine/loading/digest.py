"""Digests that identify a model's weights, remembered so that unchanged files are hashed once."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from engine.loading.cache import cache_root

logger = logging.getLogger(__name__)

_CHUNK = 1 << 20
_SLOW = 2 << 30  # bytes whose hashing takes seconds, so that the user is told
_HUB_BLOB = re.compile(r"[0-9a-f]{64}")


def joined_digest(parts: Sequence[Path], progress: Callable[[str], None]) -> str:
    """Hex SHA-256 of the files' bytes joined in order; of one file, what ``sha256sum`` prints."""
    known = _Remembered(parts)
    digest = known.digest
    if digest is None:
        if sum(part.stat().st_size for part in parts) > _SLOW:
            progress(f"Hashing {parts[0].name} (once)")
        digest = _hash(parts)
        known.remember(digest)
    return digest


def weights_digest(files: Sequence[Path], progress: Callable[[str], None]) -> str:
    """Hex SHA-256 over the lines ``name size sha256`` of a checkpoint's weight files, sorted by name.

    Every byte of the weights counts, so a fine-tune with the same shapes has another digest; configuration and
    tokenizer do not. A hub cache names its files by their SHA-256, which is then taken from the name.
    """
    lines = []
    for file in sorted(files, key=lambda path: path.name):
        blob = file.resolve()
        is_hub_blob = blob.parent.name == "blobs" and _HUB_BLOB.fullmatch(blob.name) is not None
        sha256 = blob.name if is_hub_blob else joined_digest([file], progress)
        lines.append(f"{file.name} {file.stat().st_size} {sha256}\n")
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _hash(parts: Sequence[Path]) -> str:
    total = hashlib.sha256()
    for part in parts:
        with part.open("rb") as file:
            while chunk := file.read(_CHUNK):
                total.update(chunk)
    return total.hexdigest()


class _Remembered:
    """The digest of files as long as path, size, modification time and inode of each stay what they were."""

    def __init__(self, parts: Sequence[Path]) -> None:
        stats = [(str(part.resolve()), part.stat()) for part in parts]
        self._identity = json.dumps([[path, stat.st_size, stat.st_mtime_ns, stat.st_ino] for path, stat in stats])
        key = hashlib.sha256("\n".join(path for path, _ in stats).encode()).hexdigest()
        self._file = cache_root() / "digests" / f"{key}.json"

    @property
    def digest(self) -> str | None:
        try:
            entry = json.loads(self._file.read_text(encoding="utf-8"))
        except (OSError, ValueError):  # not there yet, or a write that was cut short: hash again
            return None
        known = entry.get("digest") if isinstance(entry, dict) and entry.get("identity") == self._identity else None
        return known if isinstance(known, str) else None

    def remember(self, digest: str) -> None:
        """Hashing again next time is only slower, so a cache that cannot be written is no error."""
        beside = self._file.with_suffix(f".{os.getpid()}")
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            beside.write_text(json.dumps({"identity": self._identity, "digest": digest}), encoding="utf-8")
            beside.replace(self._file)
        except OSError as error:
            logger.info("The digest of %s is hashed anew at each start: %s", self._file.name, error)
            with contextlib.suppress(OSError):
                beside.unlink(missing_ok=True)
