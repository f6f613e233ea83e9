"""Which way the steps of a model are computed, and that what cannot be had is refused by its key."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import compiled_engine
import pytest
import torch
from compiled_models import library
from tiny_engine import as_loaded, tiny_config
from transformers import AutoModelForCausalLM

from engine import backend as backends
from engine.backend import choose_backend
from engine.compiled.build import CompiledStepError
from engine.config import EngineConfig, Quantization
from engine.errors import ModelLoadError
from engine.loading import LoadedModel

WANTED = {
    "engine.runner compiled": ("auto", EngineConfig(runner="compiled")),
    "model.quantization int8": ("int8", EngineConfig()),
    "engine.determinism strict": ("none", EngineConfig(determinism="strict")),
}


def loaded(architecture: str, dtype: torch.dtype = torch.float32) -> LoadedModel:
    return as_loaded(AutoModelForCausalLM.from_config(tiny_config(architecture)).to(dtype).eval())


def ignore(line: str) -> None:
    pass


@pytest.fixture
def uncompiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a compiler and without a library that was built before."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)


@pytest.mark.parametrize("key", WANTED)
@pytest.mark.parametrize(
    ("architecture", "dtype", "reason"),
    [
        ("gemma3", torch.float32, "it is not made for Gemma3ForCausalLM"),
        ("llama", torch.float64, "it computes float32 models on the CPU, not float64 on cpu"),
        ("llama", torch.bfloat16, "it computes float32 models on the CPU, not bfloat16 on cpu"),
        ("llama", torch.float32, "a width of the model or the block size is not a multiple of 16"),
    ],
)
def test_what_needs_the_compiled_step_is_refused_for_a_model_it_cannot_compute(
    key: str, architecture: str, dtype: torch.dtype, reason: str
) -> None:
    quantization, config = WANTED[key]
    with pytest.raises(ModelLoadError) as refused:
        choose_backend(loaded(architecture, dtype), quantization, config, ignore)  # type: ignore[arg-type]
    message = str(refused.value)
    assert message.startswith(f"{key} needs the compiled step, which cannot be had: ")
    assert message.endswith(reason)
    assert "\n" not in message


@pytest.mark.parametrize("key", WANTED)
def test_what_needs_the_compiled_step_is_refused_for_a_block_size_it_cannot_use(key: str) -> None:
    quantization, config = WANTED[key]
    config = dataclasses.replace(config, block_size=24)
    with pytest.raises(ModelLoadError, match=f"{key} needs the compiled step.* the block size is not a multiple of 16"):
        choose_backend(compiled_engine.loaded_model("llama"), quantization, config, ignore)  # type: ignore[arg-type]


@pytest.mark.parametrize("key", WANTED)
@pytest.mark.usefixtures("uncompiled")
def test_what_needs_the_compiled_step_is_refused_without_a_compiler(key: str) -> None:
    quantization, config = WANTED[key]
    with pytest.raises(ModelLoadError, match=f"{key} needs the compiled step.* there is no C"):
        choose_backend(compiled_engine.loaded_model("llama"), quantization, config, ignore)  # type: ignore[arg-type]


@pytest.mark.parametrize(("quantization", "determinism"), [("int8", "default"), ("none", "strict")])
def test_the_transformers_runner_has_neither_int8_nor_strict_results(
    quantization: Quantization, determinism: str
) -> None:
    config = EngineConfig(runner="transformers", determinism=determinism)  # type: ignore[arg-type]
    with pytest.raises(
        ModelLoadError, match=r"^(model\.quantization int8|engine\.determinism strict) needs"
    ) as refused:
        choose_backend(compiled_engine.loaded_model("llama"), quantization, config, ignore)
    assert str(refused.value).endswith("engine.runner says so")


@pytest.mark.usefixtures("uncompiled")
def test_without_a_wish_a_machine_without_a_compiler_serves_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="headlong.engine"):
        found = choose_backend(compiled_engine.loaded_model("llama"), "auto", EngineConfig(), ignore)
    assert (found.name, found.quantization, found.deterministic, found.margin_bound) == (
        "transformers", "none", False, 2e-3,
    )  # fmt: skip
    assert "computed by transformers' modules: there is no C++ compiler" in caplog.text


def test_a_configured_transformers_runner_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(progress: object) -> Path:
        raise AssertionError("nobody asked for the compiled step")

    monkeypatch.setattr(backends, "build_library", build)
    config = EngineConfig(runner="transformers")
    assert choose_backend(compiled_engine.loaded_model("llama"), "auto", config, ignore).name == "transformers"


def test_a_library_that_does_not_build_is_no_reason_not_to_serve(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def build(progress: object) -> Path:
        raise CompiledStepError("c++ failed: error: no such option")

    monkeypatch.setattr(backends, "build_library", build)
    with caplog.at_level(logging.INFO, logger="headlong.engine"):
        found = choose_backend(compiled_engine.loaded_model("llama"), "none", EngineConfig(), ignore)
    assert found.name == "transformers"
    assert "c++ failed: error: no such option" in caplog.text


@pytest.mark.parametrize(
    ("quantization", "is_quantized", "expected"),
    [
        ("auto", True, "int8"),
        ("auto", False, "none"),
        ("none", True, "none"),
        ("int8", False, "int8"),
    ],
)
def test_weights_of_a_quantised_file_compute_in_int8_unless_told_otherwise(
    quantization: Quantization, is_quantized: bool, expected: str, caplog: pytest.LogCaptureFixture
) -> None:
    library()  # skips where there is none
    model = dataclasses.replace(compiled_engine.loaded_model("llama"), is_quantized=is_quantized)
    lines: list[str] = []
    with caplog.at_level(logging.INFO, logger="headlong.engine"):
        found = choose_backend(model, quantization, EngineConfig(determinism="strict"), lines.append)
    assert (found.name, found.quantization, found.deterministic, found.margin_bound) == (
        "compiled",
        expected,
        True,
        0.0,
    )
    weights = "int8" if expected == "int8" else "float32"
    assert lines[-1] == f"Packing the weights ({weights})"
    assert f"{weights} weights" in caplog.text
