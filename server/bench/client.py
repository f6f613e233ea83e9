"""One measured chat request over HTTP: what a streaming client sees, and when."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import httpx
import orjson


class ServerFault(Exception):
    """The server answered with an error, or the stream broke off."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """What is held equal between the two sides."""

    max_tokens: int
    temperature: float
    seed: int
    margins: bool = False


@dataclass(slots=True)
class Measured:
    """Times in seconds since the request was sent. completion_tokens comes from the server's usage."""

    first_token: float = 0.0
    total: float = 0.0
    completion_tokens: int = 0
    prompt_tokens: int = 0
    token_ids: list[int] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    acceptance: dict[str, Any] = field(default_factory=dict)
    finish_reason: str | None = None

    @property
    def decode_rate(self) -> float:
        """Tokens after the first, per second."""
        seconds = self.total - self.first_token
        return (self.completion_tokens - 1) / seconds if seconds > 0 and self.completion_tokens > 1 else 0.0


async def measure(client: httpx.AsyncClient, prompt: str, sampling: Sampling, *, speculate: bool) -> Measured:
    """Streams one answer. Raises ServerFault or httpx.HTTPError."""
    body = {
        "messages": [{"role": "user", "content": prompt}],
        "max_completion_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "seed": sampling.seed,
        "stream": True,
        "stream_options": {"include_usage": True},
        "speculation": {"enabled": speculate, "stats": True},
        "return_token_ids": True,
        "return_margins": sampling.margins,
    }
    measured, began = Measured(), time.perf_counter()
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            raise ServerFault((await response.aread()).decode(errors="replace"))
        async for line in response.aiter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                _take(measured, orjson.loads(line[6:]), time.perf_counter() - began)
    measured.total = time.perf_counter() - began
    if measured.finish_reason is None:
        raise ServerFault("the stream ended without a finish reason")
    return measured


def _take(measured: Measured, chunk: dict[str, Any], now: float) -> None:
    if "error" in chunk:
        raise ServerFault(str(chunk["error"].get("message")))
    for choice in chunk.get("choices", ()):
        ids = choice.get("token_ids") or []
        if ids and not measured.token_ids:
            measured.first_token = now
        measured.token_ids += ids
        measured.margins += choice.get("margins") or []
        measured.finish_reason = choice.get("finish_reason") or measured.finish_reason
    if usage := chunk.get("usage"):
        measured.completion_tokens = usage["completion_tokens"]
        measured.prompt_tokens = usage["prompt_tokens"]
    if metrics := chunk.get("metrics"):
        measured.acceptance = metrics.get("speculative_decoding") or {}
