"""A report's head: what was run, on what, with which prompts; and how it gets to its file."""

from __future__ import annotations

import json
import os
import platform
import re
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from server.bench.client import ServerInfo
from server.bench.datasets import Dataset
from server.version import VERSION

_SECRET = "--api-key"
_PASSWORD = re.compile(r"(https?://)[^/\s@]*@")


class ReportError(Exception):
    """The report cannot be written; one line."""


def report_head(server: ServerInfo, datasets: Iterable[Dataset]) -> dict[str, Any]:
    """What makes two reports comparable."""
    return {
        "command": ["headlong", *without_secrets(sys.argv[1:])],
        "headlong": VERSION,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "server": server.as_dict(),
        "datasets": {data.name: {"prompts": len(data.prompts), "sha256": data.digest} for data in datasets},
    }


def without_secrets(arguments: Sequence[str]) -> list[str]:
    """The arguments of a command without API key and passwords in URLs: a report is made to be shown."""
    shown: list[str] = []
    for argument in arguments:
        if shown and shown[-1] == _SECRET:
            shown.append("...")
        elif argument.startswith(f"{_SECRET}="):
            shown.append(f"{_SECRET}=...")
        else:
            shown.append(_PASSWORD.sub(r"\1...@", argument))
    return shown


def check_report_path(path: Path | None) -> None:
    """Asked before measuring, so that no result is lost for want of a folder. Raises ReportError."""
    if path is None:
        return
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ReportError(f"cannot write {path}: {'it is a folder' if path.is_dir() else 'its folder does not exist'}")
    if path.exists() and not os.access(path, os.W_OK):
        raise ReportError(f"cannot write {path}: it may not be changed")
    if not path.exists():
        check_writable(path.absolute().parent)


def check_writable(folder: Path) -> None:
    """Raises ReportError unless files can be made in ``folder``."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return
    except OSError as error:
        raise ReportError(f"cannot write in {folder}: {error.strerror}") from error


def write_report(path: Path, report: dict[str, Any]) -> None:
    """Raises ReportError."""
    try:
        path.write_text(json.dumps(report, indent=1) + "\n")
    except OSError as error:
        raise ReportError(f"cannot write {path}: {error.strerror}") from error
