"""A step's rows as attention sees them: for each request its rows, its KV slots and what each row may see.

Masks depend on the step, not on the layer, so they are made once and kept for all layers with the same window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from engine.attention.cache import PagedKV
from engine.batch import Batch, RowSpan
from engine.spec_decode.tree import ROOT


@dataclass(frozen=True, slots=True)
class KVRange:
    """Slots of consecutive logical positions: a run (start, length) where blocks lie in order, else an index."""

    start: int
    length: int
    index: torch.Tensor | None = None

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """tensor: [kv_heads, slots, dim] -> [kv_heads, length, dim], a view where possible."""
        if self.index is None:
            return tensor.narrow(1, self.start, self.length)
        return tensor.index_select(1, self.index)


@dataclass(slots=True)
class Segment:
    """One request's rows [first_row, first_row + num_rows) of the flat batch.

    positions: [rows]; key_positions: [kv_length] of the KV entries (committed tokens, then drafted and extra rows);
    visible: [rows, kv_length] bool, or None for a single row that sees everything. slots: [kv_length] logical -> KV
    slot. All of these lie on the CPU; what attention reads is moved to ``device`` once.
    """

    first_row: int
    num_rows: int
    kv_length: int
    slots: torch.Tensor
    positions: torch.Tensor
    key_positions: torch.Tensor
    visible: torch.Tensor | None
    device: torch.device
    _masks: dict[tuple[int | None, int], tuple[KVRange, torch.Tensor | None]] = field(default_factory=dict)

    def view(self, window: int | None, groups: int, dtype: torch.dtype) -> tuple[KVRange, torch.Tensor | None]:
        """The KV range these rows read under a sliding ``window``, and their additive mask.

        The mask is [groups * rows, kv] with 0 and -inf, repeated for the query heads that share a KV head; None
        where every row sees the whole range.
        """
        key = (window, groups)
        if key not in self._masks:
            self._masks[key] = self._build(window, groups, dtype)
        return self._masks[key]

    def _build(self, window: int | None, groups: int, dtype: torch.dtype) -> tuple[KVRange, torch.Tensor | None]:
        low = 0
        visible = self.visible
        if window is not None and self.kv_length > window:
            # No row sees a key before the first one in the window of the lowest row.
            low = max(0, int(self.positions.min()) - window + 1)
            near = self.positions[:, None] - self.key_positions[None, :] < window
            visible = near if visible is None else visible & near
        if visible is not None:
            visible = visible[:, low:]
            if bool(visible.all()):
                visible = None
        slots = self.slots[low : self.kv_length]
        return self._range(slots), None if visible is None else self._additive(visible, groups, dtype)

    def _range(self, slots: torch.Tensor) -> KVRange:
        start, length = int(slots[0]), len(slots)
        in_order = int(slots[-1]) - start == length - 1 and bool((slots[1:] - slots[:-1] == 1).all())
        return KVRange(start, length, None if in_order else slots.to(self.device))

    def _additive(self, visible: torch.Tensor, groups: int, dtype: torch.dtype) -> torch.Tensor:
        mask = torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, float("-inf"))
        return mask.repeat(groups, 1).to(self.device)


@dataclass(slots=True)
class StepAttention:
    """What a forward pass hands to the attention function through the model's keyword arguments.

    slots: [rows] on the device, where each row's key and value are stored before anything is read.
    """

    segments: list[Segment]
    slots: torch.Tensor
    cache: PagedKV


def step_attention(batch: Batch, cache: PagedKV, block_size: int, device: torch.device) -> StepAttention:
    """What attention needs to know of a batch."""
    segments = [_segment(span, batch.positions, block_size, device) for span in batch.spans]
    slots = torch.cat([segment.slots[-segment.num_rows :] for segment in segments])
    return StepAttention(segments, slots.to(device), cache)


def _segment(span: RowSpan, positions: Sequence[int], block_size: int, device: torch.device) -> Segment:
    end = span.item.start + span.item.count
    own = torch.tensor(positions[span.first_row : span.first_row + span.num_rows])
    return Segment(
        first_row=span.first_row,
        num_rows=span.num_rows,
        kv_length=span.kv_length,
        slots=_slots(span.item.request.block_ids, span.kv_length, block_size),
        positions=own,
        key_positions=torch.cat([torch.arange(end), own[span.item.count :]]),
        visible=None if span.num_rows == 1 else _visible(span),
        device=device,
    )


def _slots(block_ids: Sequence[int], length: int, block_size: int) -> torch.Tensor:
    first = torch.tensor(block_ids[: -(-length // block_size)]) * block_size
    return (first[:, None] + torch.arange(block_size)).flatten()[:length]


def _visible(span: RowSpan) -> torch.Tensor:
    """[rows, kv]: tokens see what is before them; drafted rows the whole prefix, their ancestors, themselves."""
    item, parents = span.item, span.parents
    end = item.start + item.count
    causal = torch.arange(end)[None, :] <= torch.arange(item.start, end)[:, None]
    if not parents:
        return causal
    ancestry = torch.zeros(len(parents), len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent != ROOT:
            ancestry[node] = ancestry[parent]
        ancestry[node, node] = True
    prefix = torch.ones(len(parents), end, dtype=torch.bool)
    hidden = torch.zeros(item.count, len(parents), dtype=torch.bool)
    return torch.cat([torch.cat([causal, hidden], 1), torch.cat([prefix, ancestry], 1)])
