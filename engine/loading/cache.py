"""The model cache: one folder a source digest, written beside and renamed, built by one process at a time."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from engine.errors import ModelLoadError

MANIFEST = "headlong.json"
_FULL = (errno.ENOSPC, errno.EDQUOT)


def cache_root() -> Path:
    """``$XDG_CACHE_HOME/headlong``, by default ``~/.cache/headlong`` (XDG Base Directory: a relative value is void)."""
    configured = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (configured if configured.is_absolute() else Path.home() / ".cache") / "headlong"


def build_once(
    name: str, build: Callable[[Path], None], progress: Callable[[str], None], what: str = "this model"
) -> Path:
    """The cached folder ``name``, made by ``build(empty folder)`` unless it is there, whole.

    A second process that wants the same folder waits for the first and uses its result. What a killed process left
    behind is removed. A complete folder is used even where the cache cannot be written. Raises ModelLoadError when the
    cache is full or not writable, and what ``build`` raises.
    """
    folder = cache_root() / name
    if is_complete(folder):
        return folder
    with _clear_errors(folder.parent):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder, progress, what):
            if not is_complete(folder):
                _build(folder, build)
    return folder


def is_complete(folder: Path) -> bool:
    """Whether the folder has every file its manifest lists, at the listed size."""
    try:
        files = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
        return all((folder / name).stat().st_size == size for name, size in files.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # no manifest, or not ours: build it anew
        return False


def require_space(folder: Path, needed: int, purpose: str) -> None:
    """Raises ModelLoadError unless the file system of ``folder`` has ``needed`` bytes free."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ModelLoadError(
            f"{purpose} needs {gibibytes(needed)} in {cache_root()}, where {gibibytes(free)} are free; "
            f"make room or set XDG_CACHE_HOME to a larger disk."
        )


def gibibytes(count: float) -> str:
    return f"{count / (1 << 30):.2f} GiB"


def _build(folder: Path, build: Callable[[Path], None]) -> None:
    partial = folder.with_name(f"{folder.name}.partial")
    for leftover in (partial, folder):
        if leftover.exists():
            shutil.rmtree(leftover)
    partial.mkdir()
    try:
        build(partial)
        sizes = {path.name: path.stat().st_size for path in sorted(partial.iterdir())}
        (partial / MANIFEST).write_text(json.dumps({"files": sizes}, indent=2) + "\n", encoding="utf-8")
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def _locked(folder: Path, progress: Callable[[str], None], what: str) -> Iterator[None]:
    """Holds the folder's lock, which the kernel frees when its owner dies."""
    lock = FileLock(folder.with_name(f"{folder.name}.lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        progress(f"Another process is preparing {what}; waiting for it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _clear_errors(root: Path) -> Iterator[None]:
    """Turns a file-system failure into one sentence; the writers below also wrap it in errors of their own."""
    try:
        yield
    except ModelLoadError:
        raise
    except Exception as error:
        if (isinstance(error, OSError) and error.errno in _FULL) or os.strerror(errno.ENOSPC) in str(error):
            raise ModelLoadError(
                f"The disk is full: {root} has no room for the converted model; make room or set XDG_CACHE_HOME."
            ) from error
        if isinstance(error, PermissionError) or (isinstance(error, OSError) and error.errno == errno.EROFS):
            raise ModelLoadError(
                f"The model cache {root} cannot be written ({error.strerror}); set XDG_CACHE_HOME to a writable folder."
            ) from error
        if isinstance(error, (FileExistsError, NotADirectoryError)):
            raise ModelLoadError(f"The model cache {root} is not a folder; set XDG_CACHE_HOME.") from error
        raise
