"""What an MTP module takes from its base model: sizes, where it starts from, embedding and rotation."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from engine.attention.check import layer_shapes
from engine.errors import ModelLoadError
from heads.config import MtpSizes
from heads.mtp import MtpModule, Rotation, start
from heads.settings import TrainSettings

_LONGEST_TABLE = 1 << 17  # positions, where the configuration names no limit or a larger one


def new_mtp(model: PreTrainedModel, settings: TrainSettings) -> MtpModule:
    """A module to train, of the size of the model's own layers; call it before the linear layers are packed.

    Raises ModelLoadError for a model whose last layer's keys and values it cannot read.
    """
    config: Any = model.config.get_text_config()
    shape = layer_shapes(model)[-1]
    if shape.key_dim != shape.value_dim:
        raise ModelLoadError(f"{type(model).__name__} stores keys and values of different sizes; MTP modules cannot")
    sizes = MtpSizes(
        kv=settings.kv,
        intermediate=config.intermediate_size,
        heads=config.num_attention_heads,
        kv_heads=shape.num_kv_heads,
        head_dim=shape.key_dim,
        eps=float(getattr(config, "rms_norm_eps", 1e-5)),
    )
    module = MtpModule(config.hidden_size, sizes, settings.num_heads)
    start(module, settings.seed, _final_scale(model, config.hidden_size))
    return module.to(next(model.parameters()).device)


@torch.no_grad()
def _final_scale(model: PreTrainedModel, hidden: int) -> torch.Tensor | None:
    """[hidden], what the norm before lm_head multiplies by, if it only scales. The norm itself is asked: some
    architectures add one to the weight they store (Gemma)."""
    any_model: Any = model
    norm = getattr(any_model.get_decoder(), "norm", None)
    if norm is None:
        return None
    parameter = next(model.parameters())
    ones = torch.ones(1, hidden, dtype=parameter.dtype, device=parameter.device)
    scale: torch.Tensor = norm(ones)[0].float()
    negated: torch.Tensor = norm(-ones)[0].float()
    # A norm that subtracts the mean (LayerNorm) makes nothing of both.
    return scale.cpu() if torch.equal(scale, -negated) and bool(scale.any()) else None


def attach_base(module: MtpModule, model: PreTrainedModel) -> None:
    """Gives ``module`` the model's input embedding, shared, and the rotation of its last layer.

    Raises ModelLoadError for a model that does not rotate whole heads.
    """
    embedding: Any = model.get_input_embeddings()
    module.attach(embedding.weight, rotation(model, module.shape.head_dim))


@torch.no_grad()
def rotation(model: PreTrainedModel, head_dim: int) -> Rotation:
    """Of the last layer. Raises ModelLoadError for a model without rotary embeddings, or with others than Llama's."""
    any_model: Any = model
    config: Any = model.config.get_text_config()
    rotary = getattr(any_model.get_decoder(), "rotary_emb", None)
    if rotary is None:
        raise ModelLoadError(f"{type(model).__name__} has no rotary embedding that draft heads could share")
    positions = min(getattr(config, "max_position_embeddings", None) or _LONGEST_TABLE, _LONGEST_TABLE)
    ids = torch.arange(positions + 1, device=next(model.parameters()).device)[None]
    types = getattr(config, "layer_types", None)
    like = torch.zeros(1, device=ids.device)
    by_type = isinstance(getattr(rotary, "rope_type", None), dict)  # one table a kind of layer (Gemma 3)
    cosine, sine = rotary(like, ids, types[-1]) if by_type and types else rotary(like, ids)
    if cosine.shape[-1] != head_dim:
        raise ModelLoadError(f"{type(model).__name__} rotates only a part of each head; draft heads cannot share that")
    return Rotation(cosine[0, :, : head_dim // 2].float(), sine[0, :, : head_dim // 2].float())
