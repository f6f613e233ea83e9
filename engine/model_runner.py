"""How a step is computed: transformers' own modules over the paged cache.

``ModelRunner`` is the seam between "which rows" (scheduler, batch) and "how": this module, or the compiled step
(``engine.compiled``). Every implementation takes the same ``Batch`` and returns the same ``ForwardResult``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

from engine.attention.cache import PagedKV
from engine.attention.paged import ATTENTION_NAME, register
from engine.attention.segments import step_attention
from engine.batch import Batch
from engine.linear import pack_linears
from engine.loading.mtp import attach_base
from engine.spec_decode.candidates import HeadCompute
from engine.spec_decode.draft_block import DraftBlock, TorchDraftBlock
from engine.spec_decode.drafter import HiddenStates
from engine.spec_decode.own_kv import OwnKvBlock, PoolShape, TorchOwnKvBlock
from engine.spec_decode.streaming import StreamPass, TorchStreamPass
from heads.lm_head import DraftLmHead
from heads.mtp import MtpModule
from heads.recursive import OwnKvModule
from heads.streaming import StreamingHeads


@dataclass(frozen=True, slots=True)
class ForwardResult:
    """logits: [kept rows, vocab], raw. hidden: states of all flat rows, None unless a drafter needs them."""

    logits: torch.Tensor
    hidden: HiddenStates | None = None


class ModelRunner(Protocol):
    """Computes batches over its KV cache."""

    def forward(self, batch: Batch) -> ForwardResult:
        """Computes every row, storing its KV, and the logits of the kept rows."""
        ...

    def move_kv(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Copies KV entries from slots ``source`` to slots ``target``, all layers."""
        ...

    def read_kv(self, layer: int, slots: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of a layer's keys [len(slots), kv_heads, key_dim] and values, as they lie in the cache."""
        ...

    def make_block(self, module: MtpModule, lm_head: DraftLmHead) -> DraftBlock:
        """An MTP module that drafts over this runner's cache; it cannot be trained or saved any more."""
        ...

    def make_own_block(self, module: OwnKvModule, lm_head: DraftLmHead, compute: HeadCompute) -> OwnKvBlock:
        """A module that drafts over a KV layer of its own, in the blocks of this runner's cache; neither module nor
        lm_head can be trained or saved any more."""
        ...

    def make_streams(self, heads: StreamingHeads, lm_head: DraftLmHead) -> StreamPass:
        """Streams, attached to their base model, that draft over this runner's cache; as ``make_block``."""
        ...


@dataclass(slots=True)
class _Captured:
    final: torch.Tensor | None = None
    layers: dict[int, torch.Tensor] = field(default_factory=dict)


class TransformersRunner:
    """Runs an unmodified transformers model with ``paged_attention`` as its attention."""

    def __init__(
        self,
        model: PreTrainedModel,
        cache: PagedKV,
        block_size: int,
        *,
        needs_hidden: bool = False,
        hidden_layers: Sequence[int] = (),
    ) -> None:
        register()
        any_model: Any = model
        self._model = any_model
        self._decoder = any_model.get_decoder()
        self._embed: Any = model.get_input_embeddings()
        self._cache = cache
        self._block_size = block_size
        self._device = next(model.parameters()).device
        self._needs_hidden = needs_hidden or bool(hidden_layers)
        self._hidden_layers = tuple(hidden_layers)
        any_model.set_attn_implementation(ATTENTION_NAME)

    @torch.inference_mode()
    def forward(self, batch: Batch) -> ForwardResult:
        inputs: dict[str, Any] = {
            "position_ids": torch.tensor([batch.positions], device=self._device),
            "use_cache": False,
            "headlong_step": step_attention(batch, self._cache, self._block_size, self._device),
            **self._token_inputs(batch),
        }
        with self._capture() as captured:
            if not batch.logits_rows:
                self._decoder(**inputs)
                logits = torch.empty(0, 0, device=self._device)
            else:
                kept = torch.tensor(batch.logits_rows, device=self._device)
                logits = self._model(**inputs, logits_to_keep=kept).logits[0]
        if captured is None:
            return ForwardResult(logits)
        assert captured.final is not None
        return ForwardResult(logits, HiddenStates(captured.final, captured.layers))

    def _token_inputs(self, batch: Batch) -> dict[str, torch.Tensor]:
        token_ids = torch.tensor(batch.token_ids, device=self._device)
        if all(span.extra is None or span.extra.embeddings is None for span in batch.spans):
            return {"input_ids": token_ids[None]}
        embedded = self._embed(token_ids)
        for span in batch.spans:
            if span.extra is not None and span.extra.embeddings is not None:
                embedded[span.extra_row : span.extra_row + span.num_extra] = span.extra.embeddings
        return {"inputs_embeds": embedded[None]}

    def _decoder_layers(self) -> Any:
        """The stack of decoder layers, whatever the architecture calls it."""
        count = self._model.config.get_text_config().num_hidden_layers
        stacks = [child for child in self._decoder.children() if isinstance(child, torch.nn.ModuleList)]
        return next(stack for stack in stacks if len(stack) == count)

    @contextmanager
    def _capture(self) -> Iterator[_Captured | None]:
        """Collects the states that drafters asked for, by hooks, so the model's code stays as it is."""
        if not self._needs_hidden:
            yield None
            return
        captured = _Captured()

        def keep_final(_module: Any, _inputs: Any, output: Any) -> None:
            captured.final = output.last_hidden_state[0]

        hooks = [self._decoder.register_forward_hook(keep_final)]
        layers = self._decoder_layers() if self._hidden_layers else []
        for index in self._hidden_layers:

            def keep_layer(_module: Any, _inputs: Any, output: Any, index: int = index) -> None:
                captured.layers[index] = (output[0] if isinstance(output, tuple) else output)[0]

            hooks.append(layers[index].register_forward_hook(keep_layer))
        try:
            yield captured
        finally:
            for hook in hooks:
                hook.remove()

    @torch.inference_mode()
    def move_kv(self, source: Sequence[int], target: Sequence[int]) -> None:
        self._cache.move(torch.tensor(source, device=self._device), torch.tensor(target, device=self._device))

    @torch.inference_mode()
    def read_kv(self, layer: int, slots: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        at = torch.tensor(slots, device=self._device)
        return self._cache.keys[layer][:, at].transpose(0, 1), self._cache.values[layer][:, at].transpose(0, 1)

    def make_block(self, module: MtpModule, lm_head: DraftLmHead) -> DraftBlock:
        attach_base(module, self._model)
        return TorchDraftBlock(module, lm_head, self._cache, self._block_size)

    def make_own_block(self, module: OwnKvModule, lm_head: DraftLmHead, compute: HeadCompute) -> OwnKvBlock:
        if isinstance(module, MtpModule):
            attach_base(module, self._model)
        keys = self._cache.keys[0]
        return TorchOwnKvBlock(
            module, lm_head, PoolShape(keys.shape[1], self._block_size, keys.dtype, keys.device), compute
        )

    def make_streams(self, heads: StreamingHeads, lm_head: DraftLmHead) -> StreamPass:
        heads.merge()
        pack_linears(heads)
        pack_linears(lm_head)
        return TorchStreamPass(heads, lm_head, self._cache, self._block_size)
