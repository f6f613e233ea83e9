"""Files of weights: read as plain tensors, and held against the shapes that are wanted."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from heads.errors import HeadsError


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    """A safetensors file, or a ``.pt`` or ``.bin`` that holds tensors by name. Of the latter nothing is run: a pickle
    that needs code is refused. Raises HeadsError."""
    if path.suffix not in (".pt", ".bin"):
        try:
            return load_file(path)
        except (OSError, SafetensorError) as error:
            raise HeadsError(f"{path} cannot be read: {error}") from error
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise HeadsError(f"{path} cannot be read: {error.strerror}") from error
    except Exception as error:  # a damaged file makes the unpickler fail in any way
        raise HeadsError(
            f"{path} cannot be read: it is damaged, or holds more than tensors (code in it is not run)"
        ) from error
    if not isinstance(found, dict) or not all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in found.items()
    ):
        raise HeadsError(f"{path} does not hold tensors by name")
    return found


def require_fitting(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor], source: Path) -> None:
    """Raises HeadsError unless ``found`` has the names and shapes of ``wanted``, all finite numbers. source: the file
    they were read from, which lies beside its config.json."""
    wanted_shapes = {name: tuple(tensor.shape) for name, tensor in wanted.items()}
    found_shapes = {name: tuple(tensor.shape) for name, tensor in found.items()}
    for name in sorted(wanted_shapes.keys() | found_shapes.keys()):
        if wanted_shapes.get(name) != found_shapes.get(name):
            raise HeadsError(
                f"{source} does not fit its config.json: {name} is "
                f"{_shape(found_shapes.get(name))}, should be {_shape(wanted_shapes.get(name))}"
            )
    for name, tensor in found.items():
        if not _is_stored(tensor) or not bool(torch.isfinite(tensor.float()).all()):
            raise HeadsError(f"{source}: {name} holds values that are not finite numbers")


def _is_stored(tensor: torch.Tensor) -> bool:
    """Floats that are all in the file: a view that repeats few of them could ask for any amount of memory."""
    if not tensor.is_floating_point() or tensor.layout is not torch.strided:
        return False
    return tensor.numel() * tensor.element_size() <= tensor.untyped_storage().nbytes()


def _shape(shape: tuple[int, ...] | None) -> str:
    return "absent" if shape is None else "x".join(map(str, shape))
