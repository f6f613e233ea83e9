"""How a command ends that could not do what it was told: one line on stderr and a status."""

from __future__ import annotations

import sys
from typing import NoReturn

import typer

BAD_CONFIGURATION = 2  # the status of a wrong command line too
FAILED = 1


def fail(message: str, status: int = FAILED) -> NoReturn:
    print(f"headlong: {message}", file=sys.stderr, flush=True)
    raise typer.Exit(status)
