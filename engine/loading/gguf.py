"""GGUF files, converted once to float32 safetensors in the cache.

transformers reads a GGUF (configuration, tokenizer, dequantized weights), but parses it anew for each of the three and
twice for the weights, and its tokenizer ignores what it does not know. So the file is parsed once here, an unknown
tokenizer is refused, and the result is an ordinary model folder whose next start takes no conversion.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import functools
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers import pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    modeling_gguf_pytorch_utils,
)
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from engine.errors import ModelLoadError
from engine.loading.cache import build_once, cache_root, require_space
from engine.loading.checks import first_line, model_class
from engine.loading.digest import joined_digest
from engine.loading.memory import require_memory
from engine.loading.source import GgufSource
from engine.loading.weights import SINGLE

FORMAT_VERSION = 1  # of the converted folder; a change of the conversion makes a new folder
_CONTROL_TOKEN = 3  # gguf token_type
# Pre-tokenizers of byte-level vocabularies that transformers' reader leaves at GPT-2's; llama.cpp's src/llama-vocab.cpp
# cuts these into single digits first.
_SINGLE_DIGITS = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}
_GPT2 = {"gpt-2", "phi-2", "mpt", "olmo", "jais"}
_TURN_ENDS = {"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<turn|>"}
_patching = threading.Lock()


def converted_folder(source: GgufSource, progress: Callable[[str], None]) -> tuple[Path, str]:
    """The model folder made of ``source`` and the hex SHA-256 of the GGUF. Raises ModelLoadError."""
    digest = joined_digest(source.parts, progress)
    if source.sha256 is not None and digest != source.sha256:
        raise ModelLoadError(f"{source.parts[0]} is corrupt: its SHA-256 is not the published one; install it again.")
    build = functools.partial(_convert, source, progress)
    return build_once(f"{digest}-{FORMAT_VERSION}", build, progress), digest


def _convert(source: GgufSource, progress: Callable[[str], None], folder: Path) -> None:
    """Writes config, generation config, float32 safetensors and tokenizer of ``source`` into the empty ``folder``."""
    path = source.parts[0]
    if len(source.parts) > 1:
        path = folder / f"{source.name}.gguf"
        _join(source.parts, path)
    progress(f"Converting {path.name} to safetensors, once, into {cache_root()}")
    with _parsed_once():
        reader = _open(path)
        needed = 4 * sum(int(tensor.n_elements) for tensor in reader.tensors)
        require_space(folder, needed, f"Converting {source.name}")
        require_memory(needed, torch.device("cpu"), source.name)
        config = _config(path)
        tokenizer = _tokenizer(path, reader, config)
        model = _model(path)
    _save(model, source.name, _generation_config(reader, tokenizer), folder)
    tokenizer.save_pretrained(folder)
    if len(source.parts) > 1:
        path.unlink()


def _join(parts: tuple[Path, ...], path: Path) -> None:
    require_space(path.parent, sum(part.stat().st_size for part in parts), "Joining the parts of the model")
    with path.open("wb") as whole:
        for part in parts:
            with part.open("rb") as file:
                shutil.copyfileobj(file, whole, 1 << 20)


def _open(path: Path) -> Any:
    """The parsed file (``gguf.GGUFReader``). Raises ModelLoadError when it ends early or makes no sense."""
    try:
        return gguf.GGUFReader(str(path))  # _Reader, and cached, within _parsed_once
    except (ValueError, IndexError, KeyError, OverflowError, TypeError) as error:
        raise ModelLoadError(f"{path} is truncated or corrupt ({first_line(error)}); fetch it again.") from error


def _config(path: Path) -> PreTrainedConfig:
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    except (ValueError, KeyError, TypeError) as error:
        raise ModelLoadError(f"{path} cannot be served: {first_line(error)}") from error
    model_class(config, path.parent, trust=False)
    return config


def _tokenizer(path: Path, reader: Any, config: PreTrainedConfig) -> PreTrainedTokenizerBase:
    """The file's tokenizer with its text split as its vocabulary was learned, or ModelLoadError."""
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    except (ValueError, KeyError, TypeError) as error:
        raise ModelLoadError(f"The tokenizer of {path} cannot be read: {first_line(error)}") from error
    if _field(reader, "tokenizer.ggml.model") == "gpt2":
        kind = _field(reader, "tokenizer.ggml.pre")
        if kind in _SINGLE_DIGITS:
            tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Digits(individual_digits=True),
                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
                ]
            )
        elif kind not in _GPT2 and kind not in GGUF_PRE_TOKENIZER_SPLITS:
            raise ModelLoadError(
                f"{path} splits text by the rule {kind!r}, which is not known here, so prompts would be read wrongly; "
                f"serve the model's safetensors instead."
            )
    if len(tokenizer) > config.vocab_size:
        raise ModelLoadError(f"The tokenizer of {path} has {len(tokenizer)} tokens, the model {config.vocab_size}.")
    result: PreTrainedTokenizerBase = tokenizer
    return result


def _model(path: Path) -> PreTrainedModel:
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32, output_loading_info=True
        )
    except (ValueError, KeyError, TypeError, RuntimeError, NotImplementedError) as error:
        raise ModelLoadError(f"The weights of {path} cannot be read: {first_line(error)}") from error
    model: PreTrainedModel = loaded[0]
    info = loaded[1]
    if info["missing_keys"] or info["unexpected_keys"]:
        named = sorted(info["missing_keys"] or info["unexpected_keys"])[0]
        raise ModelLoadError(f"The weights of {path} do not match its configuration (first: {named}).")
    return model


def _generation_config(reader: Any, tokenizer: PreTrainedTokenizerBase) -> GenerationConfig:
    """EOS is what ends an answer: the file's EOS, end-of-turn and end-of-message ids, and the token by which the chat
    template closes a turn (files made before ``eot_token_id`` existed name a base model's EOS alone)."""
    ids = [_field(reader, f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    template = _field(reader, "tokenizer.chat_template") or ""
    types = _field(reader, "tokenizer.ggml.token_type") or []
    vocabulary = tokenizer.get_vocab()
    for text in sorted(_TURN_ENDS):
        token = vocabulary.get(text)
        if token is not None and text in template and token < len(types) and types[token] == _CONTROL_TOKEN:
            ids.append(token)
    eos = [int(token) for token in dict.fromkeys(ids) if token is not None]
    if not eos:
        raise ModelLoadError("The GGUF names no end-of-sequence token, so an answer would never end.")
    return GenerationConfig(  # type: ignore[no-untyped-call]
        eos_token_id=eos,
        bos_token_id=_field(reader, "tokenizer.ggml.bos_token_id"),
        pad_token_id=_field(reader, "tokenizer.ggml.padding_token_id"),
    )


def _save(model: PreTrainedModel, name: str, generation: GenerationConfig, folder: Path) -> None:
    """Saves a dequantized model. transformers marks what it read from a GGUF as quantized and will not write that, so
    the weights go into a fresh model of the same class, without copies."""
    config = model.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.name_or_path = name
    with torch.device("meta"):
        plain = type(model)(config)
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config = generation
    plain.save_pretrained(folder, max_shard_size=1 << 40)
    shutil.copymode(folder / "config.json", folder / SINGLE)  # safetensors writes for the owner's eyes alone


def _field(reader: Any, key: str) -> Any:
    field = reader.get_field(key)
    return None if field is None else field.contents()


class _Reader(gguf.GGUFReader):
    """GGUFReader over a plain array of the mapped file: it takes a million slices of it, and numpy's memmap class makes
    each of them several times dearer."""

    @property
    def data(self) -> Any:
        return self._plain

    @data.setter
    def data(self, mapped: Any) -> None:
        self._plain = mapped.view(np.ndarray)


@contextmanager
def _parsed_once() -> Iterator[None]:
    """Within it, transformers gets one parsed file and one name table instead of parsing the file four times and
    building the table once a module, and its progress bar is silent. Figures: ``engine/LOG.md``."""
    library: Any = gguf
    legacy: Any = modeling_gguf_pytorch_utils
    with _patching:
        reader, table, bar = library.GGUFReader, library.get_tensor_name_map, legacy.tqdm
        library.GGUFReader = functools.lru_cache(maxsize=1)(_Reader)
        library.get_tensor_name_map = functools.lru_cache(maxsize=1)(table)
        legacy.tqdm = functools.partial(bar, disable=True)
        try:
            yield
        finally:
            library.GGUFReader, library.get_tensor_name_map, legacy.tqdm = reader, table, bar
