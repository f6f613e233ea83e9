import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from engine.config import ModelConfig
from engine.errors import ModelLoadError
from engine.loading import LoadedModel, load_model, memory

CPU = torch.device("cpu")


def config(**changes: Any) -> LlamaConfig:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    return LlamaConfig(**{**sizes, **heads, "bos_token_id": 1, "eos_token_id": 2, **changes})


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "Tiny-Llama"
    torch.manual_seed(0)
    LlamaForCausalLM(config()).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Path(shutil.copytree(saved, tmp_path / saved.name))


def load(folder: Path, dtype: torch.dtype | None = None) -> LoadedModel:
    return load_model(ModelConfig(path=str(folder)), CPU, dtype, lambda line: None)


def refusal(folder: Path) -> str:
    with pytest.raises(ModelLoadError) as caught:
        load(folder)
    message = str(caught.value)
    assert "\n" not in message
    return message


def rewrite(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_a_folder(folder: Path) -> None:
    lines: list[str] = []
    loaded = load_model(ModelConfig(path=str(folder)), CPU, None, lines.append)
    assert (loaded.name, loaded.path, loaded.architecture) == ("Tiny-Llama", folder, "LlamaForCausalLM")
    assert (loaded.eos_token_ids, loaded.max_position_embeddings, loaded.default_sampling) == ((2,), 256, {})
    assert len(loaded.digest) == 64
    assert not loaded.is_quantized
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {torch.float32}
    stored = load_file(folder / "model.safetensors")
    assert all(torch.equal(loaded.model.state_dict()[name], tensor) for name, tensor in stored.items())
    assert lines == ["Loading Tiny-Llama (float32 on cpu)"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_dtype(folder: Path, dtype: torch.dtype) -> None:
    model = load(folder, dtype).model
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert model(torch.arange(4)[None]).logits.isfinite().all()


def test_dtypes_that_cannot_be_used(folder: Path) -> None:
    for dtype in (torch.int8, torch.float8_e4m3fn):
        with pytest.raises(ModelLoadError, match="is not supported on cpu"):
            load(folder, dtype)
    if not torch.cuda.is_available():
        with pytest.raises(ModelLoadError, match="no CUDA device"):
            load_model(ModelConfig(path=str(folder)), torch.device("cuda"), None, print)


def test_shards(folder: Path) -> None:
    whole = load(folder).model.state_dict()
    LlamaForCausalLM.from_pretrained(folder).save_pretrained(folder, max_shard_size="20KB")
    (folder / "model.safetensors").unlink(missing_ok=True)
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 1
    loaded = load(folder).model.state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in whole.items())
    shards[0].unlink()
    assert shards[0].name in refusal(folder)


def test_folders_without_safetensors(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.unlink()
    assert "is not a model folder" in refusal(folder)
    (folder / "tiny.gguf").write_bytes(b"GGUF")
    assert "name the file itself" in refusal(folder)
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    assert "pickled weights alone" in refusal(folder)


def test_truncated_and_corrupt_weights(folder: Path) -> None:
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    for broken in (content[: len(content) // 2], content[:4], b"", b"\xff" * 100):
        weights.write_bytes(broken)
        assert "truncated or corrupt" in refusal(folder)


def test_missing_weight_is_not_filled_with_random_numbers(folder: Path) -> None:
    weights = folder / "model.safetensors"
    tensors = load_file(weights)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, weights, {"format": "pt"})
    assert "lacks weights that its configuration calls for: model.layers.1.mlp.up_proj.weight." in refusal(folder)


def test_configuration_with_more_layers_than_weights(folder: Path) -> None:
    rewrite(folder / "config.json", num_hidden_layers=3)
    assert "lacks weights" in refusal(folder)


def test_unknown_weight_is_not_dropped(folder: Path) -> None:
    weights = folder / "model.safetensors"
    tensors = load_file(weights)
    save_file({**tensors, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}, weights, {"format": "pt"})
    load(folder)
    save_file({**tensors, "model.layers.0.self_attn.q_proj.bias": torch.ones(32)}, weights, {"format": "pt"})
    assert "does not know: model.layers.0.self_attn.q_proj.bias" in refusal(folder)


def test_shapes_that_do_not_match(folder: Path) -> None:
    rewrite(folder / "config.json", intermediate_size=40)
    message = refusal(folder)
    assert "mlp" in message or "shape" in message or "size" in message


def test_quantized_weights(folder: Path) -> None:
    weights = folder / "model.safetensors"
    tensors = load_file(weights)
    name = "model.layers.0.mlp.up_proj.weight"
    save_file({**tensors, name: tensors[name].to(torch.float8_e4m3fn)}, weights, {"format": "pt"})
    assert "stores weights as F8_E4M3" in refusal(folder)


def test_too_little_memory_is_known_beforehand(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "memory_available", lambda: 10_000)
    monkeypatch.setattr(torch.nn.Module, "__init__", lambda self: pytest.fail("a module was made"))
    assert "Tiny-Llama needs 0.00 GiB of memory for its weights, and 0.00 GiB are available" in refusal(folder)


def test_memory_estimate(folder: Path) -> None:
    from engine.loading.weights import read_headers, weight_files

    headers = read_headers(weight_files(folder))
    elements = sum(tensor.numel() for tensor in load_file(folder / "model.safetensors").values())
    assert memory.needed_bytes(headers, config(), torch.bfloat16, "cpu") == int(elements * 2 * 1.05)
    tied = memory.needed_bytes(headers, config(tie_word_embeddings=True), torch.float32, "cpu")
    assert tied == int((elements + 64 * 32) * 4 * 1.05)
    assert 0 < memory.available_bytes(CPU) < 1 << 50


def test_eos_ids(folder: Path) -> None:
    generation = folder / "generation_config.json"
    rewrite(generation, eos_token_id=[7, 2, 7])
    assert load(folder).eos_token_ids == (7, 2)
    generation.unlink()
    rewrite(folder / "config.json", eos_token_id=5)
    assert load(folder).eos_token_ids == (5,)


def test_no_eos_is_logged(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "generation_config.json").unlink()
    rewrite(folder / "config.json", eos_token_id=None)
    assert load(folder).eos_token_ids == ()
    assert "names no EOS token" in caplog.text


def test_default_sampling(folder: Path) -> None:
    generation = folder / "generation_config.json"
    values = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.1, "max_length": 9}
    expected = {name: value for name, value in values.items() if name != "max_length"}
    rewrite(generation, **values, min_p=None)
    assert load(folder).default_sampling == expected
    rewrite(generation, do_sample=True)
    assert load(folder).default_sampling == expected
    rewrite(generation, do_sample=False)
    assert load(folder).default_sampling == {"repetition_penalty": 1.1}
    rewrite(generation, do_sample=True, temperature="warm")
    assert "temperature: 'warm', which is not a number" in refusal(folder)
    generation.write_text("{")
    assert "is not JSON" in refusal(folder)


def test_transformers_stays_as_loud_as_it_was(folder: Path) -> None:
    from transformers.utils import logging

    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    load(folder)
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before
