"""EAGLE-3 modules (arXiv 2503.01840) from public folders: those of its authors, SpecForge and ``speculators``.

As in the reference (``eagle/model/cnets.py``) and vLLM (``llama_eagle3.py``): three states of the base model are fused
by ``fc`` at depth 0 alone; the one layer's queries, keys and values read [norm of the embedding, norm of the state],
the state alone is its residual; what it hands on is its output *before* the last norm. ``d2t`` holds offsets: draft
token i is the model's token i + d2t[i].
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, PreTrainedConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from engine.loading.checks import first_line
from engine.loading.draft_layer import ATTENTION_NAME, DraftAttention, InputEmbedding, draft_dtype
from engine.loading.model import LoadedModel
from engine.loading.weights import INDEX, SINGLE, read_tensors, weight_files
from heads.checkpoint import LoadedHeads
from heads.config import CONFIG_FILE, HeadsConfig
from heads.eagle import METHOD, EagleConfig
from heads.errors import HeadsError
from heads.lm_head import DraftLmHead
from heads.recursive import Attend
from heads.weights import read_weights, require_fitting

_PICKLE = "pytorch_model.bin"
_BLOCK = "layers.0."
_QUERY_NORM = f"{_BLOCK}self_attn.q_norm.weight"
_UNUSED = ("rotary_emb.inv_freq", "t2d", "verifier_norm.weight", "verifier_lm_head.weight")
_DYNAMIC_ROPE = ("dynamic", "longrope")
Tensors = dict[str, torch.Tensor]


@dataclasses.dataclass(frozen=True, slots=True)
class _Sizes:
    """layers: of the base model, whose outputs are fused. biased: names of the projections that have a bias."""

    target_hidden: int
    layers: tuple[int, ...]
    norm_before_residual: bool
    norm_before_fc: bool
    has_query_norm: bool
    biased: frozenset[str]


class _Layer(nn.Module):
    """Llama's decoder layer, or Qwen3's, whose attention reads two states side by side."""

    def __init__(self, config: Any, sizes: _Sizes) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        attention: Any = (Qwen3Attention if sizes.has_query_norm else LlamaAttention)(config, 0)
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            width = getattr(attention, name).in_features if name == "o_proj" else 2 * hidden
            has_bias = f"self_attn.{name}" in sizes.biased
            setattr(attention, name, nn.Linear(width, getattr(attention, name).out_features, bias=has_bias))
        self.self_attn = attention
        self.mlp = LlamaMLP(config)  # type: ignore[no-untyped-call]
        self.hidden_norm = LlamaRMSNorm(hidden, eps=eps)
        self.input_layernorm = LlamaRMSNorm(hidden, eps=eps)
        self.post_attention_layernorm = LlamaRMSNorm(hidden, eps=eps)


class EagleModule(nn.Module):
    """See the module's docstring (``heads.recursive.OwnKvModule``). Its parameters have the format's own names."""

    method = METHOD
    is_recursive = True

    def __init__(self, config: Any, sizes: _Sizes, depths: int) -> None:
        """config: of the decoder layer. To be filled."""
        super().__init__()
        self.num_heads = depths
        self.hidden_size: int = config.hidden_size
        self.hidden_layers = sizes.layers
        width = len(sizes.layers) * sizes.target_hidden
        self.input_norm = LlamaRMSNorm(width, eps=config.rms_norm_eps) if sizes.norm_before_fc else nn.Identity()
        self.fc = nn.Linear(width, self.hidden_size, bias=False)
        self.layers = nn.ModuleList([_Layer(config, sizes)])
        self.norm = LlamaRMSNorm(self.hidden_size, eps=config.rms_norm_eps)
        self._norm_before_residual = sizes.norm_before_residual
        with torch.device("cpu"):  # its tables are computed, not read
            self.rotary = LlamaRotaryEmbedding(config)

    def attach(self, embedding: InputEmbedding) -> None:
        """Gives the embedding of input tokens, and learns the shape of the attention; once the weights are there."""
        self._embedding = embedding
        self._attention = DraftAttention(self._layer.self_attn, self.rotary)
        self.kv_heads, self.key_dim, self.value_dim, self.scale = self._attention.shape(2 * self.hidden_size)

    def condition(self, final: torch.Tensor, layers: Mapping[int, torch.Tensor]) -> torch.Tensor:
        states = torch.cat([layers[layer] for layer in self.hidden_layers], dim=-1)
        fused: torch.Tensor = self.fc(self.input_norm(states.to(self.norm.weight.dtype))).float()
        return fused

    def entries(
        self, states: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._attention.entries(self._join(states, tokens)[0], positions)

    def step(
        self, states: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> tuple[torch.Tensor, torch.Tensor]:
        joined, residual = self._join(states, tokens)
        x = residual + self._attention.mix(joined, positions, attend)
        x = x + self._layer.mlp(self._layer.post_attention_layernorm(x))
        return x.float(), self.norm(x).float()

    def logits(self, lm_head: DraftLmHead, outputs: torch.Tensor, depth: int) -> torch.Tensor:
        logits: torch.Tensor = lm_head(outputs)
        return logits

    @property
    def _layer(self) -> Any:
        return self.layers[0]

    def _join(self, states: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(what attention reads [rows, 2 * hidden], the residual [rows, hidden])."""
        dtype = self.norm.weight.dtype
        embedded = self._embedding(tokens).to(dtype)
        states = states.to(dtype)
        normed = self._layer.hidden_norm(states)
        joined = torch.cat([self._layer.input_layernorm(embedded), normed], dim=-1)
        return joined, normed if self._norm_before_residual else states


@torch.no_grad()
def read_eagle(folder: Path, config: HeadsConfig, loaded: LoadedModel) -> LoadedHeads:
    """The module in ``folder``, in the model's dtype and on its device. config: ``HeadsConfig.read(folder)``.

    Raises HeadsError for a folder that does not hold a module we can run, ModelLoadError for damaged files."""
    assert config.eagle is not None
    source, tensors = _read(folder)
    layer = _layer_config(config.eagle, tensors, folder)
    embedding, lm_head = tensors.pop("embed_tokens.weight", None), tensors.pop("lm_head.weight", None)
    token_ids, lm_head = _drafted(tensors.pop("d2t", None), lm_head, layer.vocab_size, source)
    module = _filled(config, layer, tensors, source, loaded)
    _require_matrices(embedding, lm_head, layer, source, loaded)
    module.attach(InputEmbedding(loaded.model, embedding))
    width = config.eagle.target_hidden or module.hidden_size
    sized = dataclasses.replace(config, hidden_size=width, vocab_size=layer.vocab_size)
    return LoadedHeads(folder, sized, module.eval().requires_grad_(False), token_ids, lm_head)


def _read(folder: Path) -> tuple[Path, Tensors]:
    """(the file of weights, its tensors by the names that the format has today)."""
    for name in (SINGLE, INDEX, _PICKLE):
        if (folder / name).is_file():
            source = folder / name
            break
    else:
        names = f"{SINGLE}, {INDEX}, {_PICKLE}"
        raise HeadsError(f"{folder} holds no weights of an EAGLE-3 module: none of {names} is there")
    stored = read_weights(source) if source.name == _PICKLE else read_tensors(weight_files(folder), lambda _: True)
    tensors: Tensors = {}
    for name, tensor in stored.items():
        plain = name.removeprefix("model.")
        plain = _BLOCK + plain.removeprefix("midlayer.") if plain.startswith("midlayer.") else plain
        if plain in tensors:
            raise HeadsError(f"{source} holds {plain} twice")
        if not plain.endswith(_UNUSED):
            tensors[plain] = tensor
    if f"{_BLOCK}hidden_norm.weight" not in tensors:
        raise HeadsError(
            f"{source} is not an EAGLE-3 module's: {_BLOCK}hidden_norm.weight is absent "
            f"(modules of EAGLE and EAGLE-2 cannot be served)"
        )
    if any(name.startswith("layers.1.") for name in tensors):
        raise HeadsError(f"{source} holds an EAGLE-3 module of several layers; those of one can be served")
    small = sorted({str(t.dtype) for t in tensors.values() if t.is_floating_point() and t.itemsize < 2})
    if small:
        raise HeadsError(f"{source} stores weights as {', '.join(small)}; quantized modules cannot be served")
    return source, tensors


def _layer_config(eagle: EagleConfig, tensors: Tensors, folder: Path) -> Any:
    """Of Llama's layer, or of Qwen3's where queries and keys have norms."""
    kind: type[PreTrainedConfig] = Qwen3Config if _QUERY_NORM in tensors else LlamaConfig
    said = {**eagle.layer, "num_hidden_layers": 1, "layer_types": ["full_attention"]}
    said = {name: value for name, value in said.items() if name not in ("model_type", "architectures", "auto_map")}
    try:
        config: Any = kind.from_dict(said)
        config.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        rope = str(config.rope_parameters["rope_type"])
    except Exception as error:  # configurations validate themselves with errors of many types
        raise HeadsError(f"{folder / CONFIG_FILE} does not describe a decoder layer: {first_line(error)}") from error
    if rope in _DYNAMIC_ROPE:
        raise HeadsError(f"{folder / CONFIG_FILE} names {rope} RoPE, which depends on the longest request of a batch")
    config.mlp_bias = f"{_BLOCK}mlp.gate_proj.bias" in tensors
    config._attn_implementation = ATTENTION_NAME
    return config


def _drafted(
    offsets: torch.Tensor | None, lm_head: torch.Tensor | None, vocab: int, source: Path
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """(the model's id of each draft token, ascending, or None for all of them; the rows of lm_head in that order)."""
    if offsets is None:
        if lm_head is not None and len(lm_head) != vocab:
            raise HeadsError(f"{source} has an lm_head of {len(lm_head)} of {vocab} tokens and no d2t that tells which")
        return None, lm_head
    if offsets.dim() != 1 or offsets.is_floating_point() or offsets.is_complex():
        raise HeadsError(f"{source}: d2t is not a list of offsets")
    if lm_head is not None and len(lm_head) != len(offsets):
        raise HeadsError(f"{source}: d2t names {len(offsets)} tokens, lm_head has {len(lm_head)}")
    ids, order = torch.sort(torch.arange(len(offsets)) + offsets.long())
    if not len(ids) or bool((ids.diff() == 0).any()) or int(ids[0]) < 0 or int(ids[-1]) >= vocab:
        raise HeadsError(f"{source}: d2t must lead to distinct tokens below {vocab}; it holds offsets, not ids")
    return ids, None if lm_head is None else lm_head[order]


def _require_matrices(
    embedding: torch.Tensor | None, lm_head: torch.Tensor | None, layer: Any, source: Path, loaded: LoadedModel
) -> None:
    """Raises HeadsError unless embedding and lm_head are there, the module's own or the model's, of the right width."""
    model: Any = loaded.model
    own = {"embed_tokens.weight": embedding, "lm_head.weight": lm_head}
    shared = (model.get_input_embeddings().weight, model.get_output_embeddings().weight)
    hidden = layer.hidden_size
    for (name, tensor), models in zip(own.items(), shared, strict=True):
        if tensor is None and models.shape[1] != hidden:
            raise HeadsError(f"{source} is {hidden} wide, the model {models.shape[1]}, and it has no {name}")
    found = {name: tensor for name, tensor in own.items() if tensor is not None}
    rows = {"embed_tokens.weight": layer.vocab_size, "lm_head.weight": 0 if lm_head is None else len(lm_head)}
    require_fitting(found, {name: torch.empty(rows[name], hidden, device="meta") for name in found}, source)


def _filled(config: HeadsConfig, layer: Any, found: Tensors, source: Path, loaded: LoadedModel) -> EagleModule:
    """The module with its weights, on the model's device."""
    assert config.eagle is not None
    eagle, model = config.eagle, loaded.model
    num_layers = model.config.get_text_config().num_hidden_layers
    layers = eagle.fused(num_layers)
    if len(set(layers)) != len(layers) or not all(0 <= number < num_layers for number in layers):
        raise HeadsError(
            f"{source} reads the outputs of layers {list(layers)} (from 0); {loaded.name} has {num_layers} layers"
        )
    sizes = _Sizes(
        eagle.target_hidden or layer.hidden_size,
        layers,
        eagle.norm_before_residual,
        eagle.norm_before_fc,
        _QUERY_NORM in found,
        frozenset(name.removeprefix(_BLOCK).removesuffix(".bias") for name in found if name.endswith(".bias")),
    )
    with torch.device("meta"):
        module = EagleModule(layer, sizes, config.num_heads)
    require_fitting(found, module.state_dict(), source)
    dtype = draft_dtype(model)
    weights = {name: tensor.to(model.device, dtype, copy=True) for name, tensor in found.items()}
    module.load_state_dict(weights, assign=True)
    return module.to(model.device)
