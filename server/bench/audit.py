"""The exactness audit: what speculation must not change, judged pair by pair, and what it gave for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import httpx

from server.bench.acceptance import DrafterShare, drafter_shares
from server.bench.client import Measured, Sampling, ServerFault, ServerInfo
from server.bench.compare import Comparison, Difference, Pair, Plan, compare


@dataclass(frozen=True, slots=True)
class Audit:
    """All prompts answered both ways with one sampling, judged by the server's near-tie bound."""

    sampling: Sampling
    margin_bound: float
    comparison: Comparison

    @property
    def near_ties(self) -> list[tuple[Pair, Difference]]:
        return [(pair, found) for pair, found in self.comparison.differences() if found.is_near_tie(self.margin_bound)]

    @property
    def faults(self) -> list[tuple[Pair, Difference]]:
        """The differences that no rounding explains."""
        return [
            (pair, found) for pair, found in self.comparison.differences() if not found.is_near_tie(self.margin_bound)
        ]

    @property
    def drafted_steps(self) -> int:
        """Forwards that verified a draft; without any, equal answers say nothing about speculation."""
        return sum(_drafted_steps(pair.on) for pair in self.comparison.pairs)

    @property
    def margin_gap(self) -> float | None:
        """The largest difference of both sides' margins over the tokens in common."""
        return max((gap for pair in self.comparison.pairs if (gap := pair.margin_gap) is not None), default=None)

    def shares(self, drafters: Sequence[str]) -> list[DrafterShare]:
        """One for each of ``drafters``, in their order, and for any other that had a token accepted."""
        return drafter_shares((pair.on for pair in self.comparison.pairs), drafters)

    def as_dict(self, drafters: Sequence[str]) -> dict[str, Any]:
        """The audit's part of a report; the differences carry both answers, so that they can be looked into."""
        return {
            "temperature": self.sampling.temperature,
            "method": self.sampling.method,
            **self.comparison.summary(),
            "near_ties": len(self.near_ties),
            "faults": len(self.faults),
            "largest_margin_gap": self.margin_gap,
            "drafters": {share.drafter: share.as_dict() for share in self.shares(drafters)},
            "differences": [self._difference(pair, found) for pair, found in self.comparison.differences()],
        }

    def _difference(self, pair: Pair, found: Difference) -> dict[str, Any]:
        return {
            "prompt": pair.prompt,
            "kind": found.kind,
            "token": found.token,
            "margin": found.margin,
            "near_tie": found.is_near_tie(self.margin_bound),
            "on": _answer(pair.on),
            "off": _answer(pair.off),
        }


def margin_bound_of(server: ServerInfo, temperatures: Sequence[float], methods: Sequence[str]) -> float:
    """The server's near-tie bound. Raises ServerFault where an audit would say nothing, or too much."""
    if server.margin_bound is None:
        raise ServerFault(f"{server.url} states no margin_bound in /v1/models; is it a headlong server?")
    if not server.methods:
        raise ServerFault("speculation is off on this server, so there is nothing to audit")
    unknown = [name for name in methods if name not in ("auto", *server.methods)]
    if unknown:
        loaded = ", ".join(server.methods)
        raise ServerFault(f"the drafting method {unknown[0]!r} is not loaded on this server; loaded: {loaded}")
    if server.model.get("verifier") == "rejection" and any(temperatures):
        raise ServerFault(
            "this server verifies by rejection, which keeps the distribution of answers but not the tokens of a seed; "
            "audit it with --temperature 0"
        )
    return server.margin_bound


async def audited(
    client: httpx.AsyncClient,
    prompts: Sequence[str],
    sampling: Sampling,
    plan: Plan,
    progress: Callable[[Pair], None],
) -> Comparison:
    """Compares both sides with margins and details. Raises ServerFault or httpx.HTTPError."""
    asked = replace(sampling, margins=True, detail=True)
    comparison = await compare(client, prompts, asked, plan, progress)
    if any(_drafted_steps(pair.off) for pair in comparison.pairs):
        raise ServerFault("the server drafted although it was asked not to, so both sides are the same side")
    return comparison


def _drafted_steps(answer: Measured) -> int:
    steps: int = answer.acceptance.get("num_spec_steps", 0)
    return steps


def _answer(side: Measured) -> dict[str, Any]:
    return {
        "token_ids": side.token_ids,
        "margins": side.margins,
        "finish_reason": side.finish_reason,
        "text": side.text,
    }
