"""Draft modules that attend to a KV layer of their own: the interface they share.

An entry joins the state of position q - 1 with the token at position q and belongs to position q; position 0 has none.
Entries of the text are made from the base model's states, those of drafted tokens from the module's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch

from heads.lm_head import DraftLmHead

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
# (queries [rows, heads, key_dim] rotated, keys [rows, kv_heads, key_dim] rotated, values [rows, kv_heads, value_dim])
# -> mixed [rows, heads, value_dim]. It stores the rows' keys and values and lets each row see the committed entries,
# its path and itself. Scale key_dim**-0.5 unless module.scale is set.


class OwnKvModule(Protocol):
    """One block, used for every depth.

    method: its drafter's name. num_heads: depths it is used for. kv_heads, key_dim, value_dim, scale: of its one
    attention layer. hidden_layers: base layers whose states ``condition`` reads; () for the final state alone.
    """

    method: str
    num_heads: int
    hidden_size: int
    kv_heads: int
    key_dim: int
    value_dim: int
    scale: float
    hidden_layers: tuple[int, ...]

    def condition(self, final: torch.Tensor, layers: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """[rows, hidden]: the state of depth 0, from the base model's (EAGLE-3 fuses three layers; others return
        ``final``)."""
        ...

    def entries(
        self, states: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys, values of rows, without running attention. positions: those of the tokens."""
        ...

    def step(
        self, states: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(states handed to the next depth, outputs for the lm_head), each [rows, hidden]."""
        ...

    def logits(self, lm_head: DraftLmHead, outputs: torch.Tensor, depth: int) -> torch.Tensor:
        """[rows, draft vocabulary] from a depth's outputs."""
        ...
