"""A transformers model's weights as the compiled step reads them: packed once, int8 or float32.

int8: each output has one scale; inputs and weights are first multiplied, 64 at a time, by a Hadamard matrix, which
changes no product but spreads outliers over the block (QuaRot, arXiv 2404.00456), so that one scale a row is enough.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from engine.compiled.library import TILE, Layer, Library, Matrix

_ROTATION = 64
# Exactly these classes: one that inherits from them may compute something else.
LLAMA_FAMILY = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_PAGES = 2 << 20  # of an arena, so that the kernel can use large ones


@dataclass(frozen=True, slots=True)
class Dimensions:
    """Sizes of a Llama-family model. windows: of each layer, 0 for none."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    windows: tuple[int, ...]
    eps: float
    attention_scale: float

    @property
    def num_layers(self) -> int:
        return len(self.windows)


@dataclass(slots=True)
class PackedWeights:
    """What an engine's ``Model`` points to. embedding: [vocab, hidden]. layers: without their KV cache. cosine, sine:
    [positions, head_dim / 2]. owned: keeps the memory behind all addresses alive."""

    dimensions: Dimensions
    embedding: torch.Tensor
    layers: list[Layer]
    lm_head: Matrix
    final_norm: int
    cosine: int
    sine: int
    positions: int
    owned: list[Any] = field(default_factory=list)


def why_unsupported(model: PreTrainedModel, block_size: int) -> str | None:
    """Why ``model`` cannot be computed by the compiled step; None if it can."""
    name, config = type(model).__name__, model.config
    if name not in LLAMA_FAMILY:
        return f"it is not made for {name}"
    if model.dtype != torch.float32 or model.device.type != "cpu":
        return f"it computes float32 models on the CPU, not {str(model.dtype).removeprefix('torch.')} on {model.device}"
    if config.hidden_act != "silu":
        return f"the model's activation is {config.hidden_act}, not silu"
    found = dimensions(model)
    sizes = (found.hidden, found.intermediate, found.head_dim, found.heads * found.head_dim, block_size)
    if any(size % TILE for size in sizes):
        return f"a width of the model or the block size is not a multiple of {TILE}"
    any_model: Any = model
    if 2 * len(any_model.model.rotary_emb.inv_freq) != found.head_dim:
        return "only a part of each head is rotated"
    return None


def dimensions(model: PreTrainedModel) -> Dimensions:
    config: Any = model.config
    any_model: Any = model
    attention = [layer.self_attn for layer in any_model.model.layers]
    return Dimensions(
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=attention[0].head_dim,
        windows=tuple(_window(config, module) for module in attention),
        eps=config.rms_norm_eps,
        attention_scale=attention[0].scaling,
    )


def _window(config: Any, attention: Any) -> int:
    """Qwen decides layer by layer, Mistral for all; Llama's configuration has no window."""
    window = getattr(attention, "sliding_window", getattr(config, "sliding_window", None))
    return int(window or 0)


def pack_weights(model: PreTrainedModel, library: Library, *, is_int8: bool, positions: int) -> PackedWeights:
    """Packs a supported model and drops its own copies of what was packed: afterwards it cannot run any more.

    positions: how many the RoPE table covers. Raises MemoryError.
    """
    packer = Packer(library, is_int8)
    any_model: Any = model
    decoder = any_model.model
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        head = pool.submit(packer.pack, any_model.lm_head)  # the largest first
        layers = list(pool.map(lambda layer: _pack_layer(packer, layer), decoder.layers))
        lm_head = head.result()
    with torch.inference_mode():
        found = dimensions(model)
        for layer, window in zip(layers, found.windows, strict=True):
            layer.window = window
        embedding = decoder.embed_tokens.weight
        cosine, sine = _rope_table(decoder, positions, found.head_dim)
        packed = PackedWeights(
            dimensions=found,
            # A copy, as of all that is left: the checkpoint's file mapping goes away, so a file replaced on disk
            # changes nothing.
            embedding=embedding.detach().clone(),
            layers=layers,
            lm_head=lm_head,
            final_norm=packer.keep(decoder.norm.weight),
            cosine=packer.keep(cosine),
            sine=packer.keep(sine),
            positions=positions,
            owned=packer.owned,
        )
        embedding.data = packed.embedding
        for parameter in model.parameters():
            if parameter is not embedding and not parameter.is_meta:
                parameter.data = parameter.data.clone()
    return packed


class Packer:
    """Packs linear layers. owned: what keeps the memory behind all addresses alive."""

    def __init__(self, library: Library, is_int8: bool) -> None:
        self._library = library
        self._is_int8 = is_int8
        self.owned: list[Any] = []

    def keep(self, tensor: torch.Tensor) -> int:
        """The address of a float32 copy that lives as long as the packed weights."""
        copy = tensor.detach().float().clone().contiguous()
        self.owned.append(copy)
        return copy.data_ptr()

    def pack(self, *linears: nn.Linear) -> Matrix:
        """The weights of ``linears`` above one another, as one matrix; the layers are left without them."""
        source = torch.cat([linear.weight.detach().float() for linear in linears]).contiguous()
        n, k = source.shape
        arena = mmap.mmap(-1, -(-self._library.packed_bytes(n, k, self._is_int8) // _PAGES) * _PAGES)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            arena.madvise(mmap.MADV_HUGEPAGE)
        data = np.frombuffer(arena, dtype=np.uint8)
        scales = np.zeros(-(-n // TILE) * TILE, dtype=np.float32)
        self.owned += [data, scales]
        matrix = Matrix(data.ctypes.data, scales.ctypes.data, self._bias(linears), n, k, 0, self._is_int8)
        if self._is_int8:
            matrix.rotation = next(size for size in (_ROTATION, 32, 16) if k % size == 0)
        self._library.pack(source.data_ptr(), matrix)
        for linear in linears:
            linear.weight = nn.Parameter(torch.empty_like(linear.weight, device="meta"), requires_grad=False)
        return matrix

    def _bias(self, linears: tuple[nn.Linear, ...]) -> int | None:
        if all(linear.bias is None for linear in linears):
            return None
        return self.keep(
            torch.cat([torch.zeros(linear.out_features) if linear.bias is None else linear.bias for linear in linears])
        )


def _pack_layer(packer: Packer, layer: Any) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    norms = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
    q_norm, k_norm = (None if norm is None else packer.keep(norm.weight) for norm in norms)
    return Layer(
        qkv=packer.pack(attention.q_proj, attention.k_proj, attention.v_proj),
        output=packer.pack(attention.o_proj),
        gate_up=packer.pack(mlp.gate_proj, mlp.up_proj),
        down=packer.pack(mlp.down_proj),
        input_norm=packer.keep(layer.input_layernorm.weight),
        post_norm=packer.keep(layer.post_attention_layernorm.weight),
        q_norm=q_norm,
        k_norm=k_norm,
    )


def _rope_table(decoder: Any, positions: int, head_dim: int) -> Iterator[torch.Tensor]:
    """Cosines and sines as the architecture itself computes them, the half that is not a repetition."""
    ids = torch.arange(positions)[None]
    for table in decoder.rotary_emb(torch.zeros(1), ids):
        yield table[0, :, : head_dim // 2].float()
