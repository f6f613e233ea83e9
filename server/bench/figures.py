"""The figures of a run: a row a side, and the ratios of our side with speculation to every other side."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from server.bench.acceptance import acceptance_figures
from server.bench.client import Measured
from server.bench.compare import Pair, identity
from server.bench.datasets import Dataset
from server.bench.load import Load, Part
from server.bench.side import OFF, ON

_PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a request must keep to count as good, in seconds: time to the first text, and time a token after it."""

    ttft: float
    per_token: float

    def hold(self, answer: Measured) -> bool:
        return answer.first_token <= self.ttft and (answer.seconds_per_token or 0.0) <= self.per_token

    def as_dict(self) -> dict[str, float]:
        return {"ttft_ms": self.ttft * 1000, "tpot_ms": self.per_token * 1000}


@dataclass(frozen=True, slots=True)
class Cell:
    """What all sides answered of one dataset under one load. sides: in the order of the report."""

    dataset: Dataset
    load: Load
    sides: Sequence[str]
    parts: Sequence[Part]

    def of(self, side: str) -> list[Part]:
        """A side's rounds, in order."""
        return [part for part in self.parts if part.side == side]

    @property
    def head(self) -> dict[str, Any]:
        load = self.load
        return {"dataset": self.dataset.name, "load": load.label, "clients": load.clients, "rate": load.rate}


def rows(cell: Cell, bounds: Bounds, drafters: Sequence[str]) -> list[dict[str, Any]]:
    """One a side, times in milliseconds; latencies over the requests of all rounds. drafters: those of our server."""
    return [_row(cell, side, bounds, drafters) for side in cell.sides]


def _row(cell: Cell, side: str, bounds: Bounds, drafters: Sequence[str]) -> dict[str, Any]:
    parts = cell.of(side)
    answers = [answer for part in parts for answer in part.answers]
    failures = [failure for part in parts for failure in part.failures]
    good, seconds = sum(map(bounds.hold, answers)), sum(part.seconds for part in parts)
    requests = len(answers) + len(failures)
    return cell.head | {
        "side": side,
        "requests": requests,
        "errors": len(failures),
        "first_error": failures[0].reason if failures else None,
        "completion_tokens": sum(answer.completion_tokens for answer in answers),
        "tokens_counted_from": "usage" if all(answer.has_usage for answer in answers) else "chunks",
        "seconds": seconds,
        "total_tokens_per_second": spread(map(total_rate, parts)),
        "decode_tokens_per_second": spread(map(decode_rate, parts)),
        "ttft_ms": percentiles(answer.first_token for answer in answers),
        "tpot_ms": percentiles(time for answer in answers if (time := answer.seconds_per_token) is not None),
        "gap_ms": percentiles(gap for answer in answers for gap in answer.gaps),
        "goodput": {
            "share": good / requests if requests else None,
            "requests_per_second": good / seconds if seconds else None,
        },
        "acceptance": acceptance_figures(answers, drafters) if side == ON else None,
    }


def percentiles(seconds: Iterable[float]) -> dict[str, float | None]:
    """In milliseconds, linear between two values; None without any."""
    values = [value * 1000 for value in seconds]
    if not values:
        return dict.fromkeys((f"p{rank}" for rank in _PERCENTILES), None)
    cuts = statistics.quantiles(values, n=100, method="inclusive") if len(values) > 1 else values * 99
    return {f"p{rank}": cuts[rank - 1] for rank in _PERCENTILES}


def spread(values: Iterable[float | None]) -> dict[str, Any] | None:
    """Median, least and most of the rounds that have a value; None without any."""
    rounds = list(values)
    known = [value for value in rounds if value is not None]
    if not known:
        return None
    return {"median": statistics.median(known), "min": min(known), "max": max(known), "rounds": rounds}


def total_rate(part: Part) -> float | None:
    """All tokens of a round over its wall time."""
    tokens = sum(answer.completion_tokens for answer in part.answers)
    return tokens / part.seconds if tokens and part.seconds else None


def decode_rate(part: Part) -> float | None:
    """The median over prompts of the tokens after the first, per second."""
    return _median(answer.decode_rate or None for answer in part.answers)


def _ttft_speed(part: Part) -> float | None:
    time = _median(answer.first_token for answer in part.answers)
    return 1 / time if time else None


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def ratios(cell: Cell) -> list[dict[str, Any]]:
    """Our side with speculation against every other side, round by round; above 1 it is the faster one."""
    return [_ratio(cell, other) for other in cell.sides if other != ON]


def _ratio(cell: Cell, other: str) -> dict[str, Any]:
    rounds = list(zip(cell.of(ON), cell.of(other), strict=True))

    def of(speed: Callable[[Part], float | None]) -> dict[str, Any] | None:
        return spread(a / b if (a := speed(ours)) and (b := speed(theirs)) else None for ours, theirs in rounds)

    pairs = [
        Pair(index % len(cell.dataset.prompts), ours.round, on, off)
        for ours, theirs in rounds
        for index, (on, off) in enumerate(zip(ours.outcomes, theirs.outcomes, strict=True))
        if isinstance(on, Measured) and isinstance(off, Measured)
    ]
    found = {
        "against": other,
        "total_tokens_per_second": of(total_rate),
        "decode_tokens_per_second": of(decode_rate),
        "ttft": of(_ttft_speed),
        "pairs": len(pairs),
        "same_text": sum(pair.on.text == pair.off.text for pair in pairs),
    }
    return cell.head | found | (identity(pairs) if other == OFF else {})
