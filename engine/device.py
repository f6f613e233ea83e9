"""Which device and number format a model runs in, from what the user asked for and what the machine has."""

from __future__ import annotations

import torch

from engine.config import Device, DTypeName
from engine.errors import ModelLoadError


def resolve_device(name: Device) -> torch.device:
    """``auto`` is the GPU where there is one. Raises ModelLoadError for a GPU that is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ModelLoadError("engine.device is cuda, but torch finds no usable GPU on this machine")
    return torch.device(name)


def resolve_dtype(name: DTypeName) -> torch.dtype | None:
    """The torch dtype of a configured name; None for ``auto``, which the loader decides."""
    if name == "auto":
        return None
    dtype: torch.dtype = getattr(torch, name)
    return dtype
