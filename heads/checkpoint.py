"""Heads on disk: ``config.json``, ``heads.safetensors``, the draft vocabulary, ``run.yaml``.

Public checkpoints are read too (``heads.formats``), and written in our own format when they are trained further.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save
from torch import nn

from heads.config import CONFIG_FILE, PUBLIC_EAGLE, PUBLIC_MEDUSA, HeadsConfig
from heads.errors import HeadsError
from heads.files import replace_file
from heads.formats import read_medusa
from heads.markov import MarkovHeads, MarkovSizes
from heads.medusa import OWN_LM_HEADS, MedusaHeads
from heads.mtp import MtpModule
from heads.recursive import OwnKvModule
from heads.streaming import StreamingHeads
from heads.weights import read_weights, require_fitting

WEIGHTS_FILE = "heads.safetensors"
DRAFT_VOCAB_FILE = "draft_vocab.json"
RUN_FILE = "run.yaml"
PRETRAINED = Path(__file__).parent / "pretrained"

Heads = MedusaHeads | MarkovHeads | MtpModule | StreamingHeads


@dataclass(frozen=True, slots=True)
class LoadedHeads:
    """Heads in float32, ready to run once those that need some of the base model are given it. token_ids: the draft
    vocabulary, ascending, or None for the whole one. lm_head:
    [draft vocabulary, hidden], the output matrix of a module that does not share the model's."""

    folder: Path
    config: HeadsConfig
    heads: Heads | OwnKvModule
    token_ids: torch.Tensor | None
    lm_head: torch.Tensor | None = None


def save_heads(folder: Path, heads: nn.Module, config: HeadsConfig, token_ids: torch.Tensor | None, run: str) -> None:
    """Writes a folder of heads; config.json comes last, so a folder that has it is whole. run: text of run.yaml."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        name: tensor.detach().to("cpu", torch.float16).contiguous() for name, tensor in heads.state_dict().items()
    }
    replace_file(folder / WEIGHTS_FILE, save(weights, {"format": "pt"}))
    if token_ids is not None:
        replace_file(folder / DRAFT_VOCAB_FILE, json.dumps(token_ids.tolist()) + "\n")
    replace_file(folder / RUN_FILE, run)
    replace_file(folder / CONFIG_FILE, config.to_json())


def load_heads(folder: Path) -> LoadedHeads:
    """Raises HeadsError for a folder that does not hold heads we can run, in one sentence."""
    config = HeadsConfig.read(folder)
    if config.format == PUBLIC_MEDUSA:
        config, medusa = read_medusa(folder, config)
        return LoadedHeads(folder, config, medusa.eval().requires_grad_(False), None)
    if config.format == PUBLIC_EAGLE:  # ``engine.loading.eagle`` reads it: its layer is one of transformers'
        raise HeadsError(f"{folder} holds an EAGLE-3 module, which can be served but not trained further")
    weights = read_weights(folder / WEIGHTS_FILE)
    token_ids = read_draft_vocab(folder, config)
    has_lm_heads = any(name.startswith(f"{OWN_LM_HEADS}.") for name in weights)
    with torch.device("meta"):  # sizes alone: a config.json that lies about them must not take memory for them
        if config.method == MarkovHeads.method:
            heads: Heads = _empty_markov(config, folder, config.vocab_size if token_ids is None else len(token_ids))
        elif config.method == StreamingHeads.method:
            heads = _empty_streams(config, folder)
        else:
            heads = _empty(config, folder, has_lm_heads)
    require_fitting(weights, heads.state_dict(), folder / WEIGHTS_FILE)
    heads.load_state_dict({name: tensor.float() for name, tensor in weights.items()}, assign=True)
    return LoadedHeads(folder, config, heads.eval().requires_grad_(False), token_ids)


def _empty(config: HeadsConfig, folder: Path, has_lm_heads: bool) -> MedusaHeads | MtpModule:
    if config.method == MedusaHeads.method:
        own_vocab = config.vocab_size if has_lm_heads else None
        return MedusaHeads(config.hidden_size, config.num_heads, config.num_layers, own_vocab=own_vocab)
    if config.method != MtpModule.method:
        raise HeadsError(
            f"{folder} holds heads of the method {config.method!r}; known are medusa, markov, mtp and streaming"
        )
    if config.mtp is None:
        raise HeadsError(f"{folder}: {CONFIG_FILE} of an mtp module needs its sizes under mtp")
    return MtpModule(config.hidden_size, config.mtp, config.num_heads)


def _empty_markov(config: HeadsConfig, folder: Path, draft_vocab: int) -> MarkovHeads:
    if config.rank is None:
        raise HeadsError(f"{folder}: {CONFIG_FILE} of markov heads needs the rank of their bias")
    medusa = MedusaHeads(config.hidden_size, config.num_heads, config.num_layers)
    return MarkovHeads(medusa, MarkovSizes(config.rank, config.vocab_size, draft_vocab))


def _empty_streams(config: HeadsConfig, folder: Path) -> StreamingHeads:
    if config.streaming is None or config.rank is None:
        raise HeadsError(f"{folder}: {CONFIG_FILE} of streams needs their sizes under streaming, and rank")
    return StreamingHeads(config.hidden_size, config.num_heads, config.streaming, config.rank)


def read_draft_vocab(folder: Path, config: HeadsConfig) -> torch.Tensor | None:
    """The ids of a folder's draft vocabulary, ascending; None for the whole vocabulary. Raises HeadsError."""
    if config.draft_vocab is None:
        return None
    path = folder / config.draft_vocab
    try:
        ids = json.loads(path.read_text(encoding="utf-8"))
        if not (isinstance(ids, list) and ids and all(type(i) is int and 0 <= i < config.vocab_size for i in ids)):
            raise ValueError(f"it must be a list of token ids below {config.vocab_size}")
        if sorted(set(ids)) != ids:
            raise ValueError("its ids must be ascending and distinct")
    except (OSError, ValueError, RecursionError) as error:
        raise HeadsError(f"{path} is not a draft vocabulary: {error}") from error
    return torch.tensor(ids)
