"""Markov heads: Medusa heads, and a bias of low rank from the token drafted before.

Independent heads do not know which tokens come between, so the likeliest tokens of two depths need not fit each other.
Here head k's logits after a token t are ``lm_head(medusa_k(state)) + W_k E[t]``: E [vocabulary, rank] is shared by the
heads, W_k [draft vocabulary, rank] is each one's own. The Medusa part does not depend on t, so it is computed once,
and every node of a draft tree costs one small product more. E starts at zero, so untrained heads are Medusa heads, and
a token that training never saw gives no bias.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from heads.lm_head import DraftLmHead
from heads.medusa import MedusaHeads

if TYPE_CHECKING:
    from heads.batch import Batch


@dataclass(frozen=True, slots=True)
class MarkovSizes:
    """Of the bias. vocab: tokens it may follow from. draft_vocab: tokens it is for."""

    rank: int
    vocab: int
    draft_vocab: int


class MarkovHeads(nn.Module):
    """``medusa``, which shares the model's lm_head, and the bias: ``embedding.weight`` is E, ``biases.K.weight`` W of
    head K from 0."""

    method = "markov"
    is_recursive = False

    def __init__(self, medusa: MedusaHeads, sizes: MarkovSizes) -> None:
        super().__init__()
        self.medusa = medusa
        self.rank = sizes.rank
        self.embedding = nn.Embedding(sizes.vocab, sizes.rank)
        self.biases = nn.ModuleList(
            nn.Linear(sizes.rank, sizes.draft_vocab, bias=False) for _ in range(medusa.num_heads)
        )

    @property
    def num_heads(self) -> int:
        return self.medusa.num_heads

    @property
    def hidden_size(self) -> int:
        return self.medusa.hidden_size

    def bias(self, tokens: torch.Tensor, depth: int) -> torch.Tensor:
        """What head ``depth``'s logits gain after ``tokens``: [rows] -> [rows, draft vocabulary]."""
        bias: torch.Tensor = self.biases[depth - 1](self.embedding(tokens))
        return bias

    def outputs(self, batch: Batch) -> Iterator[torch.Tensor]:
        """Head by head: [len(batch.rows(depth)), hidden + rank], what lm_head reads beside E of the answer's token
        before the predicted one."""
        for depth, states in enumerate(self.medusa.outputs(batch), start=1):
            before = batch.tokens[batch.rows(depth) + depth - 1]
            yield torch.cat([states, self.embedding(before)], dim=-1)

    def logits(self, lm_head: DraftLmHead, outputs: torch.Tensor, depth: int) -> torch.Tensor:
        states, before = outputs[..., : self.hidden_size], outputs[..., self.hidden_size :]
        logits: torch.Tensor = self.medusa.logits(lm_head, states, depth) + self.biases[depth - 1](before)
        return logits


@torch.no_grad()
def start(heads: MarkovHeads, seed: int) -> None:
    """Fills the bias of new heads: without effect, but W is random, so that E has a gradient to leave zero by."""
    generator = torch.Generator().manual_seed(seed)
    nn.init.zeros_(heads.embedding.weight)
    for bias in heads.biases:
        assert isinstance(bias, nn.Linear)
        nn.init.normal_(bias.weight, generator=generator)
