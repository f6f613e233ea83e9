import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, PreTrainedConfig

from engine.errors import ModelLoadError
from engine.loading.checks import model_class, read_config

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 64,
    "intermediate_size": 64,
}


def check(folder: Path, config: dict[str, Any], trust: bool = False) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return model_class(read_config(folder, trust), folder, trust).__name__


def refusal(folder: Path, config: dict[str, Any]) -> str:
    with pytest.raises(ModelLoadError) as caught:
        check(folder, config)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("model_type", "expected"),
    [
        ("llama", "LlamaForCausalLM"),
        ("qwen2", "Qwen2ForCausalLM"),
        ("qwen3", "Qwen3ForCausalLM"),
        ("mistral", "MistralForCausalLM"),
        ("gemma3_text", "Gemma3ForCausalLM"),
    ],
)
def test_served_architectures(tmp_path: Path, model_type: str, expected: str) -> None:
    assert check(tmp_path, {**LLAMA, "model_type": model_type, "architectures": [expected]}) == expected


@pytest.mark.parametrize("model_type", ["t5", "bart", "pegasus"])
def test_encoder_decoders(tmp_path: Path, model_type: str) -> None:
    assert "encoder-decoder" in refusal(tmp_path, {"model_type": model_type})


@pytest.mark.parametrize(
    "model_type", ["mamba", "mamba2", "rwkv", "jamba", "recurrent_gemma", "qwen3_next", "falcon_h1"]
)
def test_recurrent_state(tmp_path: Path, model_type: str) -> None:
    assert "recurrent state" in refusal(tmp_path, {"model_type": model_type})


def test_stateful_layer_types_are_found_without_the_class_saying_so(tmp_path: Path) -> None:
    assert "recurrent state" in refusal(
        tmp_path, {"model_type": "lfm2", "num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}
    )


@pytest.mark.parametrize("model_type", ["vit", "clip"])
def test_no_causal_language_model(tmp_path: Path, model_type: str) -> None:
    assert "no decoder-only language model" in refusal(tmp_path, {"model_type": model_type})


def test_other_head_than_a_language_model(tmp_path: Path) -> None:
    message = refusal(tmp_path, {**LLAMA, "architectures": ["LlamaForSequenceClassification"]})
    assert "LlamaForSequenceClassification" in message
    assert "BertForMaskedLM" in refusal(tmp_path, {"model_type": "bert", "architectures": ["BertForMaskedLM"]})


def test_attention_that_does_not_go_through_the_interface(tmp_path: Path) -> None:
    assert "cannot use paged attention" in refusal(tmp_path, {"model_type": "bloom"})


def test_attention_layers_of_another_kind(tmp_path: Path) -> None:
    assert "chunked_attention" in refusal(tmp_path, {"model_type": "llama4_text"})


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}},
        {
            "rope_scaling": {
                "type": "longrope",
                "factor": 2.0,
                "short_factor": [1.0] * 4,
                "long_factor": [1.0] * 4,
                "original_max_position_embeddings": 64,
            }
        },
    ],
)
def test_rope_of_the_batch(tmp_path: Path, rope: dict[str, Any]) -> None:
    assert "longest request of a batch" in refusal(tmp_path, {**LLAMA, **rope})


def test_rope_of_the_batch_in_one_layer_type(tmp_path: Path) -> None:
    config = {
        **LLAMA,
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "rope_parameters": {
            "full_attention": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    }
    assert "dynamic RoPE" in refusal(tmp_path, config)
    config["rope_parameters"]["full_attention"] = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    assert check(tmp_path, config) == "Gemma3ForCausalLM"


@pytest.mark.parametrize("kind", ["linear", "llama3"])
def test_rope_of_the_position_alone_is_served(tmp_path: Path, kind: str) -> None:
    rope = {"rope_type": kind, "factor": 2.0, "rope_theta": 10000.0}
    if kind == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    assert check(tmp_path, {**LLAMA, "rope_parameters": rope}) == "LlamaForCausalLM"


def test_quantized_checkpoint(tmp_path: Path) -> None:
    quantization = {"quant_method": "gptq", "bits": 4}
    assert "quantized (gptq)" in refusal(tmp_path, {**LLAMA, "quantization_config": quantization})


def test_own_code_needs_trust(tmp_path: Path) -> None:
    config = {
        "model_type": "tiny_own",
        "architectures": ["TinyForCausalLM"],
        "auto_map": {"AutoConfig": "own.TinyConfig", "AutoModelForCausalLM": "own.TinyForCausalLM"},
    }
    assert "model.trust" in refusal(tmp_path, config)
    (tmp_path / "own.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class TinyConfig(LlamaConfig):\n    model_type = 'tiny_own'\n"
        "class TinyForCausalLM(LlamaForCausalLM):\n    config_class = TinyConfig\n"
    )
    assert check(tmp_path, config, trust=True) == "TinyForCausalLM"


def test_unknown_and_broken_configurations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "unknown to transformers" in refusal(tmp_path, {"model_type": "llama99"})
    assert "unknown to transformers" in refusal(tmp_path, {})
    for text in ("{", "[]"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ModelLoadError, match="not a JSON object"):
            read_config(tmp_path, False)
    assert "not a valid llama configuration" in refusal(tmp_path, {**LLAMA, "hidden_size": "wide"})
    (tmp_path / "config.json").unlink()
    with pytest.raises(ModelLoadError, match=r"needs config\.json, tokenizer files and model\.safetensors"):
        read_config(tmp_path, False)


def test_configuration_is_read_as_written(tmp_path: Path) -> None:
    check(tmp_path, LLAMA)
    read, expected = read_config(tmp_path, False), AutoConfig.from_pretrained(tmp_path)
    assert isinstance(read, PreTrainedConfig)
    assert read.to_dict() == expected.to_dict()
