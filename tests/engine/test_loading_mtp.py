"""What an MTP module takes from its base model, also from one with tied embeddings, two tables of rotation and norms
that add one to their weight (Gemma 3)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, GPTNeoXConfig, LlamaConfig, PreTrainedModel

from engine.loading.mtp import attach_base, new_mtp, rotation
from heads.settings import TrainSettings

SIZES: dict[str, Any] = {
    "vocab_size": 997,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 96,
}


def random_model(config: Any) -> PreTrainedModel:
    torch.manual_seed(11)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).eval()
    norm = model.get_decoder().norm if hasattr(model.get_decoder(), "norm") else model.get_decoder().final_layer_norm
    norm.weight.data.uniform_(10.0, 60.0)  # Gemma 3's are as large
    return model


def gemma3(*layers: str) -> PreTrainedModel:
    return random_model(Gemma3TextConfig(**SIZES, sliding_window=5, layer_types=list(layers), tie_word_embeddings=True))


@pytest.mark.parametrize("architecture", ["gemma3", "llama"])
@torch.no_grad()
def test_a_new_module_undoes_and_does_again_what_the_last_norm_multiplies_by(architecture: str) -> None:
    """So at its start it passes a final state on: what it makes of one is that state, but for its length."""
    is_gemma = architecture == "gemma3"
    model = gemma3("sliding_attention", "full_attention") if is_gemma else random_model(LlamaConfig(**SIZES))
    module = new_mtp(model, TrainSettings(num_heads=1))
    decoder: Any = model.get_decoder()
    scale = decoder.norm.weight + (1 if is_gemma else 0)
    assert torch.allclose(module.norm.weight, scale)
    state = decoder.norm(torch.randn(3, 32))
    passed = module.norm(module.hidden_norm(state))
    assert torch.allclose(torch.nn.functional.cosine_similarity(passed, state), torch.ones(3), atol=1e-3)
    attach_base(module, model)
    joined = module.finish(module.join(state, torch.arange(3)), torch.zeros(3, 4, 16))
    assert float(torch.nn.functional.cosine_similarity(joined, state).min()) > 0.6, "the embedding drowns the state"


def test_a_last_norm_that_subtracts_the_mean_is_not_undone() -> None:
    sizes = {name: SIZES[name] for name in SIZES if name not in ("num_key_value_heads", "head_dim")}
    model = random_model(GPTNeoXConfig(**sizes, rotary_pct=1.0))
    model.get_decoder().norm = model.get_decoder().final_layer_norm  # as other architectures call it
    assert torch.equal(new_mtp(model, TrainSettings(num_heads=1)).norm.weight, torch.ones(32))


@pytest.mark.parametrize("last", ["sliding_attention", "full_attention"])
def test_the_rotation_is_that_of_the_last_layers_kind(last: str) -> None:
    kinds = ["sliding_attention", "full_attention"]
    model = gemma3(*(kinds if last == kinds[1] else kinds[::-1]))
    base = model.config.rope_parameters[last]["rope_theta"]
    assert {name: table["rope_theta"] for name, table in model.config.rope_parameters.items()} == {
        "sliding_attention": 10_000.0,
        "full_attention": 1_000_000.0,
    }
    angles = torch.arange(97)[:, None] * base ** (-torch.arange(8) / 8)
    found = rotation(model, 16)
    assert torch.allclose(found.cosine, angles.cos(), atol=1e-5)
    assert torch.allclose(found.sine, angles.sin(), atol=1e-5)
