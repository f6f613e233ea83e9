"""What draft heads are computed with: their products, and the likeliest tokens of their logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from engine.linear import pack_linears
from engine.sampler.noise import NoiseKey, gumbel_at

FloatArray = npt.NDArray[np.floating[Any]]
IntArray = npt.NDArray[np.int64]

# Tokens of a head that get noise: beyond them log q is so low that winning takes luck no estimate could foresee.
NOISED = 512


@dataclass(frozen=True, slots=True)
class Candidates:
    """What a head offers for one depth: tokens, best first, and the head's own confidence in each."""

    tokens: list[int]
    confidences: list[float]


@dataclass(frozen=True, slots=True)
class Wish:
    """What is wanted of one row of logits: at most ``count`` candidates, with the noise of ``key`` added, if any."""

    count: int
    key: NoiseKey | None = None


class HeadCompute(Protocol):
    """How heads are computed. Drafts never enter the text, so it may be approximate."""

    def pack(self, module: nn.Module) -> None:
        """Prepares the linear layers of a module that is not trained any more; it is changed in place."""
        ...

    def candidates(self, logits: torch.Tensor, ids: IntArray, wishes: Sequence[Wish]) -> list[Candidates]:
        """The likeliest tokens of each row, best first and of equals the lowest id first; -inf is never among them.

        logits: float32 [len(wishes), n] on the CPU, temperature applied. ids: [n], the token of each logit, ascending.
        Without noise a confidence is the softmax; with it, the softmax of the ``NOISED`` largest logits plus noise.
        """
        ...


class PlainHeadCompute:
    """torch and numpy."""

    def pack(self, module: nn.Module) -> None:
        pack_linears(module)

    def candidates(self, logits: torch.Tensor, ids: IntArray, wishes: Sequence[Wish]) -> list[Candidates]:
        return [_candidates(row, ids, wish) for row, wish in zip(logits.numpy(), wishes, strict=True)]


def _candidates(row: FloatArray, ids: IntArray, wish: Wish) -> Candidates:
    if wish.key is None:
        return _best(_log_softmax(row) if len(row) else row, ids, wish.count)
    count = min(NOISED, len(row))
    near = np.argpartition(-row, count - 1)[:count] if count else np.arange(0)
    near = near[row[near] > -np.inf]
    if len(near) == 0:
        return Candidates([], [])
    noise = gumbel_at([wish.key], np.zeros(len(near), dtype=np.int64), ids[near])
    return _best(_log_softmax(row[near] + noise), ids[near], wish.count)


def _best(scores: FloatArray, ids: IntArray, count: int) -> Candidates:
    """The ``count`` likeliest tokens. scores: [n] log-probabilities of the tokens ``ids``; a tie goes to the lower."""
    count = min(count, len(scores))
    if count == 0:
        return Candidates([], [])
    top = np.argpartition(-scores, count - 1)[:count]
    top = top[np.lexsort((ids[top], -scores[top]))]
    top = top[scores[top] > -np.inf]
    return Candidates(ids[top].tolist(), np.exp(scores[top]).tolist())


def _log_softmax(scores: FloatArray) -> FloatArray:
    highest = scores.max()
    if not np.isfinite(highest):
        return np.full_like(scores, -np.inf)
    shifted = scores - highest
    normalised: FloatArray = shifted - np.log(np.exp(shifted).sum())
    return normalised
