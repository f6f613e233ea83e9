"""How often drafts of a kind were right lately: an exponential average in buckets, resting on a prior."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Buckets:
    """How a table is cut: ``edges`` are upper edges, ascending, and the last one bounds every value.

    assumed: the rate of each bucket before anything was seen. prior_weight: how many observations that is worth.
    decay: what is left of the evidence in a bucket after each new observation there.
    """

    edges: tuple[float, ...]
    assumed: tuple[float, ...]
    prior_weight: float
    decay: float


class AcceptanceTable:
    """Acceptance rate by a value such as a match length or a confidence. With ``prior``, unseen evidence is borrowed
    from that table."""

    def __init__(self, buckets: Buckets, prior: AcceptanceTable | None = None) -> None:
        self._buckets = buckets
        self._tried = [0.0] * len(buckets.edges)
        self._right = [0.0] * len(buckets.edges)
        self._prior = prior

    def child(self) -> AcceptanceTable:
        """An empty table that borrows what it lacks from this one."""
        return AcceptanceTable(self._buckets, self)

    def rate(self, value: float) -> float:
        """Estimated probability that a draft of this value is right."""
        return self._bucket_rate(self._bucket(value))

    def rates(self, values: Sequence[float]) -> list[float]:
        found: dict[int, float] = {}
        buckets = [self._bucket(value) for value in values]
        for bucket in buckets:
            if bucket not in found:
                found[bucket] = self._bucket_rate(bucket)
        return [found[bucket] for bucket in buckets]

    def record(self, value: float, right: bool) -> None:
        """Counts one observation, here and in the table this one borrows from."""
        if self._prior is not None:
            self._prior.record(value, right)
        bucket, decay = self._bucket(value), self._buckets.decay
        self._tried[bucket] = self._tried[bucket] * decay + 1.0
        self._right[bucket] = self._right[bucket] * decay + float(right)

    def _bucket(self, value: float) -> int:
        return bisect.bisect_left(self._buckets.edges, value, 0, len(self._buckets.edges) - 1)

    def _bucket_rate(self, bucket: int) -> float:
        weight = self._buckets.prior_weight
        assumed = self._buckets.assumed[bucket] if self._prior is None else self._prior._bucket_rate(bucket)
        return (weight * assumed + self._right[bucket]) / (weight + self._tried[bucket])
