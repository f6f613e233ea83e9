"""The one source of an answer: all choices' engine outputs merged into a stream of deltas."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from enum import Enum

from engine.errors import EngineDeadError
from engine.outputs import RequestOutput
from server.choice import Choice, ChoiceDelta
from server.context import ServerContext
from server.detokenizer import new_detokenizer
from server.errors import NO_RETRY, SERVER_ERROR, ApiError, as_api_error, internal_error, retry_after
from server.prepare import PreparedRequest
from server.stop_strings import StopMatcher

logger = logging.getLogger(__name__)


class Signal(Enum):
    """What a delta stream carries beside deltas."""

    PING = "ping"


class _TimedOut:
    """The deadline passed."""


_Event = tuple[Choice, RequestOutput | Exception] | Signal | _TimedOut


def _timeout_error(seconds: float) -> ApiError:
    # 408 is retried by the SDKs, and the same request would run into the same limit.
    message = f"The request took longer than the {seconds:g} seconds that this server allows."
    return ApiError(408, message, SERVER_ERROR, "request_timeout", None, NO_RETRY)


def _aborted_error() -> ApiError:
    """The engine ended a request that nobody here ended: the server is going down."""
    message = "The server is shutting down."
    return ApiError(503, message, SERVER_ERROR, "service_unavailable", None, retry_after(5))


class Generation:
    """Runs one answer's engine requests. ``close`` must be called however it ends; it may be called twice."""

    def __init__(self, context: ServerContext, prepared: PreparedRequest) -> None:
        self.prepared = prepared
        self.choices = [
            Choice(i, request, new_detokenizer(context.tokenizer), StopMatcher(prepared.wire.stop))
            for i, request in enumerate(prepared.choices)
        ]
        self._context = context
        self._engine = context.engine
        self._events: asyncio.Queue[_Event] = asyncio.Queue()
        self._pumps: dict[int, asyncio.Task[None]] = {}
        self._timers: list[asyncio.TimerHandle] = []
        self._last_tokens_at: dict[int, float] = {}
        self._last_written = 0.0
        self._has_ping_queued = False
        self._is_closed = False

    def start(self) -> None:
        """Queues every choice, or none; without a pause between check and queue. Raises what ``check`` raises."""
        for request in self.prepared.choices:
            self._engine.check(request)
        added: list[AsyncIterator[RequestOutput]] = []
        try:
            for request in self.prepared.choices:
                added.append(self._engine.add(request))
        except BaseException:
            for request in self.prepared.choices[: len(added)]:
                self._engine.abort(request.request_id)
            self._is_closed = True
            raise
        self._context.live_streams.add(self.prepared.id)
        for choice, outputs in zip(self.choices, added, strict=True):
            self._pumps[choice.index] = asyncio.create_task(self._pump(choice, outputs))
        timeout = self._context.config.server.request_timeout
        if timeout is not None:
            loop = asyncio.get_running_loop()
            self._timers.append(loop.call_later(timeout, self._events.put_nowait, _TimedOut()))

    async def deltas(self, ping_seconds: float | None = None) -> AsyncIterator[ChoiceDelta | Signal]:
        """Deltas of all choices as they come, until each is finished; a PING after so many silent seconds.

        Raises ApiError when the engine fails, the server shuts down, or the request takes too long.
        """
        loop = asyncio.get_running_loop()
        self._last_written = loop.time()
        if ping_seconds is not None:
            self._arm_ping(ping_seconds, ping_seconds)
        while any(choice.finish_reason is None for choice in self.choices):
            event = await self._events.get()
            if isinstance(event, _TimedOut):
                timeout = self._context.config.server.request_timeout
                assert timeout is not None
                raise _timeout_error(timeout)
            if isinstance(event, Signal):
                self._has_ping_queued = False
            item = event if isinstance(event, Signal) else self._take(*event)
            if item is not None:
                yield item
                self._last_written = loop.time()

    def close(self) -> None:
        """Aborts what still runs and counts it as aborted; drops timers and tasks."""
        if self._is_closed:
            return
        self._is_closed = True
        for timer in self._timers:
            timer.cancel()
        for choice in self.choices:
            if choice.index in self._pumps:
                self._end(choice, choice.finish_reason or "abort")
        self._context.live_streams.discard(self.prepared.id)

    def _take(self, choice: Choice, output: RequestOutput | Exception) -> ChoiceDelta | None:
        if choice.finish_reason is not None:
            return None  # it came after the cut
        if isinstance(output, Exception):
            self._end(choice, "error")
            raise as_api_error(output)
        delta = choice.feed(output)
        self._count_tokens(choice, output)
        if output.finish_reason == "error" and choice.finish_reason is None:
            logger.error("request %s failed in the engine: %s", choice.request.request_id, output.error)
            self._end(choice, "error")
            raise internal_error()
        if output.finish_reason == "abort" and choice.finish_reason is None:
            raise _aborted_error()
        if choice.finish_reason is not None:
            self._end(choice, choice.finish_reason)
        return delta

    def _count_tokens(self, choice: Choice, output: RequestOutput) -> None:
        now = time.monotonic()
        interval = None
        if choice.kept:
            last = self._last_tokens_at.get(choice.index)
            interval = None if last is None else now - last
            self._last_tokens_at[choice.index] = now
        self._context.metrics.tokens(choice.kept, output.drafted, output.is_decode_step, interval)

    def _end(self, choice: Choice, reason: str) -> None:
        """Frees and counts a choice, once."""
        self._pumps.pop(choice.index).cancel()
        self._engine.abort(choice.request.request_id)
        num_prompt_tokens = len(choice.request.prompt_token_ids)
        self._context.metrics.finished(reason, choice.times, num_prompt_tokens, choice.num_tokens)

    async def _pump(self, choice: Choice, outputs: AsyncIterator[RequestOutput]) -> None:
        """Moves one choice's outputs to the merged queue; ends with the terminal one."""
        try:
            async for output in outputs:
                self._events.put_nowait((choice, output))
                if output.finish_reason is not None:
                    return
            raise EngineDeadError("the engine ended a request without a terminal output")
        except Exception as error:
            self._events.put_nowait((choice, error))

    def _arm_ping(self, delay: float, interval: float) -> None:
        loop = asyncio.get_running_loop()
        self._timers = [timer for timer in self._timers if timer.when() > loop.time()]
        self._timers.append(loop.call_later(delay, self._on_ping_timer, interval))

    def _on_ping_timer(self, interval: float) -> None:
        silent = asyncio.get_running_loop().time() - self._last_written
        is_due = silent + 1e-3 >= interval
        # A reader that does not read gets one ping when it comes back, not all those it missed.
        if is_due and not self._has_ping_queued:
            self._has_ping_queued = True
            self._events.put_nowait(Signal.PING)
        self._arm_ping(interval if is_due else interval - silent, interval)
