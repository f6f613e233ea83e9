"""``load_model``: the one way into memory for every kind of source."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from engine.config import ModelConfig
from engine.errors import ModelLoadError
from engine.loading.checks import first_line, model_class, read_config
from engine.loading.digest import weights_digest
from engine.loading.gguf import converted_folder
from engine.loading.memory import needed_bytes, require_memory
from engine.loading.mtp_layouts import find_layout
from engine.loading.source import GgufSource, resolve
from engine.loading.weights import TensorHeader, read_headers, weight_files

logger = logging.getLogger(__name__)

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_RANDOM_SAMPLING = ("temperature", "top_k", "top_p", "min_p")  # void where the checkpoint says do_sample: false
_ANY_SAMPLING = ("repetition_penalty",)
_HALF_PRECISION_BITS = 15.0  # a GGUF of 16-bit weights also holds a tokenizer, so it has a little more
_OLD_BUFFERS = ("rotary_emb.inv_freq", "attn.bias", "attn.masked_bias")  # older checkpoints stored what is computed now


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run: eval mode, no gradients, its dtype and device set; attention is left as transformers
    chose it.

    path: folder with config and tokenizer files. digest: hex SHA-256 of the GGUF file, or of a folder's weights
        (``engine.loading.digest``). name: default served name. architecture: the model's class name.
    default_sampling: sampling fields that the checkpoint's generation_config.json itself sets.
    max_position_embeddings: the longest sequence the model was made for; None where the configuration has no limit.
    is_quantized: the source holds its weights in fewer than 16 bits each.
    """

    model: PreTrainedModel
    path: Path
    digest: str
    name: str
    architecture: str
    eos_token_ids: tuple[int, ...]
    max_position_embeddings: int | None
    default_sampling: Mapping[str, float] = field(default_factory=dict)
    is_quantized: bool = False


def load_model(
    model: ModelConfig, device: torch.device, dtype: torch.dtype | None, progress: Callable[[str], None]
) -> LoadedModel:
    """Finds, checks and loads what ``model`` names.

    dtype None: float32 on the CPU, bfloat16 on a GPU (float16 where it has none). progress: gets a line for each thing
    that takes seconds. Raises ModelLoadError with one sentence; nothing is allocated before memory is known to suffice.
    """
    dtype = _usable_dtype(device, dtype)
    with quiet_transformers():
        source = resolve(model, progress)
        if isinstance(source, GgufSource):
            folder, digest = converted_folder(source, progress)
        else:
            folder, digest = source.folder, None
        config = read_config(folder, model.trust)
        found = model_class(config, folder, model.trust)
        files = weight_files(folder)
        headers = read_headers(files)
        require_memory(needed_bytes(headers, config, dtype, device.type), device, source.name)
        progress(f"Loading {source.name} ({str(dtype).removeprefix('torch.')} on {device})")
        loaded = _load(found, config, folder, device, dtype)
        generation = _read_generation_config(folder)
        return LoadedModel(
            model=loaded,
            path=folder,
            digest=digest or weights_digest(files, progress),
            name=source.name,
            architecture=type(loaded).__name__,
            eos_token_ids=_eos_token_ids(generation, config, folder),
            max_position_embeddings=getattr(config.get_text_config(), "max_position_embeddings", None),
            default_sampling=_default_sampling(generation, folder),
            is_quantized=isinstance(source, GgufSource) and _bits_a_weight(source, headers) < _HALF_PRECISION_BITS,
        )


def _bits_a_weight(source: GgufSource, headers: Sequence[TensorHeader]) -> float:
    return 8 * sum(part.stat().st_size for part in source.parts) / sum(header.elements for header in headers)


def _usable_dtype(device: torch.device, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype to load in, after a small product in it has worked on ``device``."""
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ModelLoadError("engine.device is cuda, but torch sees no CUDA device here.")
    has_bfloat16 = device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)
    if dtype is None:
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16 if has_bfloat16 else torch.float16
    name = str(dtype).removeprefix("torch.")
    if dtype not in _DTYPES or (dtype == torch.bfloat16 and not has_bfloat16):
        raise ModelLoadError(f"model.dtype {name} is not supported on {device}.")
    try:
        probe = torch.ones(2, 2, dtype=dtype, device=device)
        probe @ probe
    except (RuntimeError, NotImplementedError) as error:
        raise ModelLoadError(f"model.dtype {name} is not supported on {device} ({first_line(error)}).") from error
    return dtype


def _load(
    found: type[PreTrainedModel], config: PreTrainedConfig, folder: Path, device: torch.device, dtype: torch.dtype
) -> PreTrainedModel:
    """Weights go straight to ``dtype`` and ``device``; on the CPU, in the stored dtype, they stay mapped files."""
    try:
        result: Any = found.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            device_map=None if device.type == "cpu" else {"": device},
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
        )
    except torch.OutOfMemoryError as error:
        raise ModelLoadError(f"{folder} does not fit into the memory of {device}.") from error
    except Exception as error:  # any model class may fail in a way of its own
        raise ModelLoadError(f"{folder} could not be loaded: {first_line(error)}") from error
    _require_matching(result[1], folder, config.get_text_config().num_hidden_layers)
    loaded: PreTrainedModel = result[0].eval().requires_grad_(False)
    return loaded


def _require_matching(info: Mapping[str, Any], folder: Path, num_layers: int) -> None:
    """transformers fills a missing weight with random numbers and drops one it does not know; both end here. Those of
    multi-token-prediction modules are read later (``engine.loading.checkpoint_mtp``)."""
    layout = find_layout(info["unexpected_keys"], num_layers)
    unknown = [
        name
        for name in info["unexpected_keys"]
        if not name.endswith(_OLD_BUFFERS) and (layout is None or layout.belongs.match(name) is None)
    ]
    wrong = {
        "lacks weights that its configuration calls for": sorted(info["missing_keys"]),
        "has weights of other shapes than its configuration": sorted(str(key) for key in info["mismatched_keys"]),
        "has weights that its configuration does not know": sorted(unknown),
    }
    for what, names in wrong.items():
        if names:
            raise ModelLoadError(
                f"{folder} {what}: {names[0]}" + (f" and {len(names) - 1} more." if names[1:] else ".")
            )


def _read_generation_config(folder: Path) -> dict[str, Any]:
    """generation_config.json as written, so that a library's default is not taken for the checkpoint's wish."""
    path = folder / "generation_config.json"
    if not path.is_file():
        return {}
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelLoadError(f"{path} is not JSON; fetch it again.") from error
    if not isinstance(raw, dict):
        raise ModelLoadError(f"{path} is not a JSON object; fetch it again.")
    return raw


def _default_sampling(generation: Mapping[str, Any], folder: Path) -> dict[str, float]:
    names = _ANY_SAMPLING if generation.get("do_sample") is False else _RANDOM_SAMPLING + _ANY_SAMPLING
    values = {name: generation[name] for name in names if generation.get(name) is not None}
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelLoadError(f"{folder / 'generation_config.json'} has {name}: {value!r}, which is not a number.")
    return values


def _eos_token_ids(generation: Mapping[str, Any], config: PreTrainedConfig, folder: Path) -> tuple[int, ...]:
    """From generation_config.json, else config.json, else the tokenizer; empty when none names an EOS token."""
    named = generation.get("eos_token_id")
    if named is None:
        named = getattr(config.get_text_config(), "eos_token_id", None)
    if named is None and (folder / "tokenizer_config.json").is_file():
        named = AutoTokenizer.from_pretrained(folder, local_files_only=True).eos_token_id
    if named is None:
        logger.warning("%s names no EOS token; answers end at stop strings and length limits alone", folder)
        return ()
    return tuple(dict.fromkeys(named if isinstance(named, list | tuple) else [named]))


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """The server reports progress and failures itself, so transformers' bars and tables are off within."""
    verbosity = transformers_logging.get_verbosity()
    had_bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity(logging.ERROR)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if had_bars:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]
