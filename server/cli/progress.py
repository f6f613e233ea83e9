"""What a long command is doing: one live line on a terminal, plain lines elsewhere; on stderr."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.status import Status
from rich.text import Text


class Progress:
    """A context manager; call it with a line, from any thread."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True, soft_wrap=True)
        self._status = Status("", console=self._console) if self._console.is_terminal else None

    def __enter__(self) -> Self:
        if self._status is not None:
            self._status.start()
        return self

    def __call__(self, line: str) -> None:
        text = Text(line)  # a str would be read as markup
        if self._status is not None:
            self._status.update(text)
        else:
            self._console.print(text)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def stop(self) -> None:
        """Takes the live line away; may be called twice."""
        if self._status is not None:
            self._status.stop()
