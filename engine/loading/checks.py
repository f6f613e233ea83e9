"""What can be served is decided here, from the configuration, before any weight is read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import transformers
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from engine.errors import ModelLoadError

CAUSAL_LM = "AutoModelForCausalLM"
_ATTENTION_LAYERS = {"full_attention", "sliding_attention"}
_STATEFUL_LAYERS = {"linear_attention", "mamba", "conv", "recurrent", "hybrid", "hybrid_sliding"}


def read_config(folder: Path, trust: bool) -> PreTrainedConfig:
    """The folder's configuration. Raises ModelLoadError when it is missing, broken, unknown, or needs code that is
    not trusted."""
    path = folder / "config.json"
    if not path.is_file():
        raise ModelLoadError(
            f"{folder} is not a model folder: it needs config.json, tokenizer files and model.safetensors."
        )
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        model_type, auto_map = raw.get("model_type"), raw.get("auto_map")
    except (ValueError, AttributeError) as error:
        raise ModelLoadError(f"{path} is not a JSON object; fetch it again.") from error
    if model_type not in CONFIG_MAPPING and not (auto_map and trust):
        if auto_map:
            raise ModelLoadError(
                f"{folder} brings its own model code ({model_type}), which runs only with model.trust set to true."
            )
        raise ModelLoadError(f"{path} names the model type {model_type}, unknown to transformers {_version()}.")
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=trust)
    except Exception as error:  # configurations validate themselves with errors of many types
        raise ModelLoadError(f"{path} is not a valid {model_type} configuration: {first_line(error)}") from error
    return config


def model_class(config: PreTrainedConfig, folder: Path, trust: bool) -> type[PreTrainedModel]:
    """The decoder-only class that serves ``config``, once every refusal that the configuration calls for is past.

    Raises ModelLoadError for encoder-decoders, recurrent state, attention other than full or sliding, RoPE that
    depends on the batch, quantized checkpoints, and models without a causal language head.
    """
    name = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise ModelLoadError(f"{name} is an encoder-decoder model; only decoder-only models can be served.")
    if getattr(config, "quantization_config", None) is not None:
        method = _quantization_method(config.quantization_config)
        raise ModelLoadError(f"This checkpoint is quantized ({method}); quantized checkpoints cannot be served yet.")
    found = _causal_lm(config, folder, trust)
    if found is None or found.__name__.endswith("ForConditionalGeneration"):
        raise ModelLoadError(f"{name} has no decoder-only language model in transformers {_version()}.")
    if config.architectures and found.__name__ not in config.architectures:
        raise ModelLoadError(
            f"The checkpoint is a {config.architectures[0]}, not a decoder-only language model ({found.__name__})."
        )
    _check_layers(config, found)
    _check_rope(config)
    return found


def first_line(error: Exception) -> str:
    """An error's message in one sentence: its first line that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _causal_lm(config: PreTrainedConfig, folder: Path, trust: bool) -> type[PreTrainedModel] | None:
    auto_map = getattr(config, "auto_map", None) or {}
    if trust and CAUSAL_LM in auto_map:
        own: type[PreTrainedModel] = get_class_from_dynamic_module(auto_map[CAUSAL_LM], folder)
        return own
    mapping: Any = MODEL_FOR_CAUSAL_LM_MAPPING
    listed: type[PreTrainedModel] | None = mapping.get(type(config), None)
    return listed


def _check_layers(config: PreTrainedConfig, found: type[PreTrainedModel]) -> None:
    text = config.get_text_config()
    layers = {str(kind) for kind in getattr(text, "layer_types", None) or ()}
    if found._is_stateful or layers & _STATEFUL_LAYERS:
        raise ModelLoadError(
            f"{found.__name__} keeps a recurrent state beside its attention, which paged attention cannot hold."
        )
    if layers - _ATTENTION_LAYERS:
        kinds = ", ".join(sorted(layers - _ATTENTION_LAYERS))
        raise ModelLoadError(f"{found.__name__} has layers of the kind {kinds}, which cannot be served.")
    if not found._supports_attention_backend:
        raise ModelLoadError(f"{found.__name__} computes attention itself and cannot use paged attention.")


def _check_rope(config: PreTrainedConfig) -> None:
    """These kinds rescale every position by the longest one in the batch, so a request would change its neighbours."""
    for kind in _rope_types(config.get_text_config().to_dict()):
        if "dynamic" in kind or kind == "longrope":
            raise ModelLoadError(
                f"{config.model_type} uses {kind} RoPE, which depends on the longest request of a batch; "
                f"it cannot be served."
            )


def _rope_types(node: dict[str, Any], is_rope: bool = False) -> Iterator[str]:
    """Every rope type in a configuration: ``rope_parameters`` and ``rope_scaling``, flat or one dict a layer type."""
    for key, value in node.items():
        if isinstance(value, dict):
            yield from _rope_types(value, is_rope or key in ("rope_parameters", "rope_scaling"))
        elif is_rope and key in ("rope_type", "type") and isinstance(value, str):
            yield value


def _quantization_method(quantization: Any) -> str:
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization.quant_method
    return str(getattr(method, "value", method))


def _version() -> str:
    return transformers.__version__
