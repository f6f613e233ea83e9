"""Errors that cross from the engine to its callers. Each message is one sentence a user can act on."""

from __future__ import annotations


class EngineError(Exception):
    """Base class of every error the engine raises on purpose."""


class ModelLoadError(EngineError):
    """The model cannot be served: missing file, unsupported architecture, broken checkpoint, too little memory."""


class InvalidRequestError(EngineError):
    """A request the engine cannot take, found before it is queued.

    ``param`` names the offending field in the engine's words, e.g. ``"prompt"`` or ``"speculation.method"``;
    ``code`` is an OpenAI error code, e.g. ``"context_length_exceeded"``.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class EngineBusyError(EngineError):
    """The waiting queue is full; retry after ``retry_after`` seconds."""

    def __init__(self, message: str, *, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineDeadError(EngineError):
    """The engine thread has stopped, so no request can be answered."""


class RequestFailedError(EngineError):
    """One request failed inside the engine (non-finite logits, a fault in its own processing); others go on."""


class HeadTrainingError(EngineError):
    """Heads cannot be trained with these settings, prompts or files."""
