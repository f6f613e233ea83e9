"""Checks, before anything is served, that paged attention computes what the architecture's own attention computes.

A recording pass learns what each layer stores and what it passes to attention; what we do not honour is refused by
name. Then the model's eager attention and ours are compared on the same tokens, ours in chunks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel

from engine.attention.cache import LayerShape
from engine.errors import ModelLoadError

_RECORDER = "headlong_recorder"
_HONOURED = {"scaling", "sliding_window", "softcap", "s_aux", "dropout", "is_causal", "position_ids"}
# Passed by transformers to every layer and without effect on one forward pass without its own cache.
_WITHOUT_EFFECT = {
    "cache_position",
    "output_attentions",
    "output_hidden_states",
    "use_cache",
    "return_dict",
    "past_key_values",
    "position_embeddings",
    "deterministic",
    "logits_to_keep",
    "headlong_step",
}
_LAYER_TYPES = {"full_attention", "sliding_attention"}
CHECK_TOKENS = 24


@dataclass(slots=True)
class _Recording:
    shapes: dict[int, LayerShape] = field(default_factory=dict)
    windows: dict[int, int | None] = field(default_factory=dict)
    unknown: set[str] = field(default_factory=set)
    bidirectional: bool = False

    def attend(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _mask: Any, **passed: Any
    ) -> tuple[torch.Tensor, None]:
        layer = int(module.layer_idx)
        self.shapes[layer] = LayerShape(key.shape[1], key.shape[-1], value.shape[-1])
        self.windows[layer] = passed.get("sliding_window")
        self.bidirectional |= getattr(module, "is_causal", True) is False or passed.get("is_causal") is False
        self.unknown |= {
            name
            for name, given in passed.items()
            if given is not None and given is not False and name not in _HONOURED | _WITHOUT_EFFECT
        }
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1]), None


@contextlib.contextmanager
def _attending(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Within, the model attends by another implementation; a question about a model changes nothing of it."""
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


@torch.inference_mode()
def layer_shapes(model: PreTrainedModel) -> list[LayerShape]:
    """What each layer stores for a token, learned from one forward pass.

    Raises ModelLoadError if a layer does not attend through transformers' interface or passes something that paged
    attention does not honour.
    """
    recording = _Recording()
    AttentionInterface.register(_RECORDER, recording.attend)
    any_model: Any = model
    with _attending(model, _RECORDER):
        any_model(input_ids=_tokens(model, 4)[None], use_cache=False)
    config = model.config.get_text_config()
    name = type(model).__name__
    missing = [layer for layer in range(config.num_hidden_layers) if layer not in recording.shapes]
    if missing:
        raise ModelLoadError(
            f"{name} cannot be served: layers {missing} do not attend through transformers' attention interface"
        )
    if recording.unknown:
        raise ModelLoadError(f"{name} cannot be served: its attention uses {', '.join(sorted(recording.unknown))}")
    if recording.bidirectional:
        raise ModelLoadError(f"{name} cannot be served: its attention is not causal")
    for layer, kind in enumerate(getattr(config, "layer_types", None) or ()):
        if kind not in _LAYER_TYPES:
            raise ModelLoadError(f"{name} cannot be served: layer {layer} is of type {kind}")
        if kind == "sliding_attention" and recording.windows[layer] is None:
            raise ModelLoadError(f"{name} cannot be served: layer {layer} hides its sliding window in a mask")
    return [recording.shapes[layer] for layer in range(config.num_hidden_layers)]


@torch.inference_mode()
def eager_logits(model: PreTrainedModel) -> torch.Tensor:
    """[CHECK_TOKENS, vocab]: the architecture's eager attention on ``check_tokens``."""
    any_model: Any = model
    with _attending(model, "eager"):
        logits: torch.Tensor = any_model(input_ids=_tokens(model, CHECK_TOKENS)[None], use_cache=False).logits[0]
    return logits


def check_tokens(vocab: int) -> list[int]:
    """The token ids that ``eager_logits`` computes."""
    return [index * 7919 % max(2, vocab) for index in range(1, CHECK_TOKENS + 1)]


def require_equal(architecture: str, expected: torch.Tensor, found: torch.Tensor, bound: float) -> None:
    """Raises ModelLoadError if logits differ by more than ``bound``, as a share of the largest one."""
    difference = float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-6))
    if not difference <= bound:
        raise ModelLoadError(
            f"{architecture} cannot be served: paged attention differs from the model's own by "
            f"{difference:.1e} of the largest logit (bound {bound:.0e})"
        )


def vocab_size(model: PreTrainedModel) -> int:
    """Rows of the input embedding: every token id below it can be fed to the model."""
    embedding: Any = model.get_input_embeddings()
    return int(embedding.weight.shape[0])


def _tokens(model: PreTrainedModel, count: int) -> torch.Tensor:
    return torch.tensor(check_tokens(vocab_size(model))[:count], device=next(model.parameters()).device)
