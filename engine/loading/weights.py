"""The weight files of a model folder and what their headers say, read before anything is allocated."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from engine.errors import ModelLoadError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_FLOATS = {"F64", "F32", "F16", "BF16"}


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """A stored tensor: its name, safetensors dtype ("F32", ...) and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


def weight_files(folder: Path) -> tuple[Path, ...]:
    """The safetensors files of a checkpoint, one or the shards of its index.

    Raises ModelLoadError when the folder is no checkpoint, lacks a shard, or holds pickled weights alone.
    """
    if (folder / SINGLE).is_file():
        return (folder / SINGLE,)
    if (folder / INDEX).is_file():
        return _shards(folder)
    if any(next(folder.glob(pattern), None) for pattern in _PICKLES):
        raise ModelLoadError(
            f"{folder} holds pickled weights alone, which can run code when read; convert them to safetensors."
        )
    gguf = next(folder.glob("*.gguf"), None)
    if gguf is not None:
        raise ModelLoadError(f"{folder} holds no safetensors; to serve its GGUF name the file itself: {gguf}")
    raise ModelLoadError(
        f"{folder} is not a model folder: it needs config.json, tokenizer files and {SINGLE} (or shards with {INDEX})."
    )


def read_headers(files: Sequence[Path]) -> list[TensorHeader]:
    """Every tensor of ``files``; no data is read. Raises ModelLoadError for a truncated or corrupt file, and for
    weights that are not plain floats."""
    headers: list[TensorHeader] = []
    for file in files:
        try:
            with safe_open(file, framework="pt") as stored:
                for name in stored.keys():  # noqa: SIM118 - not a mapping, it has no other iterator
                    part = stored.get_slice(name)
                    headers.append(TensorHeader(name, part.get_dtype(), tuple(part.get_shape())))
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(f"{file} is truncated or corrupt ({error}); fetch it again.") from error
    packed = sorted({header.dtype for header in headers if _is_weight(header)} - _FLOATS)
    if packed:
        raise ModelLoadError(
            f"{files[0].parent} stores weights as {', '.join(packed)}; quantized checkpoints cannot be served yet."
        )
    return headers


def read_tensors(files: Sequence[Path], is_wanted: Callable[[str], bool]) -> dict[str, torch.Tensor]:
    """The tensors of ``files`` whose names are wanted, as they are stored. Raises ModelLoadError for a truncated or
    corrupt file."""
    found: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as stored:
                found |= {name: stored.get_tensor(name) for name in filter(is_wanted, stored.keys())}
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(f"{file} is truncated or corrupt ({error}); fetch it again.") from error
    return found


def _is_weight(header: TensorHeader) -> bool:
    """Integer tensors without a ``weight`` in their name are indices and masks of old checkpoints."""
    return "weight" in header.name


def _shards(folder: Path) -> tuple[Path, ...]:
    try:
        names = sorted(set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
        shards = tuple(folder / name for name in names)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"{folder / INDEX} is not a safetensors index; fetch it again.") from error
    missing = [shard.name for shard in shards if not shard.is_file()]
    if missing:
        raise ModelLoadError(f"{folder} lacks weight files its index names: {', '.join(missing)}.")
    return shards
