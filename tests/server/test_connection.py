"""What is refused before work, and what one connection may hold open."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import httpx
import orjson
import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from server.app import create_app
from server.connection import Deadlines, connection_class
from server.context import ServerContext
from server.listener import listen

ContextFactory = Callable[..., ServerContext]
DEADLINES = Deadlines(
    idle_seconds=1.5, header_seconds=0.4, body_seconds=0.4, max_header_bytes=4096, max_waiting_bytes=20_000
)
LEFT: list[bytes] = []  # requests to /wait whose client was seen to leave


async def test_draining_refuses_new_work_and_says_when_to_come_back(still_context: ContextFactory) -> None:
    context = still_context(server__drain_seconds=120.0)
    context.draining = True
    transport = httpx.ASGITransport(create_app(context))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        for path in ("/v1/chat/completions", "/v1/completions"):
            answer = await client.post(path, json={})
            assert answer.status_code == 503
            assert answer.headers["retry-after"] == "30"
            assert answer.json()["error"]["code"] == "service_unavailable"
        assert (await client.get("/v1/models")).status_code == 200
        metrics = (await client.get("/metrics")).text
    assert 'headlong_requests_rejected_total{model="tiny",reason="draining"} 2.0' in metrics


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the body's length; /slow answers after 1 s, /early before the body has come, /wait never."""
    size = 0
    if scope["path"] != "/early":
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            size += len(message["body"])
            if not message["more_body"]:
                break
    if scope["path"] == "/slow":
        await asyncio.sleep(1.0)
    if scope["path"] == "/wait":
        while (await receive())["type"] != "http.disconnect":
            pass
        LEFT.append(scope["query_string"])
        return
    body = str(size).encode()
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@pytest.fixture
async def address() -> AsyncIterator[tuple[str, int]]:
    sock = listen("127.0.0.1", 0)
    config = uvicorn.Config(
        echo, http=connection_class(DEADLINES), ws="none", lifespan="off", log_config=None, timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server._serve([sock]))
    yield sock.getsockname()
    server.should_exit = True
    await serving


async def send_slowly(address: tuple[str, int], *parts: bytes, pause: float = 0.0) -> tuple[bytes, float]:
    """Everything the server answered until it closed, and how long it took."""
    loop = asyncio.get_running_loop()
    started = loop.time()
    reader, writer = await asyncio.open_connection(*address)
    try:
        reading = asyncio.create_task(reader.read())
        for part in parts:
            if reading.done():
                break
            writer.write(part)
            await asyncio.sleep(pause)
        async with asyncio.timeout(10):
            return await reading, loop.time() - started
    finally:
        writer.close()


@pytest.mark.parametrize(
    "parts",
    [
        [b"GET / HTT"],
        [b"GET / HTTP/1.1\r\nHost: a\r\nX-Half: "],
        [b"GET / HTTP/1.1\r\nHost: a\r\n", *[b"X-Drip: 1\r\n"] * 40],
    ],
    ids=["request-line", "header", "dripping"],
)
async def test_half_sent_headers_are_dropped(address: tuple[str, int], parts: list[bytes]) -> None:
    answer, seconds = await send_slowly(address, *parts, pause=0.05)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert orjson.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "request_timeout"
    assert 0.35 < seconds < 1.2


@pytest.mark.parametrize(
    "head", [b"Content-Length: 100\r\n\r\n12345", b"Transfer-Encoding: chunked\r\n\r\n5\r\n12345\r\n"]
)
async def test_half_sent_bodies_are_dropped(address: tuple[str, int], head: bytes) -> None:
    answer, seconds = await send_slowly(address, b"POST / HTTP/1.1\r\nHost: a\r\n" + head)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert 0.35 < seconds < 1.2


async def test_a_body_that_never_ends_is_dropped_after_its_answer(address: tuple[str, int]) -> None:
    head = b"POST /early HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n1"
    answer, seconds = await send_slowly(address, head, *[b"1"] * 40, pause=0.05)
    assert answer.startswith(b"HTTP/1.1 200 OK")
    assert 0.35 < seconds < 1.2


async def test_a_silent_connection_is_closed(address: tuple[str, int]) -> None:
    answer, seconds = await send_slowly(address)
    assert answer == b""
    assert 1.4 < seconds < 2.5


async def test_blank_lines_do_not_hold_a_connection(address: tuple[str, int]) -> None:
    request = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
    answer, seconds = await send_slowly(address, request, *[b"\r\n"] * 60, pause=0.05)
    assert answer.startswith(b"HTTP/1.1 200 OK")
    assert seconds < 2.5


async def test_headers_have_a_size(address: tuple[str, int]) -> None:
    answer, _ = await send_slowly(address, b"GET / HTTP/1.1\r\nX-Big: " + b"a" * 8000)
    assert answer.startswith(b"HTTP/1.1 431 ")


async def test_headers_that_come_in_one_piece_have_the_same_size(address: tuple[str, int]) -> None:
    request = b"POST / HTTP/1.1\r\nContent-Length: 3\r\nX-Big: " + b"a" * 5000 + b"\r\n\r\nabc"
    answer, _ = await send_slowly(address, request)
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert answer.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize(
    "behind",
    [
        b"",
        b"GET /wait?second HTTP/1.1\r\nHost: a\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9000\r\n\r\n" + b"b" * 9000,
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 90000\r\n\r\n" + b"b" * 90_000,
    ],
    ids=["alone", "with-one-behind", "with-a-body-behind", "with-more-than-allowed-behind"],
)
async def test_a_client_that_leaves_is_noticed_whatever_it_has_pipelined(
    address: tuple[str, int], behind: bytes
) -> None:
    LEFT.clear()
    _, writer = await asyncio.open_connection(*address)
    writer.write(b"GET /wait?first HTTP/1.1\r\nHost: a\r\n\r\n" + behind)
    await asyncio.sleep(0.2)
    writer.close()
    async with asyncio.timeout(3):
        while not LEFT:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert LEFT == [b"first"]


async def test_pipelined_requests_are_answered_in_order(address: tuple[str, int]) -> None:
    post = b"POST %s HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n%s\r\n%s"
    parts = [post % (path, size, extra, b"a" * size) for path, size, extra in (
        (b"/slow", 3, b""), (b"/", 700, b""), (b"/", 1, b"Connection: close\r\n")
    )]  # fmt: skip
    answer, _ = await send_slowly(address, b"".join(parts))
    assert [part.rpartition(b"\r\n\r\n")[2] for part in answer.split(b"HTTP/1.1 200 OK")[1:]] == [b"3", b"700", b"1"]


async def test_a_malformed_request_is_an_error_object(address: tuple[str, int]) -> None:
    answer, _ = await send_slowly(address, b"\x00\x01\x02\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert orjson.loads(answer.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"


async def test_a_slow_answer_is_not_a_slow_request(address: tuple[str, int]) -> None:
    reader, writer = await asyncio.open_connection(*address)
    # The second request is half there while the first is answered for longer than the header deadline.
    writer.write(b"POST /slow HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\nabc" + b"GET / HTTP/1.1\r\nHo")
    async with asyncio.timeout(5):
        head = await reader.readuntil(b"\r\n\r\n")
        body = await reader.readexactly(1)
        writer.write(b"st: a\r\n\r\n")
        second = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK")
    assert body == b"3"
    assert second.startswith(b"HTTP/1.1 200 OK")
    writer.close()


async def test_a_large_body_within_its_time_passes(address: tuple[str, int]) -> None:
    async with httpx.AsyncClient(base_url=f"http://{address[0]}:{address[1]}") as client:
        for size in (0, 1, 300_000):
            assert (await client.post("/", content=b"a" * size)).text == str(size)
