"""The sides of a run: this server with speculation and without, and other servers that speak OpenAI's protocol."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import httpx

from server.bench.client import Measured, Sampling, ServerFault, get, measure, plain_body, stream_answer

ON, OFF = "on", "off"


class PeerError(Exception):
    """A peer is named wrongly; one line."""


@dataclass(frozen=True, slots=True)
class Peer:
    """Another server. model: what it is asked for; None: the first that it lists."""

    name: str
    url: str
    model: str | None


def parse_peers(texts: list[str]) -> list[Peer]:
    """``NAME=URL`` or ``NAME=URL#MODEL``, each. Raises PeerError."""
    peers = []
    for text in texts:
        name, equals, address = text.partition("=")
        url, _, model = address.partition("#")
        if not equals or not name or not url:
            raise PeerError(f"a peer is NAME=URL or NAME=URL#MODEL, not {text!r}")
        peers.append(Peer(name, url, model or None))
    names = [ON, OFF, *(peer.name for peer in peers)]
    for name in names:
        if names.count(name) > 1:
            raise PeerError(f"two sides would be called {name!r}")
    return peers


class Side(Protocol):
    """Who answers. is_ours: a failure of it ends the run; those of others are counted."""

    @property
    def name(self) -> str: ...

    @property
    def is_ours(self) -> bool: ...

    async def answer(self, prompt: str, salt: str) -> Measured:
        """salt: what was answered under another one may not be reused. Raises ServerFault or httpx.HTTPError."""
        ...


@dataclass(frozen=True, slots=True)
class OurSide:
    """A headlong server, with speculation or without."""

    client: httpx.AsyncClient
    sampling: Sampling
    speculate: bool

    @property
    def name(self) -> str:
        return ON if self.speculate else OFF

    @property
    def is_ours(self) -> bool:
        return True

    async def answer(self, prompt: str, salt: str) -> Measured:
        return await measure(self.client, prompt, self.sampling, speculate=self.speculate, cache_salt=salt)


@dataclass(frozen=True, slots=True)
class PeerSide:
    """Another server; it is asked nothing beyond OpenAI's own parameters, so it reuses prompts as it likes.

    facts: its object in ``/v1/models``; empty where it has none for the model.
    """

    name: str
    client: httpx.AsyncClient
    sampling: Sampling
    model: str
    facts: dict[str, Any]

    @property
    def is_ours(self) -> bool:
        return False

    async def answer(self, prompt: str, salt: str) -> Measured:
        # The older name of the limit is the one that every server knows.
        body = plain_body(prompt, self.sampling) | {"model": self.model, "max_tokens": self.sampling.max_tokens}
        measured = await stream_answer(self.client, body)
        if measured.finish_reason is None:
            raise ServerFault("the stream ended without a finish reason")
        if not measured.has_usage:
            measured.completion_tokens = len(measured.chunk_times)
        return measured


async def peer_side(peer: Peer, client: httpx.AsyncClient, sampling: Sampling) -> PeerSide:
    """Asks a peer for its models. Raises ServerFault, also where it does not answer."""
    try:
        listed = (await get(client, "/v1/models")).get("data") or []
        models: dict[str, dict[str, Any]] = {str(model["id"]): model for model in listed}
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ServerFault(f"the peer {peer.name} does not answer on {peer.url}: {error}") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise ServerFault(f"the peer {peer.name} does not list its models as OpenAI does") from error
    except ServerFault as error:
        if peer.model is None:
            raise ServerFault(f"the peer {peer.name}: {error}; name a model with {peer.name}=URL#MODEL") from error
        models = {}
    model = peer.model or next(iter(models), None)
    if model is None:
        raise ServerFault(f"the peer {peer.name} lists no model; name one with {peer.name}=URL#MODEL")
    return PeerSide(peer.name, client, sampling, model, models.get(model, {}))
