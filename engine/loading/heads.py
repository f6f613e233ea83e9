"""Finding draft heads for a model, and refusing those that belong to another."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from engine.attention.check import layer_shapes
from engine.config import SpeculationConfig
from engine.errors import ModelLoadError
from engine.loading.checkpoint_mtp import read_checkpoint_mtp
from engine.loading.eagle import read_eagle
from engine.loading.model import LoadedModel
from engine.loading.streaming import require_layers
from heads.checkpoint import PRETRAINED, LoadedHeads, load_heads
from heads.config import CHECKPOINT_MTP, CONFIG_FILE, FORMAT, PUBLIC_EAGLE, HeadsConfig
from heads.errors import HeadsError
from heads.lm_head import OutputHead

log = logging.getLogger("headlong.engine")

_PROBES = 4
_TOLERANCE = 1e-3  # of the largest logit


def find_heads(folder: str | None, loaded: LoadedModel, pretrained: Path = PRETRAINED) -> LoadedHeads | None:
    """The heads in ``folder``; with None those in the model's own checkpoint, or the ones that come with headlong for
    this model, if there are any. Call it before the linear layers are packed.

    Raises ModelLoadError for heads that cannot be read or belong to another model.
    """
    heads = read_checkpoint_mtp(loaded) if folder is None else None
    if heads is not None:
        log.info("%s drafts with the MTP module of its own checkpoint", loaded.name)
    else:
        path = _pretrained(loaded, pretrained) if folder is None else Path(folder).expanduser()
        if path is None:
            return None
        try:
            config = HeadsConfig.read(path)
            heads = read_eagle(path, config, loaded) if config.format == PUBLIC_EAGLE else load_heads(path)
        except HeadsError as error:
            raise ModelLoadError(str(error)) from error
    require_fitting(heads, loaded)
    if heads.config.vocab_size == 0:
        config = dataclasses.replace(heads.config, vocab_size=len(_output_layer(loaded.model).weight))
        heads = dataclasses.replace(heads, config=config)
    return heads


def require_heads_folder(config: SpeculationConfig) -> None:
    """Raises ModelLoadError for a folder that holds no heads, before the seconds that loading a model takes."""
    if config.enabled and config.heads is not None:
        try:
            HeadsConfig.read(Path(config.heads).expanduser())
        except HeadsError as error:
            raise ModelLoadError(str(error)) from error


def _pretrained(loaded: LoadedModel, pretrained: Path) -> Path | None:
    for config_file in sorted(pretrained.glob(f"*/{CONFIG_FILE}")):
        try:
            config = HeadsConfig.read(config_file.parent)
        except HeadsError as error:
            log.warning("%s", error)
            continue
        if config.base_model.digest == loaded.digest:
            return config_file.parent
    return None


def require_fitting(heads: LoadedHeads, loaded: LoadedModel) -> None:
    """Raises ModelLoadError for heads of another size or model.

    Weights are told apart by their digest. The same model from another file (a hub's safetensors, another
    quantisation) has another digest under the same name: its heads may fit, so they are tried and the self-test tells.
    A public checkpoint knows no digest, and its name may be a path or an older one, so that it too is tried.
    """
    config, folder = heads.config, heads.folder
    vocab, hidden = _output_layer(loaded.model).weight.shape
    if config.hidden_size != hidden:
        raise ModelLoadError(
            f"the heads in {folder} were made for states of {config.hidden_size} numbers "
            f"({config.base_model.name}); {loaded.name} has {hidden}"
        )
    if config.vocab_size not in (0, vocab):  # 0: it does not say
        raise ModelLoadError(
            f"the heads in {folder} were made for a vocabulary of {config.vocab_size} tokens "
            f"({config.base_model.name}); {loaded.name} has {vocab}"
        )
    if config.mtp is not None:
        _require_block(config, loaded)
    if config.streaming is not None:
        require_layers(config.streaming, loaded.model)
    if config.format == CHECKPOINT_MTP:
        return
    if config.format != FORMAT:
        if config.base_model.name.lower() != loaded.name.lower():
            log.warning(
                "the heads in %s were trained on %s, this model is %s; the self-test tells whether they fit",
                folder,
                config.base_model.name,
                loaded.name,
            )
    elif config.base_model.digest != loaded.digest:
        if config.base_model.name.lower() != loaded.name.lower():
            raise ModelLoadError(
                f"the heads in {folder} were trained on {config.base_model.name}, not on {loaded.name}; "
                f"train some for it: headlong train"
            )
        log.warning(
            "the heads in %s were trained on other weights of the name %s; the self-test tells whether they fit",
            folder,
            loaded.name,
        )


def _require_block(config: HeadsConfig, loaded: LoadedModel) -> None:
    """Raises ModelLoadError for an MTP module that cannot share the model's rotation, or read its last-layer KV."""
    assert config.mtp is not None
    shape = layer_shapes(loaded.model)[-1]
    if config.mtp.kv == "own":
        if config.mtp.head_dim != shape.key_dim:
            raise ModelLoadError(
                f"the MTP module for {config.base_model.name} has heads of {config.mtp.head_dim} numbers; "
                f"{loaded.name} rotates {shape.key_dim}"
            )
        return
    found = (config.mtp.kv_heads, config.mtp.head_dim, config.mtp.head_dim)
    if found != (shape.num_kv_heads, shape.key_dim, shape.value_dim):
        raise ModelLoadError(
            f"the MTP module for {config.base_model.name} reads {found[0]} KV heads of {found[1]} numbers; "
            f"{loaded.name} has {shape.num_kv_heads} of {shape.key_dim}"
        )


def output_head(model: PreTrainedModel) -> OutputHead:
    """How ``model`` turns its final states into logits; call it before the linear layers are packed.

    Raises ModelLoadError for a model whose head is not a linear map with an optional scale and softcap.
    """
    layer = _output_layer(model)
    config = model.config.get_text_config()
    scale = getattr(config, "logit_scale", None) or 1.0
    divisor = getattr(config, "logits_scaling", None) or 1.0
    head = OutputHead(
        weight=layer.weight,
        bias=getattr(layer, "bias", None),
        scale=float(scale) / float(divisor),
        softcap=getattr(config, "final_logit_softcapping", None),
    )
    _check(model, head)
    return head


def _output_layer(model: PreTrainedModel) -> Any:
    any_model: Any = model
    layer = any_model.get_output_embeddings()
    if layer is None or layer.weight.dim() != 2:
        raise ModelLoadError(f"{type(model).__name__} has no output layer that heads could share")
    return layer


@torch.inference_mode()
def _check(model: PreTrainedModel, head: OutputHead) -> None:
    """Compares with the model's own logits on a few tokens."""
    any_model: Any = model
    device = next(model.parameters()).device
    ids = torch.arange(1, _PROBES + 1, device=device)[None]
    attention = model.config._attn_implementation
    model.set_attn_implementation("eager")  # paged attention works only inside an engine's step
    try:
        states = any_model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state[0]
        expected = any_model(input_ids=ids, use_cache=False).logits[0].float()
    finally:
        model.set_attn_implementation(attention)
    found = torch.nn.functional.linear(states, head.weight, head.bias).float() * head.scale
    if head.softcap is not None:
        found = torch.tanh(found / head.softcap) * head.softcap
    tolerance = _TOLERANCE if expected.dtype == torch.float32 and states.dtype == torch.float32 else 5e-2
    if float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-6)) > tolerance:
        raise ModelLoadError(f"{type(model).__name__} computes its logits in a way that heads cannot share")
