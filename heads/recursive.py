"""Recursive draft modules with keys and values of their own: what the engine asks of one, whoever published it.

The *entry* of position q (q >= 1) joins the state of position q - 1 with the token at q. Depth 1 of a draft is the
entry of the newest token; each further depth joins the state that the depth before handed on with the token it drafted.
Only differences of positions matter to rotary embeddings, so every module numbers its entries by q, whatever its
reference does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable

import torch

from heads.lm_head import DraftLmHead

# (queries [rows, heads, key_dim] rotated, keys [rows, kv_heads, key_dim] rotated, values [rows, kv_heads, value_dim])
# -> mixed [rows, heads, value_dim]. It stores the rows' keys and values and lets each row see the committed entries, its
# path and itself.
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@runtime_checkable
class OwnKvModule(Protocol):
    """One attention layer, used again for every depth.

    num_heads: depths it is used for. kv_heads, key_dim, value_dim, scale: of its attention. hidden_layers: decoder
    layers of the base model whose outputs ``condition`` reads; () for the final state alone.
    """

    num_heads: int
    hidden_size: int
    kv_heads: int
    key_dim: int
    value_dim: int
    scale: float
    hidden_layers: tuple[int, ...]

    def condition(self, final: torch.Tensor, layers: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """[rows, hidden]: the states of depth 0, from the base model's."""
        ...

    def entries(
        self, states: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of rows, as ``step`` stores them, without running attention."""
        ...

    def step(
        self, states: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(states handed to the next depth, outputs for the lm_head), each [rows, hidden]."""
        ...

    def logits(self, lm_head: DraftLmHead, outputs: torch.Tensor, depth: int) -> torch.Tensor:
        """[rows, draft vocabulary]. depth counts from 1."""
        ...
