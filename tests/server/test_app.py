"""The API's frame: models, probes, version, metrics, CORS, paths and headers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import httpx
import orjson
import pytest
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families

from server.app import create_app
from server.context import ServerContext
from server.operation import create_admin_app

ContextFactory = Callable[..., ServerContext]


def client_of(app: FastAPI) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app, raise_app_exceptions=False), base_url="http://test")


async def test_models_lists_the_one_model(still_context: ContextFactory) -> None:
    async with client_of(create_app(still_context())) as client:
        listed = (await client.get("/v1/models")).json()
    model = {
        "id": "tiny",
        "object": "model",
        "created": 1_700_000_000,
        "owned_by": "headlong",
        "root": "tiny",
        "parent": None,
        "max_model_len": 64,
        "margin_bound": 0.0,
        "runner": "compiled",
        "quantization": "int8",
        "deterministic": True,
        "methods": ["suffix"],
        "verifier": "match",
        "chat": True,
    }
    assert listed == {"object": "list", "data": [model]}


@pytest.mark.parametrize("path", ["/v1/models/org/name", "/v1/models/org%2Fname", "/v1/models/org%2Fname/"])
async def test_a_model_id_with_a_slash(still_context: ContextFactory, path: str) -> None:
    async with client_of(create_app(still_context(server__served_model_name="org/name"))) as client:
        answer = await client.get(path)
    assert answer.status_code == 200
    assert answer.json()["id"] == "org/name"


async def test_an_unknown_model_is_404(still_context: ContextFactory) -> None:
    async with client_of(create_app(still_context())) as client:
        answer = await client.get("/v1/models/other")
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert error["code"] == "model_not_found"
    assert error["param"] == "model"
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [("GET", "/nowhere", 404, "unknown_url"), ("DELETE", "/v1/models", 405, "method_not_allowed")],
)
async def test_routing_failures_are_error_objects(
    still_context: ContextFactory, method: str, path: str, status: int, code: str
) -> None:
    async with client_of(create_app(still_context())) as client:
        answer = await client.request(method, path)
    assert answer.status_code == status
    assert answer.json()["error"]["code"] == code


@pytest.mark.parametrize("path", ["/v1/models", "/health", "/ready", "/version", "/metrics"])
async def test_head_and_trailing_slash(still_context: ContextFactory, path: str) -> None:
    async with client_of(create_app(still_context())) as client:
        got, head, slashed = await client.get(path), await client.head(path), await client.get(path + "/")
    assert got.status_code == head.status_code == slashed.status_code == 200
    assert got.content
    assert head.content == b""
    assert head.headers["content-length"] == got.headers["content-length"]


async def test_a_post_with_a_trailing_slash_is_not_redirected(still_context: ContextFactory) -> None:
    async with client_of(create_app(still_context())) as client:
        answer = await client.post("/v1/chat/completions/", content=b"not json")
    assert answer.status_code == 400


async def test_the_schema_names_the_routes(still_context: ContextFactory) -> None:
    async with client_of(create_app(still_context())) as client:
        paths = (await client.get("/openapi.json")).json()["paths"]
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models", "/health", "/ready"} <= set(paths)


async def test_health_and_ready_follow_the_engine(still_context: ContextFactory) -> None:
    context = still_context(server__watchdog_seconds=5.0)
    engine: Any = context.engine
    async with client_of(create_app(context)) as client:

        async def statuses() -> tuple[int, int]:
            return (await client.get("/health")).status_code, (await client.get("/ready")).status_code

        assert await statuses() == (200, 200)
        engine.age = 6.0
        assert await statuses() == (503, 503)
        assert "no sign of life for 6 s" in (await client.get("/health")).json()["reason"]
        engine.age, engine.is_alive = 0.0, False
        assert await statuses() == (503, 503)
        assert "stopped" in (await client.get("/ready")).json()["reason"]
        engine.is_alive = True
        context.draining = True
        assert await statuses() == (200, 503)


async def test_metrics_on_the_api_port_alone_without_admin_port(still_context: ContextFactory) -> None:
    async with client_of(create_app(still_context())) as client:
        answer = await client.get("/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    names = {family.name for family in text_string_to_metric_families(answer.text)}
    assert "headlong_requests_running" in names


async def test_metrics_only_on_the_admin_port_when_there_is_one(still_context: ContextFactory) -> None:
    context = still_context(server__admin_port=9000)
    async with client_of(create_app(context)) as client:
        assert (await client.get("/metrics")).status_code == 404
        assert (await client.get("/ready")).status_code == 200
    async with client_of(create_admin_app(context)) as client:
        for path in ("/metrics", "/health", "/ready"):
            assert (await client.get(path)).status_code == 200
        assert (await client.get("/v1/models")).status_code == 404


async def test_answers_carry_an_id_and_their_time(still_context: ContextFactory) -> None:
    async with client_of(create_app(still_context())) as client:
        echoed = await client.get("/v1/models", headers={"x-request-id": "mine-1"})
        drawn = await client.get("/nowhere", headers={"x-request-id": "bad id \x7f"})
    assert echoed.headers["x-request-id"] == "mine-1"
    assert drawn.headers["x-request-id"].startswith("req_")
    assert int(echoed.headers["openai-processing-ms"]) >= 0


async def test_draining_closes_connections(still_context: ContextFactory) -> None:
    context = still_context()
    async with client_of(create_app(context)) as client:
        assert "connection" not in (await client.get("/v1/models")).headers
        context.draining = True
        assert (await client.get("/v1/models")).headers["connection"] == "close"


async def test_cors(still_context: ContextFactory) -> None:
    context = still_context(server__cors_origins=["https://chat.example.org"])
    preflight = {
        "origin": "https://chat.example.org",
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization, x-stainless-os",
    }
    async with client_of(create_app(context)) as client:
        answer = await client.options("/v1/chat/completions", headers=preflight)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "https://chat.example.org"
        assert "x-stainless-os" in answer.headers["access-control-allow-headers"]
        plain = await client.get("/v1/models", headers={"origin": "https://chat.example.org"})
        assert plain.headers["access-control-expose-headers"] == "x-request-id, retry-after, openai-processing-ms"
        stranger = await client.get("/v1/models", headers={"origin": "https://elsewhere.example.org"})
        assert "access-control-allow-origin" not in stranger.headers


async def test_without_origins_there_is_no_cors(still_context: ContextFactory) -> None:
    async with client_of(create_app(still_context())) as client:
        answer = await client.get("/v1/models", headers={"origin": "https://chat.example.org"})
    assert "access-control-allow-origin" not in answer.headers


async def test_an_unexpected_fault_is_a_generic_500(
    still_context: ContextFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = still_context()

    def broken() -> bytes:
        raise RuntimeError("secret detail")

    monkeypatch.setattr(context.metrics, "render", broken)
    async with client_of(create_app(context)) as client:
        answer = await client.get("/metrics")
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "server_error"
    assert "secret" not in answer.text


async def test_the_request_log_has_no_query_and_no_body(
    still_context: ContextFactory, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "headlong.request")
    async with client_of(create_app(still_context())) as client:
        await client.get("/health")
        await client.post("/v1/chat/completions?key=secret", content=b"my prompt", headers={"x-request-id": "id-7"})
    (record,) = [entry for entry in caplog.records if entry.name == "headlong.request"]
    line = orjson.loads(record.message)
    assert line["id"] == "id-7"
    assert line["path"] == "/v1/chat/completions"
    assert line["status"] == 400
    assert line["complete"] is True
    assert "secret" not in record.message
    assert "prompt" not in record.message
