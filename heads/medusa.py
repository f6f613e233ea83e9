"""Medusa heads (Cai et al., arXiv 2401.10774): head k reads the state that chose token t + 1 and predicts t + 1 + k.

A head is a stack of residual blocks, ``x + SiLU(W x + b)``; its output goes through the model's own lm_head, which is
shared and frozen. W and b start at zero, so an untrained head repeats the model's prediction of the next token. Heads
of public checkpoints may have an lm_head each instead (Medusa-1).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from heads.lm_head import DraftLmHead

if TYPE_CHECKING:
    from heads.batch import Batch


OWN_LM_HEADS = "lm_heads"


class ResidualBlock(nn.Module):
    """``x + SiLU(W x + b)``, the identity when new."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.silu(self.linear(x))


class MedusaHeads(nn.Module):
    """All heads of a model. Parameters are called ``heads.K.J.linear.*``: head K from 0, block J. Output matrices of
    their own are ``lm_heads.K.weight``, [vocab, hidden]."""

    method = "medusa"
    is_recursive = False

    def __init__(self, hidden_size: int, num_heads: int, num_layers: int = 1, *, own_vocab: int | None = None) -> None:
        """own_vocab: the size of the vocabulary, for heads that have an lm_head each."""
        super().__init__()
        self.hidden_size = hidden_size
        # Each block is made anew: a repeated object would share its weights between the heads.
        self.heads = nn.ModuleList(
            nn.Sequential(*(ResidualBlock(hidden_size) for _ in range(num_layers))) for _ in range(num_heads)
        )
        self.lm_heads: nn.ModuleList | None = None
        if own_vocab is not None:
            self.lm_heads = nn.ModuleList(nn.Linear(hidden_size, own_vocab, bias=False) for _ in range(num_heads))

    @property
    def num_heads(self) -> int:
        return len(self.heads)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """states: [..., hidden], after the model's last norm -> [heads, ..., hidden], what lm_head reads."""
        return torch.stack([head(states) for head in self.heads])

    def outputs(self, batch: Batch) -> Iterator[torch.Tensor]:
        """What lm_head reads, head by head: [len(batch.rows(depth)), hidden]."""
        for depth, head in enumerate(self.heads, start=1):
            yield head(batch.states[batch.rows(depth)])

    def logits(self, lm_head: DraftLmHead, outputs: torch.Tensor, depth: int) -> torch.Tensor:
        """Of the draft vocabulary of ``lm_head``, whichever matrix they come from."""
        own: Any = None if self.lm_heads is None else self.lm_heads[depth - 1]  # a Linear, or what it was packed into
        logits: torch.Tensor
        if own is None:
            logits = lm_head(outputs)
        elif own.out_features == len(lm_head.token_ids):
            logits = own(outputs)
        else:
            logits = F.linear(outputs, own.weight[lm_head.token_ids.to(own.weight.device)])
        return logits

    def all_logits(self, lm_head: DraftLmHead, states: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] -> [heads, rows, draft vocabulary]."""
        outputs = self(states)
        if self.lm_heads is None:
            logits: torch.Tensor = lm_head(outputs)  # one product for all heads
            return logits
        return torch.stack([self.logits(lm_head, output, depth) for depth, output in enumerate(outputs, start=1)])

    def cut(self, token_ids: torch.Tensor) -> None:
        """Drops the rows of own lm_heads that are not of the draft vocabulary; afterwards they cannot be saved."""
        own: Any
        for own in self.lm_heads or ():
            if own.out_features != len(token_ids):
                own.weight = nn.Parameter(own.weight[token_ids.to(own.weight.device)], requires_grad=False)
                own.out_features = len(token_ids)
