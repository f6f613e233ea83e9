"""The model's own output head, cut down to a draft vocabulary: shared by all heads and never trained."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class OutputHead:
    """What turns a final state into logits in the served model.

    weight: [vocab, hidden]. bias: [vocab] or None. scale: logits are multiplied by it (Cohere, Granite).
    softcap: logits become ``softcap * tanh(logits / softcap)`` (Gemma 2).
    """

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None


class DraftLmHead(nn.Module):
    """Logits of the draft vocabulary, [..., hidden] -> [..., draft vocabulary]; frozen.

    token_ids: [draft vocabulary], the model's id of each logit, ascending. vocab_size: of the model.
    """

    def __init__(self, head: OutputHead, token_ids: torch.Tensor | None) -> None:
        """token_ids None: the whole vocabulary. The weights are copied in float32."""
        super().__init__()
        self.vocab_size, hidden = head.weight.shape
        self.token_ids = torch.arange(self.vocab_size) if token_ids is None else token_ids
        weight = head.weight.detach()[self.token_ids.to(head.weight.device)].float()
        self.linear = nn.Linear(hidden, len(self.token_ids), bias=head.bias is not None, device=weight.device)
        self.linear.weight.data = weight
        if head.bias is not None:
            self.linear.bias.data = head.bias.detach()[self.token_ids.to(head.bias.device)].float()
        self.requires_grad_(False)
        self.scale = head.scale
        self.softcap = head.softcap

    @classmethod
    def of_module(cls, weight: torch.Tensor, token_ids: torch.Tensor | None, vocab_size: int) -> DraftLmHead:
        """A module's own. weight: [draft vocabulary, hidden]; vocab_size: of the model."""
        made = cls(OutputHead(weight), None)
        made.token_ids = made.token_ids if token_ids is None else token_ids
        made.vocab_size = vocab_size
        return made

    @property
    def is_reduced(self) -> bool:
        """Whether some of the model's tokens cannot be drafted."""
        return len(self.token_ids) < self.vocab_size

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.finish(self.linear(states))

    def finish(self, logits: torch.Tensor) -> torch.Tensor:
        """What comes after the product."""
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits
