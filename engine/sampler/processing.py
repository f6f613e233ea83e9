"""Makes the target row: one function for plain, drafted and bonus rows alike.

In this order: logits in fp32 (fp64 stays fp64); logit_bias; repetition penalty over prompt and output; presence and
frequency penalties over the output; bans (min_tokens, bad_words); then, unless greedy, temperature, top-k, top-p,
min-p. "Output" includes the drafted tokens on the path to the row's node, as if they had been committed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from engine.errors import RequestFailedError
from engine.sampler.filters import active_filters
from engine.sampling_params import GREEDY_TEMPERATURE, SamplingParams


def is_greedy(sampling: SamplingParams) -> bool:
    """Whether the token is the plain maximum of the processed row: no noise, no filters."""
    return sampling.temperature < GREEDY_TEMPERATURE


def needs_processing(sampling: SamplingParams) -> bool:
    """Whether a target row is more than its logits divided by the temperature."""
    return bool(
        sampling.logit_bias
        or sampling.repetition_penalty != 1.0
        or sampling.presence_penalty != 0.0
        or sampling.frequency_penalty != 0.0
        or sampling.min_tokens
        or sampling.bad_words
        or (not is_greedy(sampling) and active_filters(sampling))
    )


@dataclass(slots=True)
class RowContext:
    """What one request's rows depend on beside their logits; built anew each step, since ``token_ids`` grows.

    token_ids: committed tokens, prompt first. prompt_length: how many are the prompt.
    eos_token_ids: banned with the stop ids while fewer than min_tokens are out (with ignore_eos too, as in vLLM).
    """

    sampling: SamplingParams
    token_ids: Sequence[int]
    prompt_length: int
    eos_token_ids: tuple[int, ...] = ()
    _seen: torch.Tensor | None = field(default=None, init=False)
    _counts: torch.Tensor | None = field(default=None, init=False)

    def seen(self, row: torch.Tensor) -> torch.Tensor:
        """Which tokens occur among the committed ones: bool, shaped like ``row``. Do not change it."""
        if self._seen is None:
            self._seen = torch.zeros(len(row), dtype=torch.bool, device=row.device)
            self._seen[_indices(self.token_ids, row)] = True
        return self._seen

    def counts(self, row: torch.Tensor) -> torch.Tensor:
        """How often each token occurs in the committed output, in ``row``'s dtype. Do not change it."""
        if self._counts is None:
            output = _indices(self.token_ids[self.prompt_length :], row)
            self._counts = _counted(torch.zeros_like(row), output)
        return self._counts


@dataclass(frozen=True, slots=True)
class TargetRow:
    """A processed row. ``logits`` [vocab]: removed tokens are -inf. ``unfiltered``: the same before the filters,
    kept only for margins (the same tensor where no filter acts)."""

    logits: torch.Tensor
    unfiltered: torch.Tensor


def gather_rows(logits: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """A copy of ``rows`` of ``logits`` [rows, vocab], in fp32 or, where they are fp64, in fp64."""
    picked = logits.index_select(0, torch.tensor(rows, dtype=torch.int64, device=logits.device))
    return picked if picked.dtype == torch.float64 else picked.float()


def target_row(row: torch.Tensor, context: RowContext, path: Sequence[int] = ()) -> TargetRow:
    """Processes ``row`` [vocab] in place (fp32 or fp64). ``path``: drafted tokens from the root to the row's node.

    Raises RequestFailedError if no token is left, ValueError for a token id outside the vocabulary.
    """
    sampling = context.sampling
    if _edit(row, context, path) and not math.isfinite(float(row.max())):
        raise RequestFailedError("Bias, penalties and bans left no token to choose.")
    if is_greedy(sampling):
        return TargetRow(row, row)
    if sampling.temperature != 1.0:
        row.div_(sampling.temperature)
    filters = active_filters(sampling)
    unfiltered = row.clone() if filters and sampling.return_margins else row
    for cut in filters:
        cut.apply(row)
    return TargetRow(row, unfiltered)


def _edit(row: torch.Tensor, context: RowContext, path: Sequence[int]) -> bool:
    """Bias, penalties and bans; returns whether any applied."""
    sampling = context.sampling
    if sampling.logit_bias:
        ids, values = zip(*sampling.logit_bias, strict=True)
        row.index_add_(0, _indices(ids, row), torch.tensor(values, dtype=row.dtype, device=row.device))
    has_penalties = _penalise(row, context, path)
    banned = _banned(context, path)
    if banned:
        row[_indices(banned, row)] = -torch.inf
    return bool(sampling.logit_bias or has_penalties or banned)


def _penalise(row: torch.Tensor, context: RowContext, path: Sequence[int]) -> bool:
    sampling = context.sampling
    repeats = sampling.repetition_penalty != 1.0
    counts_matter = sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0
    if repeats:
        seen = context.seen(row)
        if path:
            seen = seen.clone()
            seen[_indices(path, row)] = True
        penalty = sampling.repetition_penalty
        row.copy_(torch.where(seen, torch.where(row > 0, row / penalty, row * penalty), row))
    if counts_matter:
        counts = context.counts(row)
        if path:
            counts = _counted(counts.clone(), _indices(path, row))
        row.sub_(counts * sampling.frequency_penalty).sub_((counts > 0).to(row.dtype) * sampling.presence_penalty)
    return repeats or counts_matter


def _banned(context: RowContext, path: Sequence[int]) -> list[int]:
    """Ids that min_tokens and bad_words forbid at this row; a bad word's prefix is matched in the output alone."""
    sampling = context.sampling
    banned: list[int] = []
    if len(context.token_ids) - context.prompt_length + len(path) < sampling.min_tokens:
        banned += [*context.eos_token_ids, *sampling.stop_token_ids]
    if sampling.bad_words:
        reach = max(len(word) for word in sampling.bad_words) - 1
        start = max(context.prompt_length, len(context.token_ids) - reach)
        recent = (*context.token_ids[start:], *path)
        banned += [word[-1] for word in sampling.bad_words if _ends_with(recent, word[:-1])]
    return banned


def _ends_with(tokens: tuple[int, ...], suffix: tuple[int, ...]) -> bool:
    return len(suffix) <= len(tokens) and tokens[len(tokens) - len(suffix) :] == suffix


def _counted(counts: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return counts.index_add_(0, ids, torch.ones(len(ids), dtype=counts.dtype, device=counts.device))


def _indices(ids: Sequence[int], row: torch.Tensor) -> torch.Tensor:
    """``ids`` as an index into ``row``; refuses what torch would wrap around or crash on."""
    if ids and not 0 <= min(ids) <= max(ids) < len(row):
        raise ValueError(f"A token id is outside the vocabulary of {len(row)}.")
    return torch.tensor(list(ids), dtype=torch.int64, device=row.device)
