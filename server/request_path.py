"""What a client may vary in a request line: a trailing slash, and HEAD where there is GET."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class RequestPath:
    """ASGI middleware: ``/v1/models/`` is ``/v1/models``, and HEAD is GET without the body.

    A redirect instead would lose the body of a POST in many clients.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["path"] != "/" and scope["path"].endswith("/"):
            scope = dict(scope, path=scope["path"].rstrip("/") or "/")
        if scope["method"] == "HEAD":
            scope, send = dict(scope, method="GET"), _without_body(send)
        await self._app(scope, receive, send)


def _without_body(send: Send) -> Send:
    async def send_headers(message: Message) -> None:
        if message["type"] == "http.response.body":
            message = dict(message, body=b"")
        await send(message)

    return send_headers
