"""One HTTP/1.1 connection: uvicorn's httptools protocol with deadlines for what a client has begun to send.

uvicorn alone keeps a half-sent header or body open for ever; here each has a clock and the header a size.
"""

from __future__ import annotations

import asyncio
import http
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import orjson
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds and bytes one connection is granted.

    idle_seconds: silence before a request. header_seconds: first byte of a request to the end of its headers.
    body_seconds: from there to the end of its body. max_waiting_bytes: of requests that wait behind an answer.
    """

    idle_seconds: float = 75.0
    header_seconds: float = 10.0
    body_seconds: float = 60.0
    max_header_bytes: int = 65_536
    max_waiting_bytes: int = 1 << 20


class DeadlineConnection(HttpToolsProtocol):
    """A connection under ``deadlines`` (``connection_class`` sets them).

    While a request is arriving one timer runs: the header's, then the body's. A pipelined request that arrives during
    an earlier answer waits for that answer's end, so that the answer is not cut. uvicorn stops reading meanwhile and
    on a loss tells the newest request alone; here reading goes on, so that a client's leaving is seen, and the
    answer under way is told.
    """

    deadlines: ClassVar[Deadlines] = Deadlines()
    _timer: asyncio.TimerHandle | None = None
    _in_headers: bool = False
    _in_body: bool = False
    _header_bytes: int = 0
    _waiting_bytes: int = 0
    _active: RequestResponseCycle | None = None
    _is_refused: bool = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._arm(self.deadlines.idle_seconds, self.transport.close)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.transport.is_closing():
            return
        self._keep_reading(len(data))
        if self._in_headers:
            self._header_bytes += len(data)
            if self._header_bytes > self.deadlines.max_header_bytes:
                self._refuse(431, "request_too_large", "The request's headers are too large.")
        elif not self._in_body and self._timer is None and self._answered():
            # Blank lines between requests begin none and stop uvicorn's keep-alive clock; they get this one.
            self._arm(self.deadlines.header_seconds, self.transport.close)

    def _keep_reading(self, size: int) -> None:
        """While requests wait behind an answer, up to a bound; who sends more than that is not worth the memory."""
        if not self.pipeline:
            self._waiting_bytes = 0
            return
        self._waiting_bytes += size
        if self._waiting_bytes > self.deadlines.max_waiting_bytes:
            self.transport.abort()
        else:
            self.flow.resume_reading()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._active = cycle
        super()._start_asgi_task(cycle, app)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_headers, self._header_bytes = True, 0
        self._arm(self.deadlines.header_seconds, self._header_late)

    def on_headers_complete(self) -> None:
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if size > self.deadlines.max_header_bytes:
            self._refuse(431, "request_too_large", "The request's headers are too large.")
        if self._is_refused:
            return
        super().on_headers_complete()
        self._in_headers, self._in_body = False, True
        self._arm(self.deadlines.body_seconds, self._body_late)

    def on_body(self, body: bytes) -> None:
        if not self._is_refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._is_refused:
            return
        super().on_message_complete()
        self._in_body = False
        self._disarm()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        self.pipeline.clear()
        if self._active is not None and not self._active.response_complete:
            self._active.disconnected = True
            self._active.message_event.set()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "invalid_request", msg)

    def _answered(self) -> bool:
        return not self.pipeline and (self.cycle is None or self.cycle.response_complete)

    def _header_late(self) -> None:
        if not self._answered():
            self._arm(self.deadlines.header_seconds, self._header_late)
            return
        self._refuse(408, "request_timeout", "The request's headers did not arrive in time.")

    def _body_late(self) -> None:
        if self.pipeline:
            self._arm(self.deadlines.body_seconds, self._body_late)
            return
        self._refuse(408, "request_timeout", "The request's body did not arrive in time.")

    def _arm(self, seconds: float, action: Callable[[], None]) -> None:
        self._disarm()
        self._timer = self.loop.call_later(seconds, action)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refuse(self, status: int, code: str, message: str) -> None:
        """Answers with an error object where no answer has begun, and closes."""
        self._disarm()
        self._is_refused = True
        if self.transport.is_closing():
            return
        if self._answered() or not self.cycle.response_started:
            self.transport.write(_error_response(status, code, message))
        self.transport.close()


def connection_class(deadlines: Deadlines) -> type[DeadlineConnection]:
    """The protocol class to hand to uvicorn as ``http``."""
    namespace: dict[str, Any] = {"deadlines": deadlines}
    return type("Connection", (DeadlineConnection,), namespace)


def _error_response(status: int, code: str, message: str) -> bytes:
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    body = orjson.dumps({"error": error})
    head = (
        f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode("ascii") + body
