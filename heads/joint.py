"""Joint training: adapters of the base model learn with the heads (Medusa-2, arXiv 2401.10774, section 2.2.2).

The model is run anew over each answer, so that the heads' losses reach it through the states they read. What they learn
stays the original model's distribution, and a second term, KL(original || changed) over the whole vocabulary, keeps the
changed model close to it. The original is known by its stored states, so it is not run again.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from heads.batch import make_batch
from heads.data import Answer, Context
from heads.lm_head import DraftLmHead
from heads.loss import DraftHeads, learn, teacher_of
from heads.settings import LoraSettings

_ROWS = 64  # whose logits over the whole vocabulary are in memory at a time


@dataclass(frozen=True, slots=True)
class Reading:
    """What the base model computes over answers, as it is now. states: [rows, hidden] float32, row for row as in a
    ``Batch``. contexts: of each answer, where the answers have them; without a gradient."""

    states: torch.Tensor
    contexts: tuple[Context, ...]


class TrainableBase(Protocol):
    """A base model of which adapters are trained; parameters and state are those of the adapters alone."""

    def read(self, answers: Sequence[Answer]) -> Reading: ...

    def parameters(self) -> Iterator[nn.Parameter]: ...

    def state_dict(self) -> dict[str, torch.Tensor]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True, slots=True)
class Joint:
    """The base model that learns with the heads. lm_head: of the whole vocabulary, frozen."""

    base: TrainableBase
    lm_head: DraftLmHead
    settings: LoraSettings


@dataclass(frozen=True, slots=True)
class Closeness:
    """How far a changed model is from the original, over ``tokens`` positions of answers that the original wrote.

    kl: mean KL(original || changed), nats. agreement: share of positions with the same likeliest token.
    perplexity_before, perplexity_after: of the answers, by the original and by the changed model.
    """

    tokens: int
    kl: float
    agreement: float
    perplexity_before: float
    perplexity_after: float


def learn_jointly(
    joint: Joint, heads: DraftHeads, lm_head: DraftLmHead, answers: Sequence[Answer], weights: Sequence[float]
) -> tuple[list[float], float]:
    """Adds the gradients of one step to heads and adapters; returns the loss of each weighted depth and the KL, nats.

    The base model's graph is walked once, with the gradients of all terms summed at its states.
    """
    original = make_batch(answers, lm_head)
    reading = joint.base.read(answers)
    states = reading.states.detach().requires_grad_()
    batch = dataclasses.replace(original, states=states, contexts=reading.contexts)
    losses = learn(heads, lm_head, batch, weights, teacher_of(lm_head, original))
    kl = _stay_close(joint, original.states, states)
    reading.states.backward(states.grad)  # type: ignore[no-untyped-call]
    return losses, kl


def _stay_close(joint: Joint, original: torch.Tensor, states: torch.Tensor) -> float:
    """Adds the gradient of the weighted mean KL to ``states``; returns the mean."""
    total = 0.0
    for first in range(0, len(states), _ROWS):
        rows = slice(first, first + _ROWS)
        kl = divergence(joint.lm_head, original[rows], states[rows]).sum() / len(states)
        (joint.settings.base_weight * kl).backward()  # type: ignore[no-untyped-call]
        total += float(kl.detach())
    return total


def divergence(lm_head: DraftLmHead, original: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """[rows]: KL(original || states), nats, of the distributions that two kinds of states give; differentiable by
    ``states`` alone."""
    with torch.no_grad():
        before = torch.log_softmax(lm_head(original), dim=-1)
    return F.kl_div(torch.log_softmax(lm_head(states), dim=-1), before, reduction="none", log_target=True).sum(dim=-1)


@torch.no_grad()
def closeness(lm_head: DraftLmHead, readings: Iterable[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> Closeness:
    """lm_head: of the whole vocabulary. readings: states of the original and of the changed model over the same text,
    [rows, hidden] each, and the tokens [rows] that the original wrote from them."""
    count, kl, agreed = 0, 0.0, 0
    surprise = [0.0, 0.0]
    for original, changed, tokens in readings:
        count += len(tokens)
        for first in range(0, len(tokens), _ROWS):
            rows = slice(first, first + _ROWS)
            logits = [lm_head(states[rows]) for states in (original, changed)]
            kl += float(divergence(lm_head, original[rows], changed[rows]).sum())
            agreed += int((logits[0].argmax(dim=-1) == logits[1].argmax(dim=-1)).sum())
            for index, part in enumerate(logits):
                surprise[index] += float(F.cross_entropy(part, tokens[rows], reduction="sum"))
    before, after = (math.exp(min(total / count, 700.0)) for total in surprise)
    return Closeness(count, kl / count, agreed / count, before, after)
