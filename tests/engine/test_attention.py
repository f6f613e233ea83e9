"""Paged attention against each architecture's own eager attention, and what must be refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_engine import ARCHITECTURES, as_loaded, tiny_config, tiny_model
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    GptOssConfig,
    MambaConfig,
    PreTrainedModel,
)

from engine.attention.cache import PagedKV
from engine.attention.check import check_tokens, layer_shapes, vocab_size
from engine.attention.paged import paged_attention
from engine.backend import RunnerNeeds, TransformersBackend
from engine.errors import ModelLoadError
from engine.step_bench import StepBench

CPU = torch.device("cpu")
SIZES: dict[str, Any] = dict(  # noqa: C408
    vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=96, bos_token_id=0, eos_token_id=60, pad_token_id=0,
)  # fmt: skip


def check(model: PreTrainedModel) -> None:
    """The paged logits of a model's plain modules against its own."""
    backend = TransformersBackend(as_loaded(model), packs=False)
    bench = StepBench(backend.make_runner(RunnerNeeds(num_slots=16 * 4, block_size=4)), 4, 16)
    backend.check(bench.logits(check_tokens(vocab_size(model))))


def random_model(config: Any, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config).to(dtype).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.mul_(4.0)
    return model


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_equals_eager(architecture: str, dtype: torch.dtype) -> None:
    check(random_model(tiny_config(architecture), dtype))


def test_soft_cap_is_honoured() -> None:
    check(random_model(Gemma2Config(**SIZES, sliding_window=7, query_pre_attn_scalar=8, attn_logit_softcapping=2.0)))


def test_sinks_are_honoured() -> None:
    model = random_model(GptOssConfig(**SIZES, sliding_window=7, num_local_experts=2, num_experts_per_tok=1))
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks, std=2.0)
    check(model)


def test_keys_and_values_of_unequal_size_are_honoured() -> None:
    config = DeepseekV3Config(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        first_k_dense_replace=2,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=12,
        bos_token_id=0,
        eos_token_id=60,
    )
    model = random_model(config)
    shapes = layer_shapes(model)
    assert (shapes[0].key_dim, shapes[0].value_dim) == (16, 12)
    check(model)


@pytest.mark.parametrize("ignored", ["sliding_window", "softcap", "s_aux", "scaling"])
def test_a_property_that_were_ignored_would_be_noticed(ignored: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check fails for an attention that drops what the architecture passes."""
    config = {
        "sliding_window": tiny_config("mistral"),
        "softcap": Gemma2Config(**SIZES, sliding_window=7, query_pre_attn_scalar=8, attn_logit_softcapping=2.0),
        "s_aux": GptOssConfig(**SIZES, sliding_window=7, num_local_experts=2, num_experts_per_tok=1),
        "scaling": Gemma2Config(**SIZES, sliding_window=7, query_pre_attn_scalar=64),
    }[ignored]
    model = random_model(config)
    if ignored == "s_aux":
        for layer in model.model.layers:
            torch.nn.init.normal_(layer.self_attn.sinks, std=2.0)

    def deaf(*arguments: Any, **passed: Any) -> Any:
        return paged_attention(*arguments, **(passed | {ignored: None}))

    import engine.attention.paged as paged

    check(model)
    monkeypatch.setattr(paged, "paged_attention", deaf)
    with pytest.raises(ModelLoadError, match="differs from the model's own"):
        check(model)
    monkeypatch.undo()
    paged.register()


def test_recurrent_layers_are_refused() -> None:
    config = MambaConfig(vocab_size=61, hidden_size=32, num_hidden_layers=2, bos_token_id=0, eos_token_id=1)
    with pytest.raises(ModelLoadError, match="do not attend through"):
        layer_shapes(random_model(config))


def test_asking_what_layers_store_leaves_the_model_as_it_was() -> None:
    model = random_model(tiny_config("qwen3"))
    tokens = torch.arange(1, 9)[None]
    with torch.inference_mode():
        before = model(input_ids=tokens).logits
        layer_shapes(model)
        assert torch.equal(model(input_ids=tokens).logits, before)


def test_an_unknown_argument_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model(tiny_config("llama"))
    inner = model.model.layers[1].self_attn.forward
    monkeypatch.setattr(
        model.model.layers[1].self_attn, "forward", lambda *a, **k: inner(*a, **k, position_bias=torch.ones(1))
    )
    with pytest.raises(ModelLoadError, match="position_bias"):
        layer_shapes(model)


def test_no_room_for_the_pool_is_one_sentence() -> None:
    with pytest.raises(ModelLoadError, match="not enough memory"):
        PagedKV(layer_shapes(tiny_model("llama")), 1 << 50, dtype=torch.float64, device=CPU)
