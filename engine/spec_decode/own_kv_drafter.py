"""The drafter of modules that keep a KV layer of their own (``heads.recursive``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Unpack

import torch

from engine.spec_decode.candidates import HeadCompute
from engine.spec_decode.draft_block import DraftBlock
from engine.spec_decode.drafter import CommittedRows, DraftContext, HiddenStates
from engine.spec_decode.drafter_base import HeadOptions, committed
from engine.spec_decode.own_kv import OwnKvBlock, block_bytes
from engine.spec_decode.path_drafter import PathDrafter
from heads.lm_head import DraftLmHead
from heads.recursive import OwnKvModule

if TYPE_CHECKING:
    from engine.model_runner import ModelRunner


class OwnKvDrafter(PathDrafter[OwnKvModule]):
    """Also a ``KvOwner``: every request's verified tokens get entries, since the prefix cache may hand its blocks to
    one that drafts."""

    def __init__(
        self, module: OwnKvModule, lm_head: DraftLmHead, *, method: str, **options: Unpack[HeadOptions]
    ) -> None:
        super().__init__(module, lm_head, **options)
        self.method = method
        self.hidden_layers = module.hidden_layers
        self._own: OwnKvBlock | None = None

    def _make_block(self, compute: HeadCompute, runner: ModelRunner) -> DraftBlock:
        self._own = runner.make_own_block(self._heads, self._lm_head, compute)
        return self._own

    def block_bytes(self, block_size: int, dtype: torch.dtype) -> int:
        return block_bytes(self._heads, block_size, dtype)

    def store(self, hidden: HiddenStates, committed: Sequence[CommittedRows]) -> None:
        assert self._own is not None, "prepare comes first"
        self._own.store(hidden, committed)

    def _root_state(self, context: DraftContext) -> torch.Tensor:
        assert self._own is not None, "prepare comes first"
        return self._own.last_state(committed(context))
