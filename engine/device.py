"""Which device and number format a model runs in, from what the user asked for and what the machine has."""

from __future__ import annotations

import platform
from pathlib import Path

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


def device_name(device: torch.device) -> str:
    """The model of the GPU or of the CPU, as the system calls it."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "CPU part")))
    return next(names, "") or platform.processor() or platform.machine()
