"""Attention of recursive draft modules: transformers' own modules, which ask a callback for what they mix.

So latent attention, gates, norms of queries and keys, and partial rotation are the architecture's own. The callback
travels as a keyword argument through the module's ``forward``, as a step's does (``engine.attention.paged``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel

from engine.errors import ModelLoadError
from heads.recursive import Attend

ATTENTION_NAME = "headlong_draft"
_UNKNOWN_TO_CALLBACKS = ("sliding_window", "softcap", "s_aux")


def _ask(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    _mask: torch.Tensor | None,
    *,
    headlong_attend: Attend,
    **passed: Any,
) -> tuple[torch.Tensor, None]:
    """query [1, heads, rows, key_dim], key and value [1, kv_heads, rows, dim] -> [1, rows, heads, value_dim].
    The callback gets and gives float32."""
    unknown = [name for name in _UNKNOWN_TO_CALLBACKS if passed.get(name) is not None]
    if unknown:
        raise ModelLoadError(f"the draft module's attention uses {', '.join(unknown)}, which cannot be served")
    queries, keys, values = (part[0].transpose(0, 1).float() for part in (query, key, value))
    return headlong_attend(queries, keys, values).to(query.dtype)[None], None


AttentionInterface.register(ATTENTION_NAME, _ask)


def draft_dtype(model: PreTrainedModel) -> torch.dtype:
    """What a module for ``model`` computes in: drafts need no more than float32."""
    return torch.float32 if model.dtype == torch.float64 else model.dtype


class InputEmbedding:
    """Of a module's input tokens: the model's, shared, or the module's own. It is no part of the module, so that what
    packs or copies a module leaves it as it is."""

    def __init__(self, model: PreTrainedModel, own: torch.Tensor | None) -> None:
        """own: [vocab, hidden]."""
        self._model = model
        self._own = None if own is None else own.to(model.device, draft_dtype(model))

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """[rows, hidden]."""
        shared: Any = self._model.get_input_embeddings()  # asked anew: whoever packs the model may give it another
        return nn.functional.embedding(tokens, shared.weight if self._own is None else self._own)

    def __deepcopy__(self, memo: dict[int, Any]) -> InputEmbedding:
        return self


@dataclass(frozen=True, slots=True)
class DraftAttention:
    """An attention module made with a configuration that names ``ATTENTION_NAME``, and its rotary embedding."""

    module: nn.Module
    rotary: nn.Module

    def inputs(self, x: torch.Tensor, positions: torch.Tensor, attend: Attend) -> dict[str, Any]:
        """Keyword arguments of the attention module, or of the decoder layer around it, beside the hidden states.
        x: [rows, width], for its dtype and device; positions: [rows]."""
        rotation = self.rotary(x[None], positions[None])
        return {"position_embeddings": rotation, "attention_mask": None, "headlong_attend": attend}

    def mix(self, x: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """The module's output, [rows, hidden]. x: [rows, width], normed."""
        mixed: torch.Tensor = self.module(hidden_states=x[None], **self.inputs(x, positions, attend))[0][0]
        return mixed

    def entries(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values as ``mix`` gives them to the callback."""
        given: list[torch.Tensor] = []

        def record(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            given.extend((keys, values))
            return queries.new_zeros(*queries.shape[:2], values.shape[-1])

        self.mix(x, positions, record)
        keys, values = given
        return keys, values

    @torch.no_grad()
    def shape(self, width: int) -> tuple[int, int, int, float]:
        """(kv_heads, key_dim, value_dim, scale). width: of the module's input. Raises ModelLoadError for attention that
        callbacks know nothing of."""
        parameter = next(self.module.parameters())
        x = torch.zeros(1, width, dtype=parameter.dtype, device=parameter.device)
        keys, values = self.entries(x, torch.ones(1, dtype=torch.long, device=parameter.device))
        module: Any = self.module
        return keys.shape[1], keys.shape[2], values.shape[2], float(module.scaling)
