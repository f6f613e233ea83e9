"""Sizes and refusals of an engine that is being put together."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from tiny_engine import Sizes, as_loaded, request, run, tiny_core, tiny_model
from tiny_heads import mtp_drafter, own_kv_drafter

from engine.assembly import assemble
from engine.backend import TransformersBackend, choose_backend
from engine.config import EngineConfig, EngineSettings, ModelConfig
from engine.errors import ModelLoadError
from engine.sampling_params import SamplingParams
from engine.spec_decode.drafter import Drafter
from engine.spec_decode.watched import WatchedDrafter


@pytest.mark.parametrize(("block_size", "num_blocks"), [(1, 30), (4, 9), (16, 3)])
def test_a_pool_smaller_than_the_measured_steps_still_serves(
    block_size: int, num_blocks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    core = tiny_core("llama", (), Sizes(block_size=block_size, num_blocks=num_blocks), measures_steps=True)
    assert list(tmp_path.rglob("steps/*.json")), "nothing was measured"
    answer = run(core, [request("r", [5, 9], SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True))])["r"]
    assert len(answer.ids) == 6


@pytest.mark.parametrize(("block_size", "num_blocks"), [(1, 10), (1, 24), (4, 4), (16, 1)])
def test_a_pool_that_is_too_small_is_refused_in_one_sentence(block_size: int, num_blocks: int) -> None:
    with pytest.raises(ModelLoadError, match="too little memory for a KV cache"):
        tiny_core("llama", (), Sizes(block_size=block_size, num_blocks=num_blocks))


def test_what_a_drafter_keeps_for_each_block_is_counted_in_the_pool() -> None:
    """Two layers of two KV heads of eight numbers in float64, and of the draft module one in float32 with a state."""
    memory, model = 1 << 18, tiny_model("llama")
    settings = EngineSettings(
        ModelConfig("tiny", dtype="float64"), EngineConfig(device="cpu", block_size=4, kv_cache_memory=memory)
    )

    def blocks(*drafters: Drafter) -> int:
        backend = TransformersBackend(as_loaded(copy.deepcopy(model)), packs=False)
        return assemble(backend, settings, lambda _: None, drafters, measures_steps=False).num_blocks

    plain, own = 2 * 2 * 2 * 8 * 8 * 4, 2 * 2 * 8 * 4 * 4 + 32 * 4
    assert blocks() == memory // plain
    assert blocks(own_kv_drafter(model)) == memory // (plain + own)
    assert blocks(WatchedDrafter(own_kv_drafter(model))) == memory // (plain + own)
    assert blocks(WatchedDrafter(mtp_drafter(model))) == memory // plain


@pytest.mark.parametrize("is_paged_alone", [False, True])
def test_an_architecture_that_fails_in_its_own_way_is_refused(
    is_paged_alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = tiny_model("llama")
    forward = model.forward

    def broken(*arguments: Any, **passed: Any) -> Any:
        if is_paged_alone and "headlong_step" not in passed:
            return forward(*arguments, **passed)
        raise TypeError("forward() got an unexpected argument")

    monkeypatch.setattr(model, "forward", broken)

    def made() -> Any:
        if is_paged_alone:
            return tiny_core("llama")
        return choose_backend(as_loaded(model), "auto", EngineConfig(runner="transformers"), lambda _: None)

    with pytest.raises(ModelLoadError, match="LlamaForCausalLM cannot be served: its forward pass failed"):
        made()
