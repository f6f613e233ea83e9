"""A client of one running server: what it says of itself, and one measured, streamed answer."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx
import orjson

_TIMEOUT = httpx.Timeout(600.0)
# As many requests at once as are asked for; and idle connections are dropped before a server drops them (5 s is usual),
# for a request on a connection that is being closed fails.
_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=2.0)
_MAX_ERROR_CHARACTERS = 300
_LAST_PORT = 65535


class ServerFault(Exception):
    """The server answered with an error or with something unforeseen, or the stream broke off; one line."""


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What the server says of itself. model: its object in ``/v1/models``."""

    url: str
    version: str
    model: dict[str, Any]

    @property
    def margin_bound(self) -> float | None:
        """Below it a token's margin marks a near-tie; None if the server does not know the term."""
        return self.model.get("margin_bound")

    @property
    def methods(self) -> tuple[str, ...]:
        """The loaded drafters; none where speculation is off."""
        return tuple(self.model.get("methods") or ())

    @property
    def has_chat(self) -> bool:
        """False for a model without a chat template."""
        return self.model.get("chat") is not False

    def as_dict(self) -> dict[str, Any]:
        return {"url": self.url, "version": self.version, "model": self.model}


@dataclass(frozen=True, slots=True)
class Sampling:
    """What is asked for, held equal between the two sides.

    method: the drafters of the side with speculation, "auto" for all. margins, detail: report them with each token.
    chat: the prompt is a user's message, else the text that is continued.
    """

    max_tokens: int
    temperature: float
    seed: int
    method: str = "auto"
    margins: bool = False
    detail: bool = False
    chat: bool = True


@dataclass(slots=True)
class Measured:
    """One answer. Times in seconds since the request was sent; completion_tokens comes from the server's usage.

    chunk_times: when each chunk with text arrived; an opening chunk without any does not count. has_usage: the server
    told its token counts. acceptance: the server's figures (``server.acceptance``). accepted: drafted tokens that were
    kept, by (method, depth); depth 1 is the first drafted token of a step. depths: of each token, 0 where a forward
    gave it without a draft.
    """

    total: float = 0.0
    chunk_times: list[float] = field(default_factory=list)
    has_usage: bool = False
    completion_tokens: int = 0
    prompt_tokens: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    margins: list[float | None] = field(default_factory=list)
    accepted: Counter[tuple[str, int]] = field(default_factory=Counter)
    depths: list[int] = field(default_factory=list)
    acceptance: dict[str, Any] = field(default_factory=dict)
    finish_reason: str | None = None

    @property
    def first_token(self) -> float:
        """When the first text arrived; the end of an answer that has none."""
        return self.chunk_times[0] if self.chunk_times else self.total

    @property
    def decode_rate(self) -> float:
        """Tokens after the first, per second; 0 where there are none."""
        seconds = self.total - self.first_token
        return (self.completion_tokens - 1) / seconds if seconds > 0 and self.completion_tokens > 1 else 0.0

    @property
    def seconds_per_token(self) -> float | None:
        """Of the tokens after the first (TPOT); None where there are none."""
        rate = self.decode_rate
        return 1 / rate if rate else None

    @property
    def gaps(self) -> list[float]:
        """Seconds between chunks with text."""
        return [after - before for before, after in pairwise(self.chunk_times)]

    def count_from(self, seconds: float) -> None:
        """Counts all times from ``seconds`` before the request was sent, when it was due."""
        self.chunk_times = [at + seconds for at in self.chunk_times]
        self.total += seconds

    def take(self, chunk: dict[str, Any], now: float) -> None:
        """Adds one chunk of the stream. Raises ServerFault if it carries an error."""
        if chunk.get("error"):
            raise ServerFault(f"the stream ended with an error: {_message(chunk)}")
        for choice in chunk.get("choices", ()):
            self._take_choice(choice, now)
        if usage := chunk.get("usage"):
            self.has_usage = True
            self.completion_tokens = _count(usage["completion_tokens"])
            self.prompt_tokens = _count(usage["prompt_tokens"])
        if metrics := chunk.get("metrics"):
            self.acceptance = metrics.get("speculative_decoding") or {}

    def _take_choice(self, choice: dict[str, Any], now: float) -> None:
        delta = choice.get("delta") or {}
        text = delta.get("content") or choice.get("text") or ""
        if text or delta.get("reasoning_content"):
            self.chunk_times.append(now)
        self.text += text
        self.token_ids += choice.get("token_ids") or []
        self.margins += choice.get("margins") or []
        accepted_by = choice.get("accepted_by") or ()
        self.depths += [token["depth"] for token in accepted_by]
        self.accepted.update((token["method"], token["depth"]) for token in accepted_by if token["depth"])
        self.finish_reason = choice.get("finish_reason") or self.finish_reason

    def check_complete(self) -> None:
        """Raises ServerFault if anything of the answer is missing."""
        if self.finish_reason is None:
            raise ServerFault("the stream ended without a finish reason")
        if len(self.token_ids) != self.completion_tokens:
            raise ServerFault(f"{len(self.token_ids)} token ids arrived, but usage counts {self.completion_tokens}")


def shown(client: httpx.AsyncClient) -> str:
    """The server's address for reports and messages, without a password."""
    return str(client.base_url.copy_with(userinfo=b"")).rstrip("/")


def connect(url: str, api_key: str | None = None) -> httpx.AsyncClient:
    """A client of the server at ``url``, with or without ``/v1`` at its end. Raises httpx.InvalidURL."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    base = httpx.URL(url.rstrip("/").removesuffix("/v1"))
    if base.port is not None and base.port > _LAST_PORT:
        raise httpx.InvalidURL(f"the last port is {_LAST_PORT}")
    return httpx.AsyncClient(base_url=base, timeout=_TIMEOUT, limits=_LIMITS, headers=headers)


async def server_info(client: httpx.AsyncClient) -> ServerInfo:
    """Asks the server what it is. Raises ServerFault or httpx.HTTPError."""
    version = await get(client, "/version")
    models = await get(client, "/v1/models")
    try:
        return ServerInfo(shown(client), str(version["version"]), dict(models["data"][0]))
    except (KeyError, IndexError, TypeError, ValueError):
        raise ServerFault("the server lists no model, or not as a headlong server does") from None


async def get(client: httpx.AsyncClient, path: str) -> dict[str, Any]:
    """A JSON object of the server. Raises ServerFault or httpx.HTTPError."""
    response = await client.get(path)
    if response.status_code != 200:
        raise _refusal(path, response.status_code, response.content)
    return _parsed(response.content, path)


async def measure(
    client: httpx.AsyncClient, prompt: str, sampling: Sampling, *, speculate: bool, cache_salt: str = ""
) -> Measured:
    """Streams one answer of a headlong server. Raises ServerFault or httpx.HTTPError."""
    measured = await stream_answer(client, _body(prompt, sampling, speculate) | {"cache_salt": cache_salt})
    measured.check_complete()
    return measured


async def stream_answer(client: httpx.AsyncClient, body: dict[str, Any]) -> Measured:
    """Streams an answer to its end, whole or not. Raises ServerFault or httpx.HTTPError."""
    try:
        return await _streamed(client, body)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ServerFault(f"a chunk has an unforeseen shape: {type(error).__name__} {error}") from error


async def _streamed(client: httpx.AsyncClient, body: dict[str, Any]) -> Measured:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    measured, began = Measured(), time.perf_counter()
    async with client.stream("POST", path, json=body) as response:
        if response.status_code != 200:
            raise _refusal(path, response.status_code, await response.aread())
        async for line in response.aiter_lines():
            event = line.removeprefix("data:").strip()
            if event and event != line and event != "[DONE]":
                measured.take(_parsed(event, path), time.perf_counter() - began)
    measured.total = time.perf_counter() - began
    return measured


def _body(prompt: str, sampling: Sampling, speculate: bool) -> dict[str, Any]:
    return plain_body(prompt, sampling) | {
        "max_completion_tokens" if sampling.chat else "max_tokens": sampling.max_tokens,
        "speculation": {"enabled": speculate, "method": sampling.method, "stats": True, "detail": sampling.detail},
        "return_token_ids": True,
        "return_margins": sampling.margins,
    }


def plain_body(prompt: str, sampling: Sampling) -> dict[str, Any]:
    """What every OpenAI-compatible server is asked, but for the token limit, which has two names."""
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}]} if sampling.chat else {"prompt": prompt}
    return asked | {
        "temperature": sampling.temperature,
        "seed": sampling.seed,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def _count(value: Any) -> int:
    """Of tokens. Raises ValueError."""
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no number of tokens")
    return value


def _parsed(content: bytes | str, path: str) -> dict[str, Any]:
    try:
        parsed = orjson.loads(content)
    except orjson.JSONDecodeError:
        parsed = None
    if not isinstance(parsed, dict):
        raise ServerFault(f"the server's answer to {path} is not a JSON object; is it a headlong server?")
    return parsed


def _refusal(path: str, status: int, content: bytes) -> ServerFault:
    """An error answer in one line: the server's own sentence where it has OpenAI's shape."""
    try:
        reason = _message(_parsed(content, path))
    except (ServerFault, KeyError):
        reason = content.decode(errors="replace")
    reason = " ".join(reason.split())[:_MAX_ERROR_CHARACTERS] or "no reason given"
    if status == 401:
        reason += " Give it with --api-key, or in HEADLONG_API_KEY."
    return ServerFault(f"the server answers {path} with {status}: {reason}")


def _message(body: dict[str, Any]) -> str:
    error = body["error"]
    return str(error.get("message") if isinstance(error, dict) else error)
