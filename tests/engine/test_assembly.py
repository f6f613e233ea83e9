"""Sizes and refusals of an engine that is being put together."""

from __future__ import annotations

from typing import Any

import pytest
from tiny_engine import Sizes, request, run, tiny_core, tiny_model

from engine.errors import ModelLoadError
from engine.sampling_params import SamplingParams


@pytest.mark.parametrize(("block_size", "num_blocks"), [(1, 30), (4, 9), (16, 3)])
def test_a_pool_smaller_than_the_measured_steps_still_serves(block_size: int, num_blocks: int) -> None:
    core = tiny_core("llama", (), Sizes(block_size=block_size, num_blocks=num_blocks))
    answer = run(core, [request("r", [5, 9], SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True))])["r"]
    assert len(answer.ids) == 6


@pytest.mark.parametrize(("block_size", "num_blocks"), [(1, 10), (1, 24), (4, 4), (16, 1)])
def test_a_pool_that_is_too_small_is_refused_in_one_sentence(block_size: int, num_blocks: int) -> None:
    with pytest.raises(ModelLoadError, match="too little memory for a KV cache"):
        tiny_core("llama", (), Sizes(block_size=block_size, num_blocks=num_blocks))


def test_an_architecture_that_fails_in_its_own_way_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = tiny_model("llama")

    def broken(*_: Any, **__: Any) -> Any:
        raise TypeError("forward() got an unexpected argument")

    monkeypatch.setattr(model, "forward", broken)
    with pytest.raises(ModelLoadError, match="LlamaForCausalLM cannot be served: its forward pass failed"):
        tiny_core("llama")
