"""The ``medusa`` drafter: heads on the accepted node's state (``heads.medusa``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from engine.spec_decode.candidates import HeadCompute
from engine.spec_decode.drafter import DraftContext
from engine.spec_decode.independent_drafter import IndependentDrafter
from heads.medusa import MedusaHeads

if TYPE_CHECKING:
    from engine.model_runner import ModelRunner


class MedusaDrafter(IndependentDrafter[MedusaHeads]):
    """See the module's docstring."""

    method = MedusaHeads.method

    def _pack(self, compute: HeadCompute, runner: ModelRunner) -> None:
        self._heads.cut(self._lm_head.token_ids)
        compute.pack(self._heads)
        if self._heads.lm_heads is None:
            compute.pack(self._lm_head)
        else:
            self._lm_head.to("meta")  # heads with matrices of their own never read it

    def _logits(self, contexts: Sequence[DraftContext]) -> torch.Tensor:
        states = torch.stack([context.accepted.final for context in contexts if context.accepted is not None])
        return self._heads.all_logits(self._lm_head, states.float())
