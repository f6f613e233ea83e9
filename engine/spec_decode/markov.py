"""The ``markov`` drafter: Medusa heads whose choice depends on the token drafted before (``heads.markov``).

It has no KV, so it drafts for every model. The heads are computed at a pass's first depth, for all its depths at once;
after that a depth costs the bias of its rows' own tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from engine.spec_decode.candidates import HeadCompute
from engine.spec_decode.draft_block import Committed, DepthRows
from engine.spec_decode.path_drafter import PathDrafter
from heads.lm_head import DraftLmHead
from heads.markov import MarkovHeads

if TYPE_CHECKING:
    from engine.model_runner import ModelRunner


class MarkovBlock:
    """``DraftBlock`` of Markov heads, which needs nothing of the committed text but the state it ends in."""

    def __init__(self, heads: MarkovHeads, lm_head: DraftLmHead) -> None:
        self.heads = heads
        self.lm_head = lm_head

    def begin(self, requests: Sequence[Committed]) -> _MarkovPass:
        return _MarkovPass(self)


class _MarkovPass:
    def __init__(self, block: MarkovBlock) -> None:
        self._block = block
        self._independent = torch.empty(0)  # [heads, requests drafted for, draft vocabulary], without the bias
        self._row_of: dict[int, int] = {}  # of a request, in it

    @torch.inference_mode()
    def run(self, rows: DepthRows) -> tuple[torch.Tensor, torch.Tensor]:
        """States are handed on as they are: every depth reads the base model's own."""
        heads = self._block.heads
        device = heads.embedding.weight.device
        if rows.depth == 1:
            states = rows.states.to(device, torch.float32)
            self._independent = heads.medusa.all_logits(self._block.lm_head, states)
            self._row_of = {owner: row for row, owner in enumerate(rows.owners)}
        own = torch.tensor([self._row_of[owner] for owner in rows.owners], device=device)
        bias = heads.bias(torch.tensor(rows.tokens, device=device), rows.depth)
        return rows.states, (self._independent[rows.depth - 1, own] + bias).float().cpu()


class MarkovDrafter(PathDrafter[MarkovHeads]):
    """See the module's docstring."""

    method = MarkovHeads.method

    def _make_block(self, compute: HeadCompute, runner: ModelRunner) -> MarkovBlock:
        compute.pack(self._heads)
        compute.pack(self._lm_head)
        return MarkovBlock(self._heads, self._lm_head)
