"""The ``streaming`` drafter: streams spawned on the accepted node (``heads.streaming``), and how torch computes them.

What the streams store of themselves lives for one pass; it is never part of a request's KV.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, Unpack

import torch

from engine.attention.cache import PagedKV
from engine.spec_decode.candidates import HeadCompute
from engine.spec_decode.draft_block import Committed, slots_of
from engine.spec_decode.drafter import DraftContext
from engine.spec_decode.drafter_base import HeadOptions, committed
from engine.spec_decode.independent_drafter import IndependentDrafter
from heads.lm_head import DraftLmHead
from heads.streaming import Rows, StreamingHeads

if TYPE_CHECKING:
    from engine.model_runner import ModelRunner


class StreamPass(Protocol):
    """Streams ready to draft over a runner's KV cache."""

    def __call__(self, requests: Sequence[Committed], states: torch.Tensor) -> torch.Tensor:
        """Logits [streams, requests, draft vocabulary], float32 on the CPU. states: [requests, hidden], of each
        request's last row that is in the cache, as the layer below the streams' lowest put them out."""
        ...


class TorchStreamPass:
    """Over torch's KV cache; the upper layers' entries of each request are gathered once a pass, so that a pass reads
    and writes as much as the request's context holds there."""

    def __init__(self, heads: StreamingHeads, lm_head: DraftLmHead, cache: PagedKV, block_size: int) -> None:
        self._heads = heads
        self._lm_head = lm_head
        self._cache = cache
        self._block_size = block_size

    @torch.inference_mode()
    def __call__(self, requests: Sequence[Committed], states: torch.Tensor) -> torch.Tensor:
        device = self._heads.embeddings.device
        positions = torch.tensor([request.length - 1 for request in requests], device=device)
        texts = [self._gathered(request) for request in requests]
        rows = Rows(positions, texts, [slice(row, row + 1) for row in range(len(requests))])
        found = self._heads(states.to(device, torch.float32), rows)
        logits: torch.Tensor = self._lm_head(found.transpose(0, 1)).float().cpu()
        return logits

    def _gathered(self, request: Committed) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, [entries, layers, kv_heads, head_dim]."""
        count = self._heads.sizes.layers
        slots = slots_of(request, self._block_size).to(self._cache.keys[-1].device)
        keys, values = (
            torch.stack([layer[:, slots].transpose(0, 1) for layer in layers[-count:]], dim=1).float()
            for layers in (self._cache.keys, self._cache.values)
        )
        return keys, values


class StreamingDrafter(IndependentDrafter[StreamingHeads]):
    """See the module's docstring."""

    method = StreamingHeads.method
    _pass: StreamPass

    def __init__(self, heads: StreamingHeads, lm_head: DraftLmHead, **options: Unpack[HeadOptions]) -> None:
        """heads: attached to their base model."""
        super().__init__(heads, lm_head, **options)
        self.hidden_layers = (heads.entry,)

    def _pack(self, compute: HeadCompute, runner: ModelRunner) -> None:
        self._pass = runner.make_streams(self._heads, self._lm_head)

    def _logits(self, contexts: Sequence[DraftContext]) -> torch.Tensor:
        entry = self._heads.entry
        states = [context.accepted.layers[entry] for context in contexts if context.accepted is not None]
        requests = [committed(context) for context in contexts]
        return self._pass(requests, torch.stack(states))
