"""API keys: which are admitted, and that no route but the probes answers without one."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute, iter_route_contexts
from starlette.datastructures import Headers
from wire_app import CHAT, Wire, fake

from server.app import create_app
from server.auth import ApiKeys
from server.config_errors import ConfigError
from server.context import ServerContext

ContextFactory = Callable[..., ServerContext]
PROBES = {"/health", "/ready"}
HASHED = f"sha256:{hashlib.sha256(b'hashed-key').hexdigest().upper()}"


@pytest.fixture
def keys_file(tmp_path: Path) -> str:
    file = tmp_path / "keys"
    file.write_text(f"# team a\nplain-key\n\n  {HASHED}  \n")
    return str(file)


@pytest.fixture
def keyed_app(still_context: ContextFactory, keys_file: str) -> FastAPI:
    return create_app(still_context(server__api_keys_file=keys_file))


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": "Bearer plain-key"},
        {"Authorization": "bearer  hashed-key "},
        {"api-key": "plain-key"},
        {"x-api-key": "hashed-key"},
        {"Authorization": "Bearer wrong", "x-api-key": "plain-key"},
    ],
)
def test_admitted(keys_file: str, headers: dict[str, str]) -> None:
    assert ApiKeys.load(keys_file).tenant(Headers(headers)) is not None


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": ""},
        {"Authorization": "Bearer"},
        {"Authorization": "Bearer "},
        {"Authorization": "plain-key"},
        {"Authorization": "Basic plain-key"},
        {"Authorization": "Bearer plain-key2"},
        {"Authorization": f"Bearer {HASHED}"},
        {"Authorization": "Bearer # team a"},
        {"api-key": ""},
        {"api-key": "pl\xe4in-key"},
    ],
)
def test_refused(keys_file: str, headers: dict[str, str]) -> None:
    assert ApiKeys.load(keys_file).tenant(Headers(headers)) is None


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("# nothing\n\n", "holds no key"),
        ("sha256:abc\n", "line 1: sha256: must be followed by 64"),
        ("good\ntwo words\n", "line 2: a key is printable ASCII"),
        ("sch\xfcssel\n", "printable ASCII"),
    ],
)
def test_a_bad_file_is_refused(tmp_path: Path, content: str, part: str) -> None:
    file = tmp_path / "keys"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        ApiKeys.load(str(file))
    assert part in str(caught.value)
    assert "words" not in str(caught.value)  # a refusal never repeats a key


def test_a_missing_file_is_refused_and_no_open_server_is_made(still_context: ContextFactory, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"server\.api_keys_file: cannot read"):
        create_app(still_context(server__api_keys_file=str(tmp_path / "absent")))


def _routes(app: FastAPI) -> list[tuple[str, str]]:
    found = []
    for context in iter_route_contexts(app.routes):
        assert isinstance(context.original_route, APIRoute)  # anything else would stand outside the dependencies
        path = (context.path or "").replace("{model_id:path}", "tiny")
        found += [(method, path) for method in sorted(context.methods or ())]
    return found


async def test_every_route_but_the_probes_asks_for_a_key(keyed_app: FastAPI) -> None:
    routes = _routes(keyed_app)
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models", "/metrics", "/version", "/openapi.json"} <= {
        path for _, path in routes
    }
    transport = httpx.ASGITransport(keyed_app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        for method, path in routes:
            open_answer = await client.request(method, path, content=b"[]")
            keyed_answer = await client.request(method, path, content=b"[]", headers={"x-api-key": "plain-key"})
            assert (open_answer.status_code == 401) == (path not in PROBES), path
            assert keyed_answer.status_code != 401, path


async def test_the_401(keyed_app: FastAPI) -> None:
    transport = httpx.ASGITransport(keyed_app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        answer = await client.get("/v1/models")
        metrics = (await client.get("/metrics", headers={"api-key": "plain-key"})).text
    assert answer.headers["www-authenticate"] == "Bearer"
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
    assert set(error) == {"message", "type", "param", "code"}
    assert 'headlong_requests_rejected_total{model="tiny",reason="auth"} 1.0' in metrics


@pytest.mark.parametrize(
    "host",
    ["test/health?", "test/health#", "test/ready/", "/health", "test@/health", "test:80/health", "[::1]/health?x="],
)
@pytest.mark.parametrize("path", ["/v1/models", "//v1/models", "/health/../v1/models", "/v1/models/"])
async def test_a_crafted_host_header_opens_nothing(keyed_app: FastAPI, host: str, path: str) -> None:
    sent = []

    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, object]) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "GET",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"host", host.encode())],
        "client": ("127.0.0.1", 1),
        "server": ("test", 80),
        "state": {},
    }
    await keyed_app(scope, receive, send)  # type: ignore[arg-type]
    assert sent[0]["status"] in (401, 404)


async def test_keys_share_no_prefix_cache(keys_file: str) -> None:
    """Otherwise the time to the first token would tell one tenant what another has asked."""
    engine = fake("hi")
    wire = Wire(engine, api_keys_file=keys_file)
    body = {"messages": [{"role": "user", "content": "hello"}]}
    for key, salt in (("plain-key", None), ("hashed-key", None), ("plain-key", "s"), ("plain-key", None)):
        extra = {} if salt is None else {"cache_salt": salt}
        response = await wire.post(CHAT, {**body, **extra}, headers={"Authorization": f"Bearer {key}"})
        assert response.status_code == 200
    first, other, salted, again = (request.cache_salt for request in engine.requests)
    assert first == again
    assert len({first, other, salted}) == 3
    assert "key" not in first
