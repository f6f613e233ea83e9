"""What ``bench`` and ``verify`` share at the terminal: a bar while they measure, and every failure as one line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from server.bench.client import ServerFault
from server.bench.datasets import DatasetError
from server.bench.report import ReportError
from server.cli.failure import fail


@contextmanager
def measuring_bar(label: str, total: int) -> Iterator[Callable[[object], None]]:
    """A bar on stderr; call what it gives once an answer or pair."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(label, total=total)

        def advance(_: object) -> None:
            bar.advance(task)

        yield advance


@contextmanager
def failures_in_one_line(url: str) -> Iterator[None]:
    """What the server, the prompts or the report's file refuse ends the command with status 1."""
    try:
        yield
    except (DatasetError, ServerFault, ReportError) as error:
        fail(str(error))
    except httpx.InvalidURL as error:
        fail(f"{url} is not a URL: {error}")
    except httpx.HTTPError as error:
        fail(f"{url} does not answer: {type(error).__name__} {error}".rstrip())
