"""The loss of heads: cross-entropy against the model's own distribution at the position they predict."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch

from heads.batch import Batch
from heads.lm_head import DraftLmHead


class DraftHeads(Protocol):
    """What is trained and evaluated: depth k, from 1, predicts the token k after the one its row's state chose."""

    @property
    def num_heads(self) -> int:
        """How many depths there are."""
        ...

    def outputs(self, batch: Batch) -> Iterable[torch.Tensor]:
        """Of each depth all that its logits depend on, [len(batch.rows(depth)), width]; tokens between are those of
        the answers."""
        ...

    def logits(self, lm_head: DraftLmHead, outputs: torch.Tensor, depth: int) -> torch.Tensor:
        """[rows, draft vocabulary] from a depth's outputs."""
        ...


def learn(
    heads: DraftHeads,
    lm_head: DraftLmHead,
    batch: Batch,
    weights: Sequence[float],
    teacher: torch.Tensor | None = None,
) -> list[float]:
    """Adds the gradient of the weighted losses to the parameters; returns the loss (nats) of each weighted depth.

    teacher: as ``teacher_of`` gives it, None for that of ``batch``. States that want a gradient get theirs too.

    The vocabulary's logits are worked off depth by depth, so that those of one are in memory at a time.
    """
    outputs, gradients, losses = [], [], []
    teacher = teacher_of(lm_head, batch) if teacher is None else teacher
    for depth, (weight, output) in enumerate(zip(weights, heads.outputs(batch), strict=False), start=1):
        leaf = output.detach().requires_grad_()
        loss = depth_loss(heads, lm_head, batch, teacher, depth, leaf)
        losses.append(float(loss.detach()))
        if loss.requires_grad:
            (weight * loss).backward()  # type: ignore[no-untyped-call]
            outputs.append(output)
            gradients.append(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad)
    if outputs:
        torch.autograd.backward(outputs, gradients)
    return losses


@torch.no_grad()
def teacher_of(lm_head: DraftLmHead, batch: Batch) -> torch.Tensor:
    """[rows, draft vocabulary]: the distribution that each row's token was chosen from."""
    return torch.softmax(lm_head(batch.states), dim=-1)


def depth_loss(
    heads: DraftHeads,
    lm_head: DraftLmHead,
    batch: Batch,
    teacher: torch.Tensor,
    depth: int,
    output: torch.Tensor,
) -> torch.Tensor:
    """Mean cross-entropy (nats) of one depth, which at row i learns the distribution of row i + depth.

    Rows whose token lies outside the draft vocabulary teach nothing, since they cannot be drafted.
    """
    rows = batch.rows(depth)
    taught = batch.targets[rows + depth] >= 0
    if not bool(taught.any()):
        return output.sum() * 0.0
    student = torch.log_softmax(heads.logits(lm_head, output[taught], depth), dim=-1)
    return -(teacher[rows[taught] + depth] * student).sum(dim=-1).mean()
