"""A whole run of ``headlong bench``: all sides, datasets and loads, and the report of it."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, AsyncExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import httpx
import psutil

from server.bench.client import Sampling, ServerFault, connect, server_info, shown
from server.bench.datasets import Dataset
from server.bench.figures import Bounds, Cell, ratios, rows
from server.bench.load import Course, Load, Outcome, measure_load
from server.bench.report import report_head
from server.bench.side import OurSide, Peer, PeerSide, Side, peer_side

Bar = Callable[[str, int], AbstractContextManager[Callable[[Outcome], None]]]


@dataclass(frozen=True, slots=True)
class Sides:
    """off: whether ours answers without speculation too."""

    url: str
    api_key: str | None
    off: bool
    peers: Sequence[Peer]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is measured. plan: each dataset under its loads. notes: lines for the report, such as how a server was
    started."""

    plan: Sequence[tuple[Dataset, Sequence[Load]]]
    rounds: int
    sampling: Sampling
    bounds: Bounds
    notes: Sequence[str] = ()


async def run_bench(sides: Sides, wanted: Wanted, bar: Bar) -> dict[str, Any]:
    """The report. bar: shows progress, given a label and how many answers there will be.

    Raises ServerFault or httpx.HTTPError where our server fails, or a peer does not answer at all.
    """
    started, load_before = datetime.now(UTC), psutil.getloadavg()[0]
    course = Course(wanted.rounds, wanted.sampling.seed, secrets.token_hex(4))
    async with AsyncExitStack() as stack:
        ours = await stack.enter_async_context(connect(sides.url, sides.api_key))
        server = await server_info(ours)
        sampling = replace(wanted.sampling, chat=server.has_chat)
        peers = [await _peer(stack, peer, sampling) for peer in sides.peers]
        answering: list[Side] = [OurSide(ours, sampling, on) for on in ((True, False) if sides.off else (True,))]
        answering += peers
        cells = []
        for data, loads in wanted.plan:
            for load in loads:
                count = len(answering) * wanted.rounds * load.requests(len(data.prompts))
                with bar(f"{data.name}, {load.label}", count) as advance:
                    parts = await measure_load(answering, data.prompts, load, course, advance)
                cells.append(Cell(data, load, [side.name for side in answering], parts))
    return report_head(server, [data for data, _ in wanted.plan]) | {
        "started": started.isoformat(timespec="seconds"),
        "load_average": [load_before, psutil.getloadavg()[0]],
        "peers": {peer.name: {"url": shown(peer.client), "model": peer.model, "facts": peer.facts} for peer in peers},
        "sampling": _sampling(wanted.sampling),
        "rounds": wanted.rounds,
        "goodput_bounds": wanted.bounds.as_dict(),
        "notes": list(wanted.notes),
        "rows": [row for cell in cells for row in rows(cell, wanted.bounds, server.methods)],
        "ratios": [row for cell in cells for row in ratios(cell)],
    }


async def _peer(stack: AsyncExitStack, peer: Peer, sampling: Sampling) -> PeerSide:
    try:
        client = await stack.enter_async_context(connect(peer.url))
    except httpx.InvalidURL as error:
        raise ServerFault(f"the peer {peer.name}: {peer.url} is not a URL: {error}") from error
    return await peer_side(peer, client, sampling)


def _sampling(sampling: Sampling) -> dict[str, Any]:
    return {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "seed": sampling.seed,
        "margins": sampling.margins,
    }
