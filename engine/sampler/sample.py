"""Picks tokens from target rows: greedy, or the Gumbel-max sample of the row under the noise of its key.

argmax(log p + g) equals argmax(z + g), because log p is z less one number a row (Maddison, Tarlow and Minka,
"A* sampling", NeurIPS 2014). A tie goes to the lowest token id.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from engine.sampler.noise import GUMBEL_MAX, GUMBEL_MIN, NoiseKey, chunk_rows, gumbel_at, gumbel_rows
from engine.sampler.processing import is_greedy
from engine.sampling_params import SamplingParams

# Picks the token of each row by Gumbel-max under the noise of its key; ``gumbel_argmax`` does, and the compiled step.
Draw = Callable[[torch.Tensor, Sequence[NoiseKey]], list[int]]

# A token this far under the row's best cannot win: the largest noise would not lift it over the best token's least.
# The slack covers its own rounding to fp32.
_REACH = GUMBEL_MAX - GUMBEL_MIN + 1e-5
# Single tokens cost about four times as much each as whole rows do, so only a small share is drawn one by one.
_SPARSE_SHARE = 1 / 8


def sample(
    logits: torch.Tensor, samplings: Sequence[SamplingParams], keys: Sequence[NoiseKey], draw: Draw | None = None
) -> list[int]:
    """The token of each row. logits: processed target rows [R, vocab], each with at least one finite entry.
    draw: None is ``gumbel_argmax``."""
    draw = draw or gumbel_argmax
    noisy = [row for row, sampling in enumerate(samplings) if not is_greedy(sampling)]
    if len(noisy) == len(samplings):
        return draw(logits, keys)
    tokens = first_argmax(logits)
    if noisy:
        drawn = draw(logits[noisy], [keys[row] for row in noisy])
        for row, token in zip(noisy, drawn, strict=True):
            tokens[row] = token
    return tokens


def first_argmax(rows: torch.Tensor) -> list[int]:
    """Index of each row's maximum, the lowest one in a tie. rows: [R, vocab] without NaN."""
    # numpy's argmax is vectorised on the CPU, torch's is not; both return the first maximum.
    indices = torch.from_numpy(rows.numpy().argmax(axis=1)) if rows.device.type == "cpu" else rows.argmax(dim=1)
    return [int(index) for index in indices.tolist()]


def perturbed(logits: torch.Tensor, keys: Sequence[NoiseKey]) -> torch.Tensor:
    """z + g in float64. logits: [R, vocab]."""
    return gumbel_rows(keys, logits.shape[1], logits.device).add_(logits)


def dense_argmax(logits: torch.Tensor, keys: Sequence[NoiseKey]) -> list[int]:
    """argmax(z + g) of each row with the noise of every token, a chunk of rows at a time."""
    step = chunk_rows(logits.shape[1], logits.device)
    tokens: list[int] = []
    for start in range(0, len(keys), step):
        tokens += first_argmax(perturbed(logits[start : start + step], keys[start : start + step]))
    return tokens


def gumbel_argmax(logits: torch.Tensor, keys: Sequence[NoiseKey]) -> list[int]:
    """Exactly what ``dense_argmax`` returns, without drawing noise for tokens that cannot win where these are many."""
    if logits.device.type != "cpu":
        return dense_argmax(logits, keys)
    # If the subtraction rounds up, it rounds to the lowest number that was not under the exact floor anyway.
    possible = (logits >= logits.amax(dim=1, keepdim=True) - _REACH).numpy()
    is_sparse = np.count_nonzero(possible, axis=1) <= logits.shape[1] * _SPARSE_SHARE
    if not is_sparse.any():
        return dense_argmax(logits, keys)
    dense, sparse = np.flatnonzero(~is_sparse), np.flatnonzero(is_sparse)
    tokens = np.empty(len(keys), dtype=np.int64)
    if len(dense):
        tokens[dense] = dense_argmax(logits[torch.from_numpy(dense)], [keys[row] for row in dense.tolist()])
    if len(sparse):
        tokens[sparse] = _sparse_argmax(logits, keys, sparse, possible)
    return [int(token) for token in tokens]


def _sparse_argmax(
    logits: torch.Tensor, keys: Sequence[NoiseKey], chosen: npt.NDArray[np.int64], possible: npt.NDArray[np.bool_]
) -> list[int]:
    """argmax(z + g) of the ``chosen`` rows over their ``possible`` tokens; one noise call for all of them."""
    order, candidates = np.nonzero(possible[chosen])  # by row, then by token: the first maximum is the lowest id
    rows = chosen[order]
    scores = logits.numpy()[rows, candidates] + gumbel_at(keys, rows, candidates)
    starts = np.flatnonzero(np.diff(rows, prepend=-1))
    best = np.maximum.reduceat(scores, starts)
    winners = np.flatnonzero(scores == best[order])
    first = winners[np.flatnonzero(np.diff(order[winners], prepend=-1))]
    return [int(token) for token in candidates[first]]
