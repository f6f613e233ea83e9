"""Heads in the format of the Medusa project (FasterDecoding): ``config.json`` and one file of weights.

Head h, block l is ``h.l.linear.weight`` and ``.bias``, with or without ``medusa_head.`` before it. Behind the last
block a head may have an output matrix of its own, ``h.L.weight`` with L blocks (Medusa-1); without it, heads share the
model's. The file decides how many heads there are: published configurations name fewer or more than were stored.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from pathlib import Path

import torch

from heads.config import MAX_HEADS, HeadsConfig
from heads.errors import HeadsError
from heads.medusa import OWN_LM_HEADS, MedusaHeads
from heads.weights import read_weights, require_fitting

WEIGHT_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt", "model.safetensors")
_NAME = re.compile(r"(?:medusa_heads?\.)?(\d{1,3}\.\d{1,3}\.(?:linear\.weight|linear\.bias|weight))")
_LARGEST = 1 << 24  # of a width or a vocabulary

log = logging.getLogger("headlong.heads")


def read_medusa(folder: Path, config: HeadsConfig) -> tuple[HeadsConfig, MedusaHeads]:
    """The heads in ``folder``, float32, and ``config`` with the sizes the file has; its vocab_size stays 0 where
    neither says it. config: ``HeadsConfig.read(folder)``. Raises HeadsError."""
    path = _weights_file(folder)
    found = _by_plain_name(read_weights(path), path)
    num_heads = 1 + max(int(name.split(".")[0]) for name in found)
    if num_heads > MAX_HEADS:
        raise HeadsError(f"{path} holds {num_heads} heads; {MAX_HEADS} is the most")
    hidden = _rows(found, "0.0.linear.weight", path)
    own = f"0.{config.num_layers}.weight"
    vocab = _rows(found, own, path) if own in found else None
    with torch.device("meta"):
        heads = MedusaHeads(hidden, num_heads, config.num_layers, own_vocab=vocab)
    names = {_plain_name(name, config.num_layers): name for name in heads.state_dict()}
    require_fitting(found, {plain: heads.get_parameter(name) for plain, name in names.items()}, path)
    _require_said(config, hidden, vocab, path)
    if num_heads != config.num_heads:
        log.warning("%s holds %d heads, its config.json names %d", path, num_heads, config.num_heads)
    # Copied, so that a file replaced on disk changes nothing.
    weights = {names[plain]: tensor.detach().to(torch.float32, copy=True) for plain, tensor in found.items()}
    heads.load_state_dict(weights, assign=True)
    sized = dataclasses.replace(
        config, num_heads=num_heads, hidden_size=hidden, vocab_size=config.vocab_size if vocab is None else vocab
    )
    return sized, heads


def _weights_file(folder: Path) -> Path:
    for name in WEIGHT_FILES:
        if (folder / name).exists():
            return folder / name
    raise HeadsError(f"{folder} holds no weights of Medusa heads: none of {', '.join(WEIGHT_FILES)} is there")


def _by_plain_name(weights: dict[str, torch.Tensor], path: Path) -> dict[str, torch.Tensor]:
    """With the prefix taken off."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        match = _NAME.fullmatch(name)
        if match is None:
            raise HeadsError(f"{path} is not a file of Medusa heads alone: it holds {name[:80]!r}")
        if match[1] in found:
            raise HeadsError(f"{path} holds {match[1]} twice")
        found[match[1]] = tensor
    if not found:
        raise HeadsError(f"{path} holds no heads")
    return found


def _plain_name(name: str, num_layers: int) -> str:
    """The format's name of a parameter of ``MedusaHeads``."""
    room, rest = name.split(".", 1)
    return rest.replace(".", f".{num_layers}.", 1) if room == OWN_LM_HEADS else rest


def _rows(found: dict[str, torch.Tensor], name: str, path: Path) -> int:
    """How many rows a matrix has."""
    if name not in found:
        raise HeadsError(f"{path}: {name} is absent")
    tensor = found[name]
    if tensor.dim() != 2 or not 1 <= len(tensor) <= _LARGEST:
        raise HeadsError(f"{path}: {name} is not a matrix")
    return len(tensor)


def _require_said(config: HeadsConfig, hidden: int, vocab: int | None, path: Path) -> None:
    """Sizes that the configuration names, most do not, must be those of the weights."""
    if config.hidden_size not in (0, hidden):
        raise HeadsError(f"{path} is {hidden} wide, but its config.json names a hidden_size of {config.hidden_size}")
    if vocab is not None and config.vocab_size not in (0, vocab):
        raise HeadsError(f"{path} has {vocab} tokens, but its config.json names a vocab_size of {config.vocab_size}")
