"""Tiny random EAGLE-3 modules as their authors publish them, and as the library ``speculators`` does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tiny_engine import EOS, VOCAB
from tiny_mtp import write
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

HIDDEN, LAYERS, WIDTH = 16, 6, 24
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 6  # not HIDDEN / HEADS
DRAFT_IDS = [40, 3, 5, 60, 17, 2, 33, 9, 10, 11]  # the model's token of each draft token
Tensors = dict[str, torch.Tensor]

LAYER: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": WIDTH,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500.0,
    "vocab_size": VOCAB,
}


def tiny_target(**changes: Any) -> PreTrainedModel:
    """The base model."""
    sizes: dict[str, Any] = {name: value for name, value in LAYER.items() if name not in ("architectures", "head_dim")}
    sizes |= {"num_hidden_layers": LAYERS, "max_position_embeddings": 128, "tie_word_embeddings": False}
    torch.manual_seed(6)
    config = LlamaConfig(**{**sizes, "bos_token_id": 0, "eos_token_id": EOS, "pad_token_id": 0, **changes})
    model = AutoModelForCausalLM.from_config(config).float().eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.mul_(3.0)
    model.lm_head.weight.mul_(5.0)
    return model


def eagle_tensors(
    *, block: str = "midlayer.", draft_ids: list[int] | None = None, target: int = HIDDEN, query_norms: bool = False
) -> Tensors:
    """block: what its layer is called. draft_ids: None for the whole vocabulary. target: width of the base's states."""
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (HIDDEN, 3 * target),
        "norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCAB if draft_ids is None else len(draft_ids), HIDDEN),
        "self_attn.q_proj.weight": (HEADS * HEAD_DIM, 2 * HIDDEN),
        "self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, 2 * HIDDEN),
        "self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, 2 * HIDDEN),
        "self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
        "mlp.gate_proj.weight": (WIDTH, HIDDEN),
        "mlp.up_proj.weight": (WIDTH, HIDDEN),
        "mlp.down_proj.weight": (HIDDEN, WIDTH),
        "hidden_norm.weight": (HIDDEN,),
        "input_layernorm.weight": (HIDDEN,),
        "post_attention_layernorm.weight": (HIDDEN,),
    }
    if query_norms:
        shapes |= {"self_attn.q_norm.weight": (HEAD_DIM,), "self_attn.k_norm.weight": (HEAD_DIM,)}
    draw = torch.Generator().manual_seed(2)
    made = {}
    for name, shape in shapes.items():
        is_outer = name.split(".")[0] in ("fc", "norm", "lm_head")
        is_norm = len(shape) == 1
        numbers = torch.rand(shape, generator=draw) + 0.5 if is_norm else torch.randn(shape, generator=draw)
        made[name if is_outer else f"{block}{name}"] = numbers if is_norm else 2.0 * shape[-1] ** -0.5 * numbers
    if draft_ids is not None:
        made["d2t"] = torch.tensor(draft_ids) - torch.arange(len(draft_ids))
        made["t2d"] = torch.tensor([token in draft_ids for token in range(VOCAB)])
    return made


def authors_config(**changes: Any) -> dict[str, Any]:
    return {**LAYER, "draft_vocab_size": len(DRAFT_IDS), **changes}


def speculators_config(layer: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    plain = {name: value for name, value in LAYER.items() if name != "architectures"}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.3.0",
        "draft_vocab_size": len(DRAFT_IDS),
        "norm_before_residual": True,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": None,
        "transformer_layer_config": {**plain, **(layer or {})},
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": "org/tiny", "architectures": ["LlamaForCausalLM"]},
        },
        **changes,
    }


def write_eagle(folder: Path, tensors: Tensors, config: dict[str, Any], file: str = "model.safetensors") -> Path:
    """file: "pytorch_model.bin", "model.safetensors", or "shards" for several with an index."""
    folder.mkdir(exist_ok=True)
    if file == "shards":
        write(folder, tensors, 3)
    elif file.endswith(".bin"):
        torch.save(tensors, folder / file)
    else:
        save_file(tensors, folder / file)
    (folder / "config.json").write_text(json.dumps(config))
    return folder
