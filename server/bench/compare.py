"""Speculation on against off on one server, interleaved: the machine's drift falls on both sides alike."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx

from server.bench.client import Measured, Sampling, ServerFault, measure

# Larger margins count as this one: no rounding can matter there, and near probability 1 they are not exact themselves.
_SAFE_MARGIN = 10.0


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two answers part.

    kind: what differs first: a token; the length, where one answer's tokens begin the other's; or with equal tokens
        the finish reason or the text. token: index of the first token that is not in both, from 0.
    margin: the smaller of both sides' margins there; None where there is no differing token, or not both have one.
    """

    kind: Literal["token", "length", "finish_reason", "text"]
    token: int
    margin: float | None = None

    def is_near_tie(self, bound: float) -> bool:
        """Both tokens were so close that the last bits of the logits chose; anything else is a fault."""
        return self.margin is not None and self.margin < bound


@dataclass(frozen=True, slots=True)
class Pair:
    """One prompt (its index, from 0) answered both ways in one round."""

    prompt: int
    round: int
    on: Measured
    off: Measured

    @property
    def num_common(self) -> int:
        """Tokens up to the first that differs."""
        return _common_length(self.on.token_ids, self.off.token_ids)

    @property
    def num_common_characters(self) -> int:
        return _common_length(self.on.text, self.off.text)

    @property
    def difference(self) -> Difference | None:
        """None when tokens, finish reason and text are the same."""
        at = self.num_common
        lengths = len(self.on.token_ids), len(self.off.token_ids)
        if at < min(lengths):
            return Difference("token", at, self._margin_at(at))
        if lengths[0] != lengths[1]:
            return Difference("length", at)
        if self.on.finish_reason != self.off.finish_reason:
            return Difference("finish_reason", at)
        return None if self.on.text == self.off.text else Difference("text", at)

    def _margin_at(self, index: int) -> float | None:
        sides = [side.margins[index] if index < len(side.margins) else None for side in (self.on, self.off)]
        known = [margin for margin in sides if margin is not None]
        return min(known) if len(known) == len(sides) else None

    @property
    def margin_gap(self) -> float | None:
        """The largest difference of both sides' margins over the tokens in common; None where there are none."""
        both = zip(self.on.margins, self.off.margins, strict=False)
        known = [(a, b) for a, b in list(both)[: self.num_common] if a is not None and b is not None]
        return max((abs(min(a, _SAFE_MARGIN) - min(b, _SAFE_MARGIN)) for a, b in known), default=None)


def _common_length(one: Sequence[object], other: Sequence[object]) -> int:
    both = zip(one, other, strict=False)
    return next((index for index, (a, b) in enumerate(both) if a != b), min(len(one), len(other)))


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

    def differences(self) -> list[tuple[Pair, Difference]]:
        """The pairs that are not the same, and where they part."""
        return [(pair, difference) for pair in self.pairs if (difference := pair.difference) is not None]

    def summary(self) -> dict[str, Any]:
        """The figures of a report."""
        ratios = self.ratio_by_round()
        return {
            "pairs": len(self.pairs),
            "time_ratio_off_over_on": {
                "median": statistics.median(ratios),
                "min": min(ratios),
                "max": max(ratios),
                "rounds": ratios,
            },
            "on": side_summary([pair.on for pair in self.pairs]),
            "off": side_summary([pair.off for pair in self.pairs]),
            **identity(self.pairs),
        }


def identity(pairs: Sequence[Pair]) -> dict[str, Any]:
    """How many answers speculation left as they are, and where each of the others parts."""
    differences = [(pair, difference) for pair in pairs if (difference := pair.difference) is not None]
    return {
        "identical": len(pairs) - len(differences),
        "differences": [
            {
                "prompt": pair.prompt,
                "round": pair.round,
                "kind": difference.kind,
                "token": difference.token,
                "margin": difference.margin,
            }
            for pair, difference in differences
        ],
    }


def side_summary(sides: Sequence[Measured]) -> dict[str, Any]:
    """``acceptance_length``: output tokens over decode forwards, plain ones included."""
    tokens = sum(side.completion_tokens for side in sides)
    steps = sum(side.acceptance.get("num_decode_steps", 0) for side in sides)
    rates = [side.decode_rate for side in sides if side.decode_rate]
    return {
        "completion_tokens": tokens,
        "seconds": sum(side.total for side in sides),
        "decode_tokens_per_second": statistics.median(rates) if rates else None,
        "ttft_seconds": statistics.median(side.first_token for side in sides),
        "decode_steps": steps,
        "drafted_steps": sum(side.acceptance.get("num_spec_steps", 0) for side in sides),
        "accepted_draft_tokens": sum(side.acceptance.get("num_accepted_draft_tokens", 0) for side in sides),
        "acceptance_length": tokens / steps if steps else None,
    }


@dataclass(frozen=True, slots=True)
class Plan:
    """rounds: times each prompt is answered both ways. clients: requests in flight at once."""

    rounds: int = 1
    clients: int = 1


async def compare(
    client: httpx.AsyncClient,
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
    await _answers(client, prompts[:1], sampling, True, 0)  # warms the connection and the server
    for turn in range(plan.rounds):
        for start in range(0, len(prompts), plan.clients):
            group = prompts[start : start + plan.clients]
            sides: dict[bool, list[Measured]] = {}
            on_first = (turn + start // plan.clients) % 2 == 0
            for speculate in (on_first, not on_first):
                sides[speculate] = await _answers(client, group, sampling, speculate, start)
            for offset, (on, off) in enumerate(zip(sides[True], sides[False], strict=True)):
                pair = Pair(start + offset, turn, on, off)
                result.pairs.append(pair)
                progress(pair)
    return result


async def _answers(
    client: httpx.AsyncClient, group: Sequence[str], sampling: Sampling, speculate: bool, start: int
) -> list[Measured]:
    """The answers of prompts ``start``, ``start`` + 1, ... at the same time."""

    async def answer(index: int, prompt: str) -> Measured:
        try:
            return await measure(client, prompt, sampling, speculate=speculate)
        except ServerFault as error:
            raise ServerFault(f"prompt {index}: {error}") from error

    return await asyncio.gather(*(answer(start + offset, prompt) for offset, prompt in enumerate(group)))
