"""Tiny random models with a multi-token-prediction module in their checkpoint, in each public layout of keys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny_engine import EOS, VOCAB
from transformers import AutoModelForCausalLM, DeepseekV3Config, Glm4MoeConfig, PreTrainedModel, Qwen2Config
from transformers.models.qwen3_next import Qwen3NextConfig

HIDDEN, LAYERS, EXPERTS, WIDTH = 16, 2, 4, 12
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8
Tensors = dict[str, torch.Tensor]

_SIZES: dict[str, Any] = dict(  # noqa: C408
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    intermediate_size=24,
    num_hidden_layers=LAYERS,
    num_attention_heads=HEADS,
    num_key_value_heads=KV_HEADS,
    max_position_embeddings=128,
    bos_token_id=0,
    eos_token_id=EOS,
    pad_token_id=0,
    tie_word_embeddings=False,
)
_MIXTURE: dict[str, Any] = dict(  # noqa: C408
    moe_intermediate_size=WIDTH,
    n_routed_experts=EXPERTS,
    num_experts_per_tok=2,
    n_shared_experts=1,
    n_group=2,
    topk_group=1,
    routed_scaling_factor=1.5,
    first_k_dense_replace=1,
)


def tiny_config(kind: str, **changes: Any) -> Any:
    """kind: "deepseek", "glm", "mimo" (whose model is Qwen2's) or "qwen" (Qwen3-Next)."""
    if kind == "deepseek":
        latent = {"q_lora_rank": 10, "kv_lora_rank": 6, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}
        return DeepseekV3Config(**{**_SIZES, **_MIXTURE, **latent, "num_key_value_heads": HEADS, **changes})
    if kind == "glm":
        own = {"head_dim": HEAD_DIM, "use_qk_norm": True, "attention_bias": True}
        return Glm4MoeConfig(**{**_SIZES, **_MIXTURE, **own, **changes})
    if kind == "mimo":
        return Qwen2Config(**{**_SIZES, **changes})
    own = {"head_dim": HEAD_DIM, "moe_intermediate_size": WIDTH, "shared_expert_intermediate_size": WIDTH}
    own |= {"num_experts": EXPERTS, "num_experts_per_tok": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 2}
    own |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
    layers = ["linear_attention", "full_attention"]
    return Qwen3NextConfig(**{**_SIZES, **own, "layer_types": layers, **changes})


def tiny_base(kind: str, seed: int = 5, **changes: Any) -> PreTrainedModel:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(kind, **changes)).float().eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.mul_(3.0)
    model.get_output_embeddings().weight.mul_(10.0)
    return model


def _shapes(kind: str) -> dict[str, tuple[int, ...]]:
    """Of the module's tensors, by the names that its layout gives them."""
    if kind == "mimo":
        prefix = block = "model.mtp_layers.0."
        own = {"token_layernorm": (HIDDEN,), "hidden_layernorm": (HIDDEN,), "final_layernorm": (HIDDEN,)}
        own["input_proj"] = (HIDDEN, 2 * HIDDEN)
    elif kind == "qwen":
        prefix, block = "mtp.", "mtp.layers.0."
        own = {"pre_fc_norm_embedding": (HIDDEN,), "pre_fc_norm_hidden": (HIDDEN,), "norm": (HIDDEN,)}
        own["fc"] = (HIDDEN, 2 * HIDDEN)
    else:
        prefix = block = f"model.layers.{LAYERS}."
        own = {"enorm": (HIDDEN,), "hnorm": (HIDDEN,), "shared_head.norm": (HIDDEN,), "eh_proj": (HIDDEN, 2 * HIDDEN)}
    layer: dict[str, tuple[int, ...]] = {
        f"{norm}.weight": (HIDDEN,) for norm in ("input_layernorm", "post_attention_layernorm")
    }
    layer |= _latent() if kind == "deepseek" else _attention(kind)
    layer |= _gated("mlp", 24) if kind == "mimo" else _mixture(kind)
    return {f"{prefix}{name}.weight": shape for name, shape in own.items()} | {
        f"{block}{name}": shape for name, shape in layer.items()
    }


def _latent() -> dict[str, tuple[int, ...]]:
    return {
        "self_attn.q_a_proj.weight": (10, HIDDEN),
        "self_attn.q_a_layernorm.weight": (10,),
        "self_attn.q_b_proj.weight": (HEADS * 10, 10),
        "self_attn.kv_a_proj_with_mqa.weight": (6 + 4, HIDDEN),
        "self_attn.kv_a_layernorm.weight": (6,),
        "self_attn.kv_b_proj.weight": (HEADS * (6 + 5), 6),
        "self_attn.o_proj.weight": (HIDDEN, HEADS * 5),
    }


def _attention(kind: str) -> dict[str, tuple[int, ...]]:
    dim = HIDDEN // HEADS if kind == "mimo" else HEAD_DIM
    queries = HEADS * dim * (2 if kind == "qwen" else 1)
    found: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (queries, HIDDEN),
        "self_attn.k_proj.weight": (KV_HEADS * dim, HIDDEN),
        "self_attn.v_proj.weight": (KV_HEADS * dim, HIDDEN),
        "self_attn.o_proj.weight": (HIDDEN, HEADS * dim),
    }
    if kind != "qwen":
        found |= {f"self_attn.{part}_proj.bias": found[f"self_attn.{part}_proj.weight"][:1] for part in "qkv"}
    if kind != "mimo":
        found |= {"self_attn.q_norm.weight": (dim,), "self_attn.k_norm.weight": (dim,)}
    return found


def _gated(name: str, width: int) -> dict[str, tuple[int, ...]]:
    shapes = {"gate": (width, HIDDEN), "up": (width, HIDDEN), "down": (HIDDEN, width)}
    return {f"{name}.{part}_proj.weight": shape for part, shape in shapes.items()}


def _mixture(kind: str) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {"mlp.gate.weight": (EXPERTS, HIDDEN)}
    for expert in range(EXPERTS):
        found |= _gated(f"mlp.experts.{expert}", WIDTH)
    if kind == "qwen":
        return found | _gated("mlp.shared_expert", WIDTH) | {"mlp.shared_expert_gate.weight": (1, HIDDEN)}
    return found | _gated("mlp.shared_experts", WIDTH) | {"mlp.gate.e_score_correction_bias": (EXPERTS,)}


def mtp_tensors(kind: str, seed: int = 3) -> Tensors:
    """Whose every number matters. Qwen3-Next's norms scale by one plus their weight."""
    draw = torch.Generator().manual_seed(seed)
    made = {}
    for name, shape in _shapes(kind).items():
        if len(shape) > 1:
            made[name] = torch.randn(shape, generator=draw) * 1.5 * shape[1] ** -0.5
        elif name.endswith("bias"):
            made[name] = 0.3 * torch.randn(shape, generator=draw)
        else:
            made[name] = torch.rand(shape, generator=draw) * 0.8 + (-0.4 if kind == "qwen" and "norm" in name else 0.6)
    return made


def write(folder: Path, tensors: Tensors, shards: int = 1) -> Path:
    """As a safetensors checkpoint, its tensors dealt out to ``shards`` files."""
    folder.mkdir(exist_ok=True)
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return folder
    (folder / "model.safetensors").unlink(missing_ok=True)
    files = [f"model-{index + 1:05}-of-{shards:05}.safetensors" for index in range(shards)]
    placed = {name: files[index % shards] for index, name in enumerate(sorted(tensors))}
    for file in files:
        save_file({name: tensors[name] for name, its in placed.items() if its == file}, folder / file, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    return folder


def write_model(folder: Path, kind: str, shards: int = 1, **changes: Any) -> Path:
    """A whole checkpoint: the tiny model, its configuration and its module."""
    tiny_base(kind, **changes).save_pretrained(folder)
    return write(folder, {**load_file(folder / "model.safetensors"), **mtp_tensors(kind)}, shards)
