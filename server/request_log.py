"""One line a request, in JSON: who, what, how it ended and how long it took; never a prompt, a query or a header."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

import orjson
from starlette.datastructures import MutableHeaders
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.context import ServerContext
from server.request_id import request_id_of

logger = logging.getLogger("headlong.request")
_PROBES = frozenset({"/health", "/ready", "/metrics"})
CLIENT_GONE = 499  # nginx's word for an answer that had no reader any more


@dataclass(slots=True)
class Exchange:
    """What is known of one request. Instants are of ``time.perf_counter``."""

    request_id: str
    started: float = field(default_factory=time.perf_counter)
    status: int | None = None
    first_byte: float | None = None
    complete: bool = False


class RequestLog:
    """ASGI middleware: gives answers ``x-request-id`` and ``openai-processing-ms``, and logs their end.

    While the server drains, answers close their connection, so that a keep-alive client finds the next server.
    """

    def __init__(self, app: ASGIApp, context: ServerContext) -> None:
        self._app = app
        self._context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = Exchange(request_id_of(HTTPConnection(scope)))

        async def send_marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._mark(exchange, message)
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                exchange.complete = True

        try:
            await self._app(scope, receive, send_marked)
        except Exception:
            exchange.status = exchange.status or 500
            raise
        finally:
            _write(exchange, scope)

    def _mark(self, exchange: Exchange, message: Message) -> None:
        exchange.status = message["status"]
        exchange.first_byte = time.perf_counter()
        headers = MutableHeaders(scope=message)
        headers.setdefault("x-request-id", exchange.request_id)
        headers.setdefault("openai-processing-ms", _milliseconds(exchange.started, exchange.first_byte))
        if self._context.draining:
            headers["connection"] = "close"


def _write(exchange: Exchange, scope: Scope) -> None:
    level = logging.DEBUG if scope["path"] in _PROBES else logging.INFO
    if not logger.isEnabledFor(level):
        return
    ended = time.perf_counter()
    line = {
        "time": time.time(),
        "id": exchange.request_id,
        "client": scope["client"][0] if scope.get("client") else None,
        "method": scope["method"],
        "path": scope["path"],
        "status": exchange.status or CLIENT_GONE,
        "first_byte_ms": int(_milliseconds(exchange.started, exchange.first_byte or ended)),
        "total_ms": int(_milliseconds(exchange.started, ended)),
        "complete": exchange.complete,
    }
    logger.log(level, orjson.dumps(line).decode())


def _milliseconds(start: float, end: float) -> str:
    return str(round((end - start) * 1000))
