"""What streams take from their base model: the sizes and weights of its uppermost layers."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from engine.compiled.weights import LLAMA_FAMILY, Dimensions, dimensions
from engine.errors import ModelLoadError
from engine.loading.mtp import rotation
from heads.config import StreamSizes
from heads.settings import TrainSettings
from heads.streaming import Base, BaseLayer, StreamingHeads, start


def new_streams(model: PreTrainedModel, settings: TrainSettings) -> StreamingHeads:
    """Streams to train, attached; call it before the linear layers are packed. Raises ModelLoadError for a model whose
    layers they cannot run through."""
    sizes = stream_sizes(model, settings.stream_layers)
    heads = StreamingHeads(model.config.get_text_config().hidden_size, settings.num_heads, sizes, settings.rank)
    start(heads, settings.seed)
    heads = heads.to(next(model.parameters()).device)
    attach_layers(heads, model)
    return heads


def stream_sizes(model: PreTrainedModel, layers: int) -> StreamSizes:
    """Of streams through the ``layers`` uppermost layers. Raises ModelLoadError for a model without such layers."""
    found = _dimensions(model)
    if layers >= found.num_layers:
        raise ModelLoadError(
            f"streams through {layers} layers need a model of more; {type(model).__name__} has {found.num_layers}"
        )
    return StreamSizes(layers, found.intermediate, found.heads, found.kv_heads, found.head_dim)


@torch.no_grad()
def attach_layers(heads: StreamingHeads, model: PreTrainedModel) -> None:
    """Gives ``heads`` float32 copies of the upper layers' weights; call it before the linear layers are packed.

    Raises ModelLoadError for a model of other sizes or kind.
    """
    require_layers(heads.sizes, model)
    found = _dimensions(model)
    any_model: Any = model
    decoder, count = any_model.model, heads.sizes.layers
    base = Base(
        layers=[
            _base_layer(layer, window)
            for layer, window in zip(decoder.layers[-count:], found.windows[-count:], strict=True)
        ],
        final_norm=decoder.norm.weight,
        rotation=rotation(model, found.head_dim),
        eps=found.eps,
        entry=found.num_layers - count - 1,
    )
    heads.attach(base)


def require_layers(sizes: StreamSizes, model: PreTrainedModel) -> None:
    """Raises ModelLoadError for streams that cannot run through the model's layers."""
    found = stream_sizes(model, sizes.layers)
    if found != sizes:
        raise ModelLoadError(
            f"the streams were made for layers of {_words(sizes)}; {type(model).__name__} has {_words(found)}"
        )


def _dimensions(model: PreTrainedModel) -> Dimensions:
    name = type(model).__name__
    if name not in LLAMA_FAMILY:
        raise ModelLoadError(f"streams run through layers of Llama's kind ({', '.join(LLAMA_FAMILY)}), not of {name}")
    if model.config.hidden_act != "silu":
        raise ModelLoadError(f"streams compute the activation silu; {name} has {model.config.hidden_act}")
    return dimensions(model)


def _words(sizes: StreamSizes) -> str:
    return (
        f"{sizes.heads} heads and {sizes.kv_heads} KV heads of {sizes.head_dim} numbers and {sizes.intermediate} "
        f"intermediate ones"
    )


def _base_layer(layer: Any, window: int) -> BaseLayer:
    attention, mlp = layer.self_attn, layer.mlp
    parts = {
        **{name: getattr(attention, name) for name in ("q_proj", "k_proj", "v_proj", "o_proj")},
        **{name: getattr(mlp, name) for name in ("gate_proj", "up_proj", "down_proj")},
    }
    norms = {"input_norm": layer.input_layernorm.weight, "post_norm": layer.post_attention_layernorm.weight}
    norms |= {name: getattr(attention, name).weight for name in ("q_norm", "k_norm") if hasattr(attention, name)}
    return BaseLayer({name: (part.weight, part.bias) for name, part in parts.items()}, norms, window)
