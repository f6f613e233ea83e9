"""How often drafts of a kind were right lately: an exponential average in buckets, resting on a prior."""

from __future__ import annotations

# Upper edges of the match lengths that share a rate, and what is assumed of each before anything was seen.
_EDGES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
_ASSUMED = (0.12, 0.25, 0.35, 0.45, 0.55, 0.65, 0.75, 0.8, 0.85, 0.9)
_DECAY = 0.97
_PRIOR_WEIGHT = 6.0


class AcceptanceTable:
    """Acceptance rate by match length. With ``prior``, unseen evidence is borrowed from that table."""

    def __init__(self, max_match: int, prior: AcceptanceTable | None = None) -> None:
        self._buckets = [next(i for i, edge in enumerate(_EDGES) if match <= edge) for match in range(1, max_match + 1)]
        self._tried = [0.0] * len(_EDGES)
        self._right = [0.0] * len(_EDGES)
        self._prior = prior

    def rate(self, match: int) -> float:
        """Estimated probability that what followed a match of this length follows again."""
        return self._bucket_rate(self._buckets[match - 1])

    def _bucket_rate(self, bucket: int) -> float:
        assumed = _ASSUMED[bucket] if self._prior is None else self._prior._bucket_rate(bucket)
        return (_PRIOR_WEIGHT * assumed + self._right[bucket]) / (_PRIOR_WEIGHT + self._tried[bucket])

    def record(self, match: int, right: bool) -> None:
        bucket = self._buckets[match - 1]
        self._tried[bucket] = self._tried[bucket] * _DECAY + 1.0
        self._right[bucket] = self._right[bucket] * _DECAY + float(right)
