"""Top-k, top-p and min-p: each removes tokens from a temperature-scaled row by setting them to -inf.

Tokens rank by (logit, then lower id first), so that every cut is deterministic. A filter also measures how far a
token is from changing sides. Such a distance is the least d for which moving every logit by at most d / 2 could
move the token over the boundary: the unit of a gap between two scaled logits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from engine.sampling_params import SamplingParams


class Filter(Protocol):
    """One cut of a row [vocab], which may hold -inf from an earlier cut."""

    def apply(self, row: torch.Tensor) -> None:
        """Removes tokens in place; at least one stays."""
        ...

    def distance(self, row: torch.Tensor, token: int, *, is_kept: bool) -> float:
        """How far ``token`` is from the boundary of this filter on ``row`` (before the cut); inf if it cannot cross.

        is_kept: which side the token is on.
        """
        ...


def active_filters(sampling: SamplingParams) -> list[Filter]:
    """The filters a request asks for, in the order in which they act."""
    filters: list[Filter] = []
    if sampling.top_k > 0:
        filters.append(TopK(sampling.top_k))
    if sampling.top_p < 1.0:
        filters.append(TopP(sampling.top_p))
    if sampling.min_p > 0.0:
        filters.append(MinP(sampling.min_p))
    return filters


@dataclass(frozen=True, slots=True)
class TopK:
    """Keeps the k best tokens."""

    k: int

    def apply(self, row: torch.Tensor) -> None:
        if self.k < len(row):
            _cut(row, row.topk(self.k).values[-1], self.k)

    def distance(self, row: torch.Tensor, token: int, *, is_kept: bool) -> float:
        if self.k >= len(row):
            return math.inf
        best = row.topk(self.k + 1).values
        # A kept token leaves when the best removed one passes it; a removed one enters by passing the last kept.
        return float(row[token] - best[-1]) if is_kept else float(best[-2] - row[token])


@dataclass(frozen=True, slots=True)
class TopP:
    """Keeps the smallest set of best tokens whose probability reaches p: a token stays while those before it hold
    less than p. The best one always stays."""

    p: float

    def apply(self, row: torch.Tensor) -> None:
        values = _descending(row)
        sums = (values.double() - values[0]).exp_().cumsum(0)
        count = 1 + int((sums[:-1] < self.p * sums[-1]).sum())
        _cut(row, values[count - 1], count)

    def distance(self, row: torch.Tensor, token: int, *, is_kept: bool) -> float:
        """The log-odds of a mass move by at most d when logits move by d / 2, and d also reorders tokens within d."""
        values = _descending(row).double()
        weights = (values - values[0]).exp_()
        rank = int((row > row[token]).sum() + (row[:token] == row[token]).sum())
        limit = max(self.p, 1e-300)
        log_odds_limit = math.log(limit) - math.log1p(-limit)
        if is_kept:
            # Leaves when enough mass stands before it: what already does, and what follows within the gap.
            gaps = values[rank] - values[rank:]
            before = weights.cumsum(0)[rank:] - weights[rank]
            after = weights.flip(0).cumsum(0).flip(0)[rank:] - weights[rank:] + weights[rank]
            shortfall = log_odds_limit - (before.clamp(min=0.0).log() - after.log())
        else:
            # Enters when little enough mass stands before it: it overtakes what precedes it within the gap.
            sums = torch.cat((weights.new_zeros(1), weights.cumsum(0)[:rank]))
            gaps = values[: rank + 1] - values[rank]
            rest = weights.flip(0).cumsum(0).flip(0)[: rank + 1]
            shortfall = (sums.log() - rest.log()) - log_odds_limit
        return float(torch.maximum(gaps, shortfall).min().clamp(min=0.0))


@dataclass(frozen=True, slots=True)
class MinP:
    """Keeps the tokens at least ``p`` times as likely as the best one."""

    p: float

    def apply(self, row: torch.Tensor) -> None:
        row.masked_fill_(row < row.max() + math.log(self.p), -torch.inf)

    def distance(self, row: torch.Tensor, token: int, *, is_kept: bool) -> float:
        others = row.clone()
        others[token] = -torch.inf
        gap = float(row[token] - (others.max() + math.log(self.p)))
        return gap if is_kept else -gap


def _descending(row: torch.Tensor) -> torch.Tensor:
    """The finite values of ``row``, largest first."""
    if row.device.type == "cpu":  # numpy sorts bare values with vector instructions, many times faster than torch
        ascending = np.sort(row.numpy())
        return torch.from_numpy(ascending[np.searchsorted(ascending, -np.inf, side="right") :]).flip(0)
    values = row.sort(descending=True).values
    return values[values > -torch.inf]


def _cut(row: torch.Tensor, threshold: torch.Tensor, count: int) -> None:
    """Leaves the ``count`` best tokens, the last of which has logit ``threshold``."""
    ids = (row >= threshold).nonzero().squeeze(1)
    spare = len(ids) - count
    if spare:
        ties = (row[ids] == threshold).nonzero().squeeze(1)
        stays = torch.ones_like(ids, dtype=torch.bool)
        stays[ties[-spare:]] = False
        ids = ids[stays]
    values = row[ids]
    row.fill_(-torch.inf)
    row[ids] = values
