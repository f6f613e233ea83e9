"""Multi-token-prediction modules that come inside the checkpoint of the model they draft for.

transformers drops their weights, so they are read from the files themselves; the decoder layer is the served model's
own class. What the layouts mean, and where that is known from: ``engine.loading.mtp_layouts``.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from engine.errors import ModelLoadError
from engine.loading.draft_layer import ATTENTION_NAME, DraftAttention, InputEmbedding, draft_dtype
from engine.loading.model import LoadedModel
from engine.loading.mtp_layouts import MtpLayout, find_layout
from engine.loading.weights import INDEX, SINGLE, read_headers, read_tensors, weight_files
from heads.checkpoint import LoadedHeads
from heads.config import CHECKPOINT_MTP, BaseModel, HeadsConfig
from heads.errors import HeadsError
from heads.lm_head import DraftLmHead
from heads.recursive import Attend
from heads.weights import require_fitting

log = logging.getLogger("headlong.engine")

DEPTHS = 7  # a module is used for at most; the drafter stops where a depth does not pay
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
_COMPUTED = "rotary_emb.inv_freq"  # older checkpoints stored what is computed now


class CheckpointMtp(nn.Module):
    """One decoder layer of the model's own kind between a projection and a norm (``heads.recursive.OwnKvModule``).

    What it hands on is what lm_head reads: the state after its own last norm, as the first state is after the model's.
    """

    method = "mtp"
    is_recursive = True

    def __init__(self, model: PreTrainedModel, layout: MtpLayout, *, is_mixture: bool) -> None:
        """Of the size of ``model``'s own layers, to be filled. is_mixture: its layer has experts."""
        super().__init__()
        any_model: Any = model
        decoder = any_model.get_decoder()
        config = _layer_config(model, is_mixture=is_mixture)
        norm = type(decoder.layers[-1].input_layernorm)
        hidden = config.hidden_size
        self.num_heads = DEPTHS
        self.hidden_size: int = hidden
        self.hidden_layers: tuple[int, ...] = ()
        self.embedding_norm = norm(hidden, eps=config.rms_norm_eps)
        self.hidden_norm = norm(hidden, eps=config.rms_norm_eps)
        self.projection = nn.Linear(2 * hidden, hidden, bias=False)
        self.layer = type(decoder.layers[-1])(config, 0)
        self.norm = norm(hidden, eps=config.rms_norm_eps)
        with torch.device(model.device):  # its tables are computed, not read
            self.rotary = type(decoder.rotary_emb)(config)
        self._state_first = layout.state_first
        self._attention = DraftAttention(self.layer.self_attn, self.rotary)

    def attach(self, embedding: InputEmbedding) -> None:
        """Gives the embedding of input tokens, and learns the shape of the attention.

        Call it once the weights are there. Raises ModelLoadError for attention that cannot be served."""
        self._embedding = embedding
        self.kv_heads, self.key_dim, self.value_dim, self.scale = self._attention.shape(self.hidden_size)

    def condition(self, final: torch.Tensor, layers: Mapping[int, torch.Tensor]) -> torch.Tensor:
        return final

    def entries(
        self, states: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._attention.entries(self.layer.input_layernorm(self._join(states, tokens)), positions)

    def step(
        self, states: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x = self._join(states, tokens)
        outputs = self.norm(self.layer(x[None], **self._attention.inputs(x, positions, attend))[0]).float()
        return outputs, outputs

    def logits(self, lm_head: DraftLmHead, outputs: torch.Tensor, depth: int) -> torch.Tensor:
        logits: torch.Tensor = lm_head(outputs)
        return logits

    def _join(self, states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        dtype = self.embedding_norm.weight.dtype
        embedded = self.embedding_norm(self._embedding(tokens).to(dtype))
        states = self.hidden_norm(states.to(dtype))
        parts = (states, embedded) if self._state_first else (embedded, states)
        joined: torch.Tensor = self.projection(torch.cat(parts, dim=-1))
        return joined


def _layer_config(model: PreTrainedModel, *, is_mixture: bool) -> Any:
    """The model's configuration for one layer with full attention that asks callbacks."""
    config: Any = copy.deepcopy(model.config.get_text_config())
    config.num_hidden_layers = 1
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = ["full_attention"]
    # Which layers are mixtures is told by number, in two ways.
    if hasattr(config, "first_k_dense_replace"):
        config.first_k_dense_replace = 0 if is_mixture else 1
    if hasattr(config, "mlp_only_layers"):
        config.mlp_only_layers, config.decoder_sparse_step = [] if is_mixture else [0], 1
    config._attn_implementation = ATTENTION_NAME
    return config


def _layout(loaded: LoadedModel) -> MtpLayout | None:
    if not any((loaded.path / name).is_file() for name in (SINGLE, INDEX)):
        return None
    names = [header.name for header in read_headers(weight_files(loaded.path))]
    return find_layout(names, loaded.model.config.get_text_config().num_hidden_layers)


@torch.no_grad()
def read_checkpoint_mtp(loaded: LoadedModel) -> LoadedHeads | None:
    """The module inside the model's checkpoint, in the model's dtype and on its device; None where there is none.

    Call it before the linear layers are packed. Raises ModelLoadError for a module that lacks weights or has others.
    """
    layout = _layout(loaded)
    if layout is None:
        return None
    if layout.depths > 1:
        log.info("%s has %d MTP modules; the first of them drafts at every depth", loaded.name, layout.depths)
    tensors = read_tensors(weight_files(loaded.path), layout.is_first)
    any_model: Any = loaded.model
    embedding = _own(tensors, layout.embedding, any_model.get_input_embeddings())
    lm_head = _own(tensors, layout.lm_head, any_model.get_output_embeddings())
    try:
        module = _filled(loaded, layout, tensors)
    except HeadsError as error:
        raise ModelLoadError(str(error)) from error
    module.attach(InputEmbedding(loaded.model, embedding))
    config = HeadsConfig(
        method=module.method,
        num_heads=module.num_heads,
        hidden_size=module.hidden_size,
        vocab_size=0,
        base_model=BaseModel(loaded.name, loaded.digest),
        format=CHECKPOINT_MTP,
    )
    return LoadedHeads(loaded.path, config, module.eval().requires_grad_(False), None, lm_head)


def _own(tensors: dict[str, torch.Tensor], name: str | None, shared: Any) -> torch.Tensor | None:
    """Takes a matrix out of ``tensors``; None where there is none, or it is a copy of the model's."""
    found = None if name is None else tensors.pop(name, None)
    if found is None or torch.equal(found.to(shared.weight), shared.weight):
        return None
    return found


def _filled(loaded: LoadedModel, layout: MtpLayout, stored: Mapping[str, torch.Tensor]) -> CheckpointMtp:
    """The module with its weights. Raises HeadsError for weights that are absent, of another size or unknown."""
    model, source = loaded.model, loaded.path / (SINGLE if (loaded.path / SINGLE).is_file() else INDEX)
    found = _with_experts_merged({name: t for name, t in stored.items() if not name.endswith(_COMPUTED)}, source)
    with torch.device("meta"):
        module = CheckpointMtp(model, layout, is_mixture=any(".experts." in name for name in found))
    parameters = {layout.name_of(name): name for name in module.state_dict()}
    require_fitting(found, {name: module.state_dict()[its] for name, its in parameters.items()}, source)
    dtype = draft_dtype(model)
    exact = tuple(model._keep_in_fp32_modules_strict or ())
    weights = {
        parameters[name]: tensor.to(model.device, torch.float32 if name.endswith(exact) else dtype, copy=True)
        for name, tensor in found.items()
    }
    module.load_state_dict(weights, assign=True)
    return module


def _with_experts_merged(tensors: Mapping[str, torch.Tensor], source: Path) -> dict[str, torch.Tensor]:
    """With the matrices of single experts stacked, as transformers' modules hold them: gate_up_proj
    [experts, 2 * width, hidden] and down_proj [experts, hidden, width]."""
    merged = {name: tensor for name, tensor in tensors.items() if _EXPERT.fullmatch(name) is None}
    single: dict[str, dict[tuple[str, int], torch.Tensor]] = {}
    for name, tensor in tensors.items():
        match = _EXPERT.fullmatch(name)
        if match is not None:
            single.setdefault(match[1], {})[match[3], int(match[2])] = tensor
    for prefix, parts in single.items():
        count = 1 + max(number for _, number in parts)
        try:
            gates, ups, downs = ([parts[kind, number] for number in range(count)] for kind in ("gate", "up", "down"))
            merged[f"{prefix}.gate_up_proj"] = torch.cat([torch.stack(gates), torch.stack(ups)], dim=1)
            merged[f"{prefix}.down_proj"] = torch.stack(downs)
        except (KeyError, RuntimeError) as error:
            raise HeadsError(f"{source}: the experts of {prefix} are not whole, or not of one size") from error
    return merged
