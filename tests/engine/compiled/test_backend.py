"""Which way of computing steps is chosen, what the log says of it, and what is refused where there is no choice."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from compiled_engine import loaded_model
from compiled_models import Bench, Part, assert_close, eager, library, packed, random_model, text
from tiny_engine import request, run, tiny_model

from engine.assembly import assemble
from engine.attention.check import check_tokens
from engine.backend import Backend, CompiledBackend, RunnerNeeds, TransformersBackend, choose_backend
from engine.config import EngineConfig, EngineSettings, Quantization
from engine.errors import ModelLoadError
from engine.loading import LoadedModel
from engine.sampling_params import SamplingParams
from engine.step_bench import StepBench

WITHOUT = {
    "no compiler": ("", r"there is no C\+\+ compiler"),
    "a missing one": ("/nowhere/c++", r"CXX=/nowhere/c\+\+ names no program"),
    "a failing one": ("/bin/false", "false failed: 1"),
}
WANTED: list[tuple[str, Quantization, dict[str, Any]]] = [
    ("engine.runner compiled", "auto", {"runner": "compiled"}),
    ("model.quantization int8", "int8", {}),
    ("engine.determinism strict", "none", {"determinism": "strict"}),
]


@pytest.fixture(params=WITHOUT)
def no_library(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The reason why there is none, as the machine gives it."""
    compiler, reason = WITHOUT[request.param]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CXX", compiler)
    return reason


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.INFO, logger="headlong"):
        yield caplog


def chosen(loaded: LoadedModel, quantization: Quantization = "auto", **config: Any) -> Backend:
    return choose_backend(loaded, quantization, EngineConfig(**config), lambda _: None)


def check(backend: Backend) -> None:
    """The backend's own check of what it computes."""
    bench = StepBench(backend.make_runner(RunnerNeeds(num_slots=64, block_size=16)), 16, 4)
    backend.check(bench.logits(check_tokens(61)))


def test_without_a_library_the_modules_serve_and_the_log_says_why(
    no_library: str, log: pytest.LogCaptureFixture
) -> None:
    backend = chosen(loaded_model("llama"))
    assert isinstance(backend, TransformersBackend)
    assert (backend.name, backend.quantization, backend.deterministic) == ("transformers", "none", False)
    assert backend.margin_bound > 0
    assert len(log.messages) == 1
    assert re.match(f"steps are computed by transformers' modules: .*{no_library}", log.messages[0])
    check(backend)


@pytest.mark.parametrize(("key", "quantization", "config"), WANTED)
def test_without_a_library_what_needs_it_is_refused_by_name(
    no_library: str, key: str, quantization: Quantization, config: dict[str, Any]
) -> None:
    with pytest.raises(ModelLoadError, match=f"^{key} needs the compiled step, which cannot be had: .*{no_library}"):
        chosen(loaded_model("llama"), quantization, **config)


@pytest.mark.parametrize(("key", "quantization", "config"), WANTED)
def test_a_model_it_cannot_compute_is_refused_the_same_way(
    key: str, quantization: Quantization, config: dict[str, Any]
) -> None:
    loaded = dataclasses.replace(loaded_model("llama"), model=tiny_model("gemma3", torch.float32))
    with pytest.raises(ModelLoadError, match=f"^{key} needs the compiled step.*it is not made for Gemma3ForCausalLM"):
        chosen(loaded, quantization, **config)


def test_a_model_it_cannot_compute_is_served_by_the_modules(log: pytest.LogCaptureFixture) -> None:
    backend = chosen(loaded_model("llama", intermediate_size=100))
    assert isinstance(backend, TransformersBackend)
    assert "is not a multiple of 16" in log.messages[0]


@pytest.mark.parametrize(("key", "quantization", "config"), WANTED[1:])
def test_the_modules_by_choice_have_the_same_limits(
    key: str, quantization: Quantization, config: dict[str, Any]
) -> None:
    with pytest.raises(ModelLoadError, match=f"^{key} needs the compiled step.*engine.runner says so"):
        chosen(loaded_model("llama"), quantization, runner="transformers", **config)


def test_the_modules_by_choice(log: pytest.LogCaptureFixture) -> None:
    assert isinstance(chosen(loaded_model("llama"), runner="transformers"), TransformersBackend)
    assert log.messages == ["steps are computed by transformers' modules: engine.runner says so"]


@pytest.mark.parametrize(
    ("is_quantized", "quantization", "expected"),
    [(False, "auto", "none"), (True, "auto", "int8"), (True, "none", "none"), (False, "int8", "int8")],
)
def test_quantised_sources_compute_in_int8(
    is_quantized: bool, quantization: Quantization, expected: str, log: pytest.LogCaptureFixture
) -> None:
    library()
    loaded = dataclasses.replace(loaded_model("llama"), is_quantized=is_quantized)
    backend = chosen(loaded, quantization, determinism="strict", runner="compiled")
    assert isinstance(backend, CompiledBackend)
    assert (backend.name, backend.quantization, backend.deterministic) == ("compiled", expected, True)
    assert backend.margin_bound == 0.0
    weights = "int8" if expected == "int8" else "float32"
    assert log.messages == [f"steps are computed by the compiled step: {library().kernels} kernels, {weights} weights"]
    check(backend)


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_a_step_that_computes_something_else_is_refused(quantization: Quantization) -> None:
    """What the check is for."""
    library()
    backend = chosen(loaded_model("llama"), quantization)
    assert isinstance(backend, CompiledBackend)
    backend._weights.dimensions = dataclasses.replace(backend._weights.dimensions, attention_scale=-3.0)
    with pytest.raises(ModelLoadError, match="differs from the model's own"):
        check(backend)


def test_no_request_is_longer_than_the_table_of_rotations() -> None:
    """A model without a limit of its own gets one."""
    library()
    backend = chosen(dataclasses.replace(loaded_model("llama"), max_position_embeddings=None))
    assert isinstance(backend, CompiledBackend)
    limit = backend.loaded.max_position_embeddings
    assert limit == 1 << 17
    assert backend._weights.positions > limit
    assembly = assemble(backend, EngineSettings(), lambda _: None, [], measures_steps=False)
    assert assembly.limits.max_model_len <= limit


def test_a_position_behind_the_table_is_an_error_and_no_wild_read() -> None:
    bench = Bench(packed(random_model("llama"), positions=32))
    request = bench.request(text(40))
    bench.forward(Part(request, 0, 32))
    with pytest.raises(ValueError, match="position 32 is behind the 32 of the RoPE table"):
        bench.forward(Part(request, 32, 33))


def test_step_times_of_a_short_model_can_be_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bench's context is longer than what the model was made for."""
    library()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    loaded = dataclasses.replace(loaded_model("llama"), max_position_embeddings=64)
    backend = CompiledBackend(loaded, library(), "none")
    bench = StepBench(backend.make_runner(RunnerNeeds(num_slots=64 * 16, block_size=16)), 16, 64)
    assert bench.time_step(257) > 0
    core = assemble(backend, EngineSettings(), lambda _: None, []).core
    answers = run(core, [request("r", [1, 2, 3], SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True))])
    assert len(answers["r"].ids) == 61


def test_logits_of_both_are_the_same() -> None:
    library()
    tokens = check_tokens(61)
    expected = eager(random_model("qwen3"), tokens)
    for backend in (chosen(loaded_model("qwen3")), chosen(loaded_model("qwen3"), runner="transformers")):
        bench = StepBench(backend.make_runner(RunnerNeeds(num_slots=64, block_size=16)), 16, 4)
        assert_close(bench.logits(tokens), expected)
