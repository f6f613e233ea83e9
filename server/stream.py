"""An answer as server-sent events: ``data:`` frames with LF, comments only in silence, ``[DONE]`` last."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Mapping

import orjson
from sse_starlette.sse import AppStatus, EventSourceResponse
from starlette.types import Receive, Scope, Send

from server.answer import Answer
from server.context import ServerContext
from server.errors import ApiError, error_body, internal_error
from server.generation import Generation, Signal

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"

# sse-starlette ends every live stream at SIGTERM by default. Here the drain decides: streams may finish, and what is
# left at its end is aborted in the engine, which ends each stream with an error frame.
AppStatus.disable_automatic_graceful_drain()  # type: ignore[no-untyped-call]


def frame(body: object) -> bytes:
    """One event. JSON has no raw line break, so one ``data:`` line always holds it."""
    return b"data: " + orjson.dumps(body) + b"\n\n"


async def frames(context: ServerContext, generation: Generation, answer: Answer) -> AsyncIterator[bytes]:
    """The frames of a whole stream; a failure becomes one error frame, after which nothing follows."""
    last_content: float | None = None
    try:
        async for delta in generation.deltas(context.config.server.ping_seconds):
            if isinstance(delta, Signal):
                yield PING
                continue
            for chunk in answer.chunks(delta):
                yield frame(chunk)
            if delta.text:
                now = time.monotonic()
                if last_content is not None:
                    context.metrics.chunk(now - last_content)
                last_content = now
        for chunk in answer.closing_chunks():
            yield frame(chunk)
        yield DONE
    except ApiError as error:
        yield frame(error_body(error))
    except Exception:
        logger.exception("stream %s failed", generation.prepared.id)
        yield frame(error_body(internal_error()))


class AnswerStream(EventSourceResponse):
    """The streamed answer. Its generation is closed however the exchange ends, even before the first frame.

    The pings of the base class are off: they come on a fixed beat, ours only after silence.
    """

    def __init__(self, content: AsyncIterator[bytes], generation: Generation, headers: Mapping[str, str]) -> None:
        super().__init__(content, headers={"Cache-Control": "no-cache", **headers}, ping=0, sep="\n")
        self._generation = generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._generation.close()
