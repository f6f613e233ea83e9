"""From the logits of draft heads to candidates and their calibrated chances, alike for every kind of heads.

At temperature 0 candidates are ranked by log q. Above it they are ranked by log q + g, with g the very noise that the
verifier will add at that position ("coupled"): where q is near the target, the same token wins on both sides, however
flat the distribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.errors import RequestFailedError
from engine.sampler.noise import NoiseKey
from engine.sampler.processing import RowContext, is_greedy, needs_processing, target_row
from engine.sampling_params import SamplingParams
from engine.spec_decode.acceptance import AcceptanceTable, Buckets
from engine.spec_decode.candidates import Candidates, HeadCompute, PlainHeadCompute, Wish
from engine.spec_decode.drafter import DraftContext
from heads.config import CONFIDENCE_EDGES, Calibration
from heads.lm_head import DraftLmHead

# A node less likely than this is never worth proposing.
MIN_SURVIVAL = 0.01
_PRIOR_WEIGHT = 30.0
_DECAY = 0.99


@dataclass(frozen=True, slots=True)
class RankedRow:
    """A row of logits to choose from. depth: of the candidates, from 1. path: the drafted tokens between the last
    committed one and them, as far as the heads knew them. count: candidates wanted at most."""

    context: DraftContext
    depth: int
    count: int
    path: tuple[int, ...] = ()


class HeadRanking:
    """Turns logits into candidates as the target's own logits would be turned."""

    def __init__(self, lm_head: DraftLmHead, *, coupling: bool = True, eos_token_ids: tuple[int, ...] = ()) -> None:
        self.compute: HeadCompute = PlainHeadCompute()
        self._lm_head = lm_head
        self._token_ids = lm_head.token_ids.numpy()
        self._coupling = coupling
        self._eos = eos_token_ids

    def candidates(self, logits: torch.Tensor, rows: Sequence[RankedRow]) -> list[Candidates]:
        """logits: float32 [len(rows), draft vocabulary] on the CPU, contiguous; changed in place."""
        wishes = []
        for index, row in enumerate(rows):
            sampling = row.context.sampling
            is_plain = is_greedy(sampling)
            if needs_processing(sampling):
                logits[index] = self._processed(row, logits[index])
            elif not is_plain:
                logits[index].div_(sampling.temperature)
            position = len(row.context.token_ids) + row.depth - 1
            is_noisy = self._coupling and not is_plain
            wishes.append(Wish(row.count, NoiseKey(sampling.seed, position) if is_noisy else None))
        return self.compute.candidates(logits, self._token_ids, wishes)

    def _processed(self, row: RankedRow, logits: torch.Tensor) -> torch.Tensor:
        """Bias, penalties, bans, temperature and filters, by the function that makes the target's rows."""
        context = row.context
        tokens = [*context.token_ids, *row.path] if row.path else context.token_ids
        whole = torch.full((self._lm_head.vocab_size,), -torch.inf)
        whole[self._lm_head.token_ids] = logits
        try:
            target_row(whole, RowContext(context.sampling, tokens, context.prompt_length, self._eos))
        except RequestFailedError:  # the draft vocabulary holds nothing the request allows
            whole[self._lm_head.token_ids] = 0.0
        return whole[self._lm_head.token_ids]


@dataclass(frozen=True, slots=True)
class Offer(Candidates):
    """rates: how often each is right where its parent is, as calibrated; best first."""

    rates: list[float]


class Calibrations:
    """Acceptance by depth and confidence, over all requests; greedy and sampled drafts are ranked by different scores,
    so they are calibrated apart."""

    def __init__(self, depths: int, calibration: Calibration | None) -> None:
        """calibration: what was measured after training; None trusts the heads' word."""
        self._tables = {greedy: _tables(depths, calibration) for greedy in (True, False)}

    def of_request(self, sampling: SamplingParams) -> list[AcceptanceTable]:
        """A request's own tables, one a depth, resting on what all requests taught."""
        return [table.child() for table in self._tables[is_greedy(sampling)]]


def _tables(depths: int, calibration: Calibration | None) -> list[AcceptanceTable]:
    if calibration is None:
        rates: Sequence[tuple[float, ...]] = [CONFIDENCE_EDGES] * depths
        edges: tuple[float, ...] = CONFIDENCE_EDGES
    else:
        rates, edges = calibration.rates, calibration.edges
    return [AcceptanceTable(Buckets(edges, depth, _PRIOR_WEIGHT, _DECAY)) for depth in rates]


def offer_of(found: Candidates, table: AcceptanceTable) -> Offer:
    """Best calibrated rate first; buckets may disagree with the heads' own order."""
    rates = table.rates(found.confidences)
    order = sorted(range(len(rates)), key=lambda rank: -rates[rank])
    return Offer(
        [found.tokens[rank] for rank in order],
        [found.confidences[rank] for rank in order],
        [rates[rank] for rank in order],
    )
