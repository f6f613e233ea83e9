"""Speculation on against off on one server, interleaved: the machine's drift falls on both sides alike."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from server.bench.client import Measured, Sampling, measure


@dataclass(frozen=True, slots=True)
class Pair:
    """One prompt answered both ways in one round."""

    prompt: int
    round: int
    on: Measured
    off: Measured

    @property
    def difference(self) -> int | None:
        """Index of the first token that differs, None when the answers are the same."""
        if self.on.token_ids == self.off.token_ids:
            return None
        both = zip(self.on.token_ids, self.off.token_ids, strict=False)
        shorter = min(len(self.on.token_ids), len(self.off.token_ids))
        return next((index for index, (a, b) in enumerate(both) if a != b), shorter)

    def margin_at(self, index: int) -> float | None:
        """The smaller of both sides' margins at a token, None if either has none there."""
        sides = [side.margins[index] for side in (self.on, self.off) if index < len(side.margins)]
        return min(sides, default=None)


@dataclass(slots=True)
class Comparison:
    """All pairs of a run; ratios are off / on, so above 1 speculation saves time."""

    pairs: list[Pair] = field(default_factory=list)

    def ratio_by_round(self) -> list[float]:
        """Wall time without speculation over wall time with it, one figure a round."""
        rounds: dict[int, list[Pair]] = {}
        for pair in self.pairs:
            rounds.setdefault(pair.round, []).append(pair)
        return [sum(p.off.total for p in pairs) / sum(p.on.total for p in pairs) for pairs in rounds.values()]

    def summary(self) -> dict[str, Any]:
        """The figures of a report."""
        ratios = self.ratio_by_round()
        differing = [pair for pair in self.pairs if pair.difference is not None]
        return {
            "pairs": len(self.pairs),
            "time_ratio_off_over_on": {
                "median": statistics.median(ratios),
                "min": min(ratios),
                "max": max(ratios),
                "rounds": ratios,
            },
            "on": _side([pair.on for pair in self.pairs]),
            "off": _side([pair.off for pair in self.pairs]),
            "identical": len(self.pairs) - len(differing),
            "differences": [
                {"prompt": pair.prompt, "round": pair.round, "token": at, "margin": pair.margin_at(at)}
                for pair in differing
                if (at := pair.difference) is not None
            ],
        }


def _side(sides: Sequence[Measured]) -> dict[str, Any]:
    tokens = sum(side.completion_tokens for side in sides)
    steps = sum(side.acceptance.get("num_spec_steps", 0) for side in sides)
    accepted = sum(side.acceptance.get("num_accepted_draft_tokens", 0) for side in sides)
    rates = [side.decode_rate for side in sides if side.decode_rate]
    return {
        "completion_tokens": tokens,
        "seconds": sum(side.total for side in sides),
        "decode_tokens_per_second": statistics.median(rates) if rates else None,
        "ttft_seconds": statistics.median(side.first_token for side in sides),
        "drafted_steps": steps,
        "accepted_draft_tokens": accepted,
        "tokens_per_forward": tokens / (tokens - accepted) if tokens > accepted else None,
    }


async def compare(
    url: str,
    prompts: Sequence[str],
    sampling: Sampling,
    plan: Plan,
    progress: Callable[[Pair], None],
) -> Comparison:
    """Runs every prompt both ways, ``plan.rounds`` times; which side goes first alternates.

    With several clients the prompts go in groups of that size, each group wholly on one side, then on the other.
    Raises ServerFault or httpx.HTTPError.
    """
    result = Comparison()
    async with httpx.AsyncClient(base_url=url, timeout=httpx.Timeout(600.0), headers=plan.headers) as client:
        await measure(client, prompts[0], sampling, speculate=True)  # warms the connection and the server
        for turn in range(plan.rounds):
            for start in range(0, len(prompts), plan.clients):
                group = prompts[start : start + plan.clients]
                sides: dict[bool, list[Measured]] = {}
                on_first = (turn + start // plan.clients) % 2 == 0
                for speculate in (on_first, not on_first):
                    calls = (measure(client, prompt, sampling, speculate=speculate) for prompt in group)
                    sides[speculate] = await asyncio.gather(*calls)
                for offset, (on, off) in enumerate(zip(sides[True], sides[False], strict=True)):
                    pair = Pair(start + offset, turn, on, off)
                    result.pairs.append(pair)
                    progress(pair)
    return result


@dataclass(frozen=True, slots=True)
class Plan:
    """rounds: times each prompt is answered both ways. clients: requests in flight at once."""

    rounds: int
    clients: int
    headers: dict[str, str] = field(default_factory=dict)
