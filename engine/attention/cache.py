"""The KV pool's tensors: for each layer, keys and values by slot. Slot = block * block_size + offset."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.errors import ModelLoadError


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer stores for a token; key and value heads may differ in size."""

    num_kv_heads: int
    key_dim: int
    value_dim: int

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        return self.num_kv_heads * (self.key_dim + self.value_dim) * dtype.itemsize


class PagedKV:
    """Per layer ``keys`` [kv_heads, slots, key_dim] and ``values`` [kv_heads, slots, value_dim]."""

    def __init__(
        self, shapes: Sequence[LayerShape], num_slots: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        try:
            self.keys = [torch.empty(s.num_kv_heads, num_slots, s.key_dim, dtype=dtype, device=device) for s in shapes]
            self.values = [
                torch.empty(s.num_kv_heads, num_slots, s.value_dim, dtype=dtype, device=device) for s in shapes
            ]
        except (RuntimeError, MemoryError) as error:
            raise ModelLoadError(
                f"not enough memory for a KV cache of {num_slots} tokens; set engine.kv_cache_memory lower"
            ) from error

    def write(self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Stores rows. slots: [rows]; key, value: [kv_heads, rows, dim]."""
        self.keys[layer].index_copy_(1, slots, key)
        self.values[layer].index_copy_(1, slots, value)

    def move(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copies slots of every layer. The gather comes first: an in-place parallel copy would race."""
        for tensors in (self.keys, self.values):
            for tensor in tensors:
                tensor.index_copy_(1, target, tensor.index_select(1, source))
