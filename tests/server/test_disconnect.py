"""A client that leaves frees its engine requests at once, streamed or not, read or unread."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any
from urllib.parse import urlsplit

import pytest
from wire_app import CHAT, COMPLETIONS, Wire, fake, wait_until

MESSAGES = [{"role": "user", "content": "hello"}]


def send(url: str, path: str, body: dict[str, Any]) -> socket.socket:
    parts = urlsplit(url)
    assert parts.hostname is not None
    raw = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: test\r\ncontent-length: {len(raw)}\r\n\r\n"
    connection = socket.create_connection((parts.hostname, parts.port))
    connection.sendall(head.encode() + raw)
    return connection


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("hang_after", [0, 4])
def test_a_client_that_leaves(path: str, stream: bool, hang_after: int) -> None:
    wire = Wire(fake("abcdefgh", hang_after=hang_after))
    with wire.live() as url:
        body = {"messages": MESSAGES, "prompt": "p", "stream": stream, "n": 2}
        with send(url, path, body):
            wait_until(lambda: len(wire.engine.live) == 2)
            assert len(wire.context.live_streams) == 1
        wait_until(lambda: not wire.engine.live)
        wait_until(lambda: not wire.context.live_streams)
    assert len(wire.engine.aborted) == 2
    assert [end[0] for end in wire.metrics.ends] == ["abort", "abort"]


def test_a_client_that_leaves_in_the_middle_of_fast_tokens() -> None:
    wire = Wire(fake("abcdefgh" * 40, step_seconds=0.002))
    with wire.live() as url:
        with send(url, CHAT, {"messages": MESSAGES, "stream": True}) as connection:
            assert connection.recv(100)
        wait_until(lambda: not wire.engine.live)
        wait_until(lambda: bool(wire.metrics.ends))
    assert wire.metrics.ends[0][0] == "abort"
    assert wire.metrics.ends[0][2] < 320


def test_a_client_that_leaves_before_its_body_is_complete() -> None:
    wire = Wire(fake("x"))
    with wire.live() as url:
        parts = urlsplit(url)
        with socket.create_connection((parts.hostname or "", parts.port or 0)) as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: t\r\ncontent-length: 50\r\n\r\n{")
        wait_until(lambda: wire.metrics.rejections == ["invalid"])
    assert wire.engine.requests == []


async def test_a_stream_cancelled_before_its_first_frame_is_freed() -> None:
    wire = Wire(fake("abc", hang_after=0))
    body = json.dumps({"messages": MESSAGES, "stream": True}).encode()
    messages = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> dict[str, Any]:
        message = next(messages, None)
        if message is None:
            await asyncio.Event().wait()
            raise AssertionError("unreachable")
        return message

    async def refuse(_: Any) -> None:
        raise OSError("the socket is gone")

    scope = {
        "type": "http",
        "method": "POST",
        "path": CHAT,
        "raw_path": CHAT.encode(),
        "query_string": b"",
        "headers": [],
        "http_version": "1.1",
        "scheme": "http",
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
        "asgi": {"version": "3.0"},
    }
    with pytest.raises(OSError, match="the socket is gone"):
        await wire.app(scope, receive, refuse)  # type: ignore[arg-type]
    assert len(wire.engine.aborted) == 1
    assert wire.context.live_streams == set()


def test_the_body_ends_right_after_done() -> None:
    wire = Wire(fake("abc"))
    with wire.live() as url, send(url, CHAT, {"messages": MESSAGES, "stream": True}) as connection:
        connection.settimeout(5)
        raw = b""
        while not raw.endswith(b"0\r\n\r\n"):
            raw += connection.recv(65536)
    assert b"data: [DONE]\n\n\r\n0\r\n\r\n" in raw
    assert b"\r\n" not in raw.partition(b"data: ")[2].partition(b"\n\n")[0]
