"""Turns a plan into flat rows: no padding, each request's tokens, then its drafted rows, then its extra rows.

What a row sees and where its KV lies follows from its ``RowSpan``; each runner derives it in the form it computes with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.scheduler import ScheduledRequest
from engine.spec_decode.drafter import ExtraRows
from engine.spec_decode.tree import ROOT


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

    @property
    def num_rows(self) -> int:
        return self.item.count + len(self.item.tree) + self.num_extra

    @property
    def kv_length(self) -> int:
        """KV entries of the request in this step: its tokens, then the drafted and extra rows, in row order."""
        return self.item.start + self.num_rows

    @property
    def parents(self) -> tuple[int, ...]:
        """Of the rows below the last token: an index among them, or ROOT for the last token itself."""
        tree = self.item.tree.parents
        return (*tree, *(self.extra.parents if self.extra is not None else ()))

    def positions(self) -> list[int]:
        """Of each row. Position = base + depth, so RoPE is right wherever the row's KV is stored."""
        item, root = self.item, self.item.start + self.item.count - 1
        depths = [*item.tree.depths]
        for parent in self.extra.parents if self.extra is not None else ():
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        return [*range(item.start, root + 1), *(root + depth for depth in depths)]


@dataclass(frozen=True, slots=True)
class Batch:
    """token_ids, positions: of each row. logits_rows: the rows whose logits are wanted, ascending."""

    spans: tuple[RowSpan, ...]
    token_ids: list[int]
    positions: list[int]
    logits_rows: list[int]

    @property
    def num_rows(self) -> int:
        return len(self.token_ids)


def build_batch(scheduled: Sequence[ScheduledRequest], extras: Sequence[ExtraRows | None]) -> Batch:
    """``extras[i]`` are rows that a drafter adds to request i, or None."""
    spans: list[RowSpan] = []
    tokens: list[int] = []
    positions: list[int] = []
    kept: list[int] = []
    for item, extra in zip(scheduled, extras, strict=True):
        span = _span(item, extra, len(tokens), kept)
        spans.append(span)
        tokens += item.request.token_ids[item.start : item.start + item.count]
        tokens += item.tree.tokens
        tokens += extra.tokens if extra is not None else ()
        positions += span.positions()
    return Batch(tuple(spans), tokens, positions, kept)


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
