"""Turns a plan into one flat row of tensors: no padding, every row with its own position and KV slot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.attention.cache import PagedKV
from engine.attention.segments import Segment, StepAttention
from engine.scheduler import ScheduledRequest
from engine.spec_decode.drafter import ExtraRows
from engine.spec_decode.tree import ROOT, DraftTree


@dataclass(frozen=True, slots=True)
class RowSpan:
    """Where one scheduled request's rows and logits lie.

    first_row: flat row of its first token; the tree's nodes follow its ``count`` tokens, then its extra rows.
    first_logits: logits row of its first kept row, or -1 when the step needs none of its logits. Kept rows are the
    last token and the tree, preceded by the other tokens when the prompt's log-probabilities are wanted.
    root_logits: logits row of the last token, or -1.
    """

    item: ScheduledRequest
    extra: ExtraRows | None
    first_row: int
    first_logits: int
    root_logits: int

    @property
    def root_row(self) -> int:
        return self.first_row + self.item.count - 1

    @property
    def extra_row(self) -> int:
        return self.root_row + 1 + len(self.item.tree)

    @property
    def num_extra(self) -> int:
        return 0 if self.extra is None else len(self.extra.tokens)


@dataclass(frozen=True, slots=True)
class Batch:
    """token_ids, positions: [rows]. logits_rows: [kept] the rows whose logits are wanted."""

    spans: tuple[RowSpan, ...]
    token_ids: torch.Tensor
    positions: torch.Tensor
    logits_rows: torch.Tensor
    attention: StepAttention

    @property
    def num_rows(self) -> int:
        return len(self.token_ids)


class BatchBuilder:
    """Builds batches over one KV cache."""

    def __init__(self, cache: PagedKV, block_size: int, device: torch.device) -> None:
        self._cache = cache
        self._block_size = block_size
        self._device = device

    def build(self, scheduled: Sequence[ScheduledRequest], extras: Sequence[ExtraRows | None]) -> Batch:
        """``extras[i]`` are rows that a drafter adds to request i, or None."""
        spans: list[RowSpan] = []
        segments: list[Segment] = []
        tokens: list[int] = []
        kept: list[int] = []
        for item, extra in zip(scheduled, extras, strict=True):
            span = self._span(item, extra, len(tokens), kept)
            spans.append(span)
            request = item.request
            tokens += request.token_ids[item.start : item.start + item.count]
            tokens += item.tree.tokens
            tokens += extra.tokens if extra is not None else ()
            segments.append(self._segment(span))
        positions = torch.cat([segment.positions for segment in segments])
        slots = torch.cat([segment.slots[-segment.num_rows :] for segment in segments])
        return Batch(
            tuple(spans),
            torch.tensor(tokens, device=self._device),
            positions.to(self._device),
            torch.tensor(kept, dtype=torch.long, device=self._device),
            StepAttention(segments, slots.to(self._device), self._cache),
        )

    @staticmethod
    def _span(item: ScheduledRequest, extra: ExtraRows | None, first_row: int, kept: list[int]) -> RowSpan:
        root_row = first_row + item.count - 1
        wants_prompt = item.request.wants_prompt_logprobs and item.start < item.request.prompt_length
        rows = list(range(first_row, root_row)) if wants_prompt else []
        if item.completes or wants_prompt:
            rows += range(root_row, root_row + 1 + len(item.tree))
        first_logits = len(kept) if rows else -1
        root_logits = len(kept) + rows.index(root_row) if item.completes else -1
        kept += rows
        return RowSpan(item, extra, first_row, first_logits, root_logits)

    def _segment(self, span: RowSpan) -> Segment:
        item, tree = span.item, span.item.tree
        end = item.start + item.count
        drafted = len(tree) + span.num_extra
        rows, length = item.count + drafted, end + drafted
        below = self._positions_below(end - 1, tree, span.extra)
        own = torch.arange(item.start, end)
        return Segment(
            first_row=span.first_row,
            num_rows=rows,
            kv_length=length,
            slots=self._slots(item.request.block_ids, length),
            positions=torch.cat([own, below]) if drafted else own,
            key_positions=torch.cat([torch.arange(end), below]) if drafted else torch.arange(end),
            visible=None if rows == 1 else self._visible(item, tree, span.extra),
            device=self._device,
        )

    def _slots(self, block_ids: Sequence[int], length: int) -> torch.Tensor:
        used = -(-length // self._block_size)
        first = torch.tensor(block_ids[:used]) * self._block_size
        return (first[:, None] + torch.arange(self._block_size)).flatten()[:length]

    @staticmethod
    def _positions_below(root: int, tree: DraftTree, extra: ExtraRows | None) -> torch.Tensor:
        """Position = base + depth, so RoPE is right wherever the row's KV is stored."""
        depths = [*tree.depths]
        for parent in extra.parents if extra is not None else ():
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        return torch.tensor(depths, dtype=torch.long) + root

    @staticmethod
    def _visible(item: ScheduledRequest, tree: DraftTree, extra: ExtraRows | None) -> torch.Tensor:
        """[rows, kv]: tokens see what is before them; drafted rows the whole prefix, their ancestors, themselves."""
        end = item.start + item.count
        causal = torch.arange(end)[None, :] <= torch.arange(item.start, end)[:, None]
        parents = [*tree.parents, *(extra.parents if extra is not None else ())]
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
