"""Whether a model fits, decided from file headers before a byte of it is allocated."""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Sequence

import psutil
import torch
from transformers import PreTrainedConfig

from engine.cgroup import memory_available
from engine.errors import ModelLoadError
from engine.loading.cache import gibibytes
from engine.loading.weights import TensorHeader

_HEADROOM = 1.05  # the largest layer exists twice while its layout changes, and allocators round up


def needed_bytes(headers: Sequence[TensorHeader], config: PreTrainedConfig, dtype: torch.dtype, device: str) -> int:
    """Bytes the weights take once loaded. On the CPU in float32 a tied lm_head is packed into a copy of its own."""
    elements = sum(header.elements for header in headers)
    text = config.get_text_config()
    if device == "cpu" and dtype == torch.float32 and text.tie_word_embeddings:
        elements += text.vocab_size * text.hidden_size
    return int(elements * dtype.itemsize * _HEADROOM)


def available_bytes(device: torch.device) -> int:
    """Bytes that can be allocated on ``device``: free GPU memory, or the least of what the system and the control
    group have left."""
    if device.type == "cuda":
        free: int = torch.cuda.mem_get_info(device)[0]
        return free
    system = int(psutil.virtual_memory().available)
    limited = memory_available()
    return system if limited is None else min(system, limited)


def require_memory(needed: int, device: torch.device, name: str) -> None:
    """Raises ModelLoadError when ``needed`` bytes are not there."""
    available = available_bytes(device)
    if needed > available:
        raise ModelLoadError(
            f"{name} needs {gibibytes(needed)} of memory for its weights, and {gibibytes(available)} are available "
            f"on {device}."
        )


def return_free_memory() -> None:
    """Gives memory that loading has freed back to the system, where the C library (glibc) can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        gc.collect()
        trim(0)
