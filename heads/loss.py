"""The loss of heads: cross-entropy against the model's own distribution at the position they predict."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from heads.lm_head import DraftLmHead


def head_losses(
    heads: nn.Module, lm_head: DraftLmHead, states: torch.Tensor, targets: torch.Tensor, ends: torch.Tensor
) -> Iterator[torch.Tensor]:
    """Mean cross-entropy (nats) of head 1, 2, ... in turn, each with a graph of its own.

    states: [rows, hidden] of whole answers. targets: [rows] draft-vocabulary index of the token that the state chose,
    -1 outside it. ends: [rows] first row of the next answer. Head k at row i learns the distribution of row i + k of
    the same answer; rows whose token lies outside the draft vocabulary teach nothing, since they cannot be drafted.
    """
    with torch.no_grad():
        teacher = torch.softmax(lm_head(states), dim=-1)
    rows = torch.arange(len(states), device=states.device)
    for depth, head in enumerate(heads.heads, start=1):  # type: ignore[arg-type]
        ahead = rows + depth
        at = rows[(ahead < ends) & (targets[ahead.clamp_max(len(rows) - 1)] >= 0)]
        if len(at) == 0:
            yield next(head.parameters()).sum() * 0.0
            continue
        student = torch.log_softmax(lm_head(head(states[at])), dim=-1)
        yield -(teacher[at + depth] * student).sum(dim=-1).mean()
