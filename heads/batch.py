"""Whole answers, one after another, as heads are trained and evaluated on them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from heads.data import Answer, Context, TopLayers
from heads.lm_head import DraftLmHead


@dataclass(frozen=True)
class Batch:
    """Row i is the state that chose token i, of some answer.

    states: [rows, hidden] float32. tokens: [rows] ids. targets: [rows] index of the token in the draft vocabulary, -1
    outside it. positions: [rows] of the state in its sequence, prompt included. lengths: rows of each answer.
    contexts, tops: of each answer, where the answers have them.
    """

    states: torch.Tensor
    tokens: torch.Tensor
    targets: torch.Tensor
    positions: torch.Tensor
    lengths: tuple[int, ...]
    contexts: tuple[Context, ...]
    tops: tuple[TopLayers, ...] = ()

    @cached_property
    def ends(self) -> torch.Tensor:
        """[rows] the first row of the next answer."""
        lengths = torch.tensor(self.lengths, device=self.states.device)
        return lengths.cumsum(0).repeat_interleave(lengths)

    @cached_property
    def spans(self) -> list[slice]:
        """Rows of each answer."""
        starts = [0]
        for length in self.lengths:
            starts.append(starts[-1] + length)
        return [slice(*pair) for pair in itertools.pairwise(starts)]

    def rows(self, depth: int) -> torch.Tensor:
        """The rows whose answer goes on for ``depth`` tokens: those that a head of that depth has a truth for."""
        rows = torch.arange(len(self.states), device=self.states.device)
        return rows[rows + depth < self.ends]


def make_batch(answers: Sequence[Answer], lm_head: DraftLmHead) -> Batch:
    """Where ``lm_head`` is."""
    device = lm_head.linear.weight.device
    ids = torch.tensor([token for answer in answers for token in answer.tokens])
    before = [len(answer.ask.prompt) - 1 for answer in answers]
    return Batch(
        states=torch.cat([answer.states for answer in answers]).to(device, torch.float32),
        tokens=ids.to(device),
        targets=draft_indices(ids, lm_head.token_ids).to(device),
        positions=torch.cat(
            [torch.arange(first, first + len(a.tokens)) for first, a in zip(before, answers, strict=True)]
        ).to(device),
        lengths=tuple(len(answer.tokens) for answer in answers),
        contexts=tuple(answer.context.to(device) for answer in answers if answer.context is not None),
        tops=tuple(answer.read_top().to(device) for answer in answers if answer.read_top is not None),
    )


def draft_indices(ids: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Where each id stands in the (ascending) draft vocabulary, -1 where it does not."""
    at = torch.searchsorted(token_ids, ids).clamp_max(len(token_ids) - 1)
    return torch.where(token_ids[at] == ids, at, -1)
