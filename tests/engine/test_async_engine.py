"""The asyncio face: one terminal output for every request, whatever happens to it or to the engine."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tiny_engine import MAX_LEN, VOCAB, assert_all_free, request, run, tiny_core

from engine.async_engine import AsyncEngine
from engine.config import EngineConfig, EngineSettings
from engine.core import EngineCore
from engine.errors import EngineBusyError, EngineDeadError, InvalidRequestError
from engine.outputs import ModelInfo, RequestOutput, StepStats
from engine.sampling_params import SamplingParams, SpeculationParams
from engine.spec_decode.suffix import SuffixDrafter

GREEDY = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
PROMPT = [5, 9, 17, 3]


def make_engine(core: EngineCore, **engine: Any) -> AsyncEngine:
    info = ModelInfo("tiny", "", "", VOCAB, MAX_LEN, (60,), "float64", "cpu", 200, 4, methods=("suffix",))
    return AsyncEngine(core, info, EngineSettings(engine=EngineConfig(**engine)))


async def read(stream: AsyncIterator[RequestOutput]) -> list[RequestOutput]:
    return [output async for output in stream]


def ids(outputs: list[RequestOutput]) -> list[int]:
    return [token.token_id for output in outputs for token in output.tokens]


async def test_many_requests_some_aborted() -> None:
    draw = random.Random(1)
    requests = [request(f"r{i}", [*PROMPT, i], GREEDY) for i in range(12)]
    expected = run(tiny_core("llama"), requests)
    core = tiny_core("llama", [SuffixDrafter()])
    engine = make_engine(core)
    steps: list[StepStats] = []
    engine.start(steps.append)

    async def one(index: int) -> list[RequestOutput]:
        outputs = []
        stream = engine.add(requests[index])
        async for output in stream:
            outputs.append(output)
            if index % 3 == 0 and draw.random() < 0.3:
                engine.abort(requests[index].request_id)
        return outputs

    for index, outputs in enumerate(await asyncio.gather(*(one(index) for index in range(12)))):
        assert [output.finish_reason is not None for output in outputs] == [False] * (len(outputs) - 1) + [True]
        whole = expected[f"r{index}"].ids
        assert ids(outputs) == (whole[: len(ids(outputs))] if outputs[-1].finish_reason == "abort" else whole)
    assert sum(stats.rows for stats in steps) > 0
    assert steps[-1].kv_usage == 0
    await engine.shutdown()
    assert_all_free(core)
    assert not engine.is_alive


async def test_shutdown_ends_every_stream() -> None:
    engine = make_engine(tiny_core("llama"))
    engine.start()
    readers = [asyncio.create_task(read(engine.add(request(f"r{i}", PROMPT, GREEDY)))) for i in range(3)]
    await asyncio.sleep(0)
    await engine.shutdown()
    assert {(await reader)[-1].finish_reason for reader in readers} <= {"abort", "length"}
    with pytest.raises(EngineDeadError):
        engine.check(request("late", PROMPT, GREEDY))


async def test_a_dead_engine_ends_every_stream_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    core = tiny_core("llama")
    engine = make_engine(core)

    def broken() -> None:
        raise RuntimeError("a bug in the scheduler")

    monkeypatch.setattr(core.scheduler, "schedule", broken)
    engine.start()
    outputs = await asyncio.wait_for(read(engine.add(request("r", PROMPT, GREEDY))), 30)
    assert outputs[-1].finish_reason == "error"
    assert not engine.is_alive
    with pytest.raises(EngineDeadError):
        engine.add(request("next", PROMPT, GREEDY))
    await engine.shutdown()


@pytest.mark.parametrize(
    ("prompt", "sampling", "speculation", "param", "code"),
    [
        ([], GREEDY, None, "prompt", "empty_array"),
        ([VOCAB], GREEDY, None, "prompt", "invalid_value"),
        ([-1], GREEDY, None, "prompt", "invalid_value"),
        ([1] * MAX_LEN, GREEDY, None, "prompt", "context_length_exceeded"),
        (PROMPT, GREEDY, SpeculationParams(method="medusa"), "speculation.method", "unsupported_value"),
    ],
)
async def test_what_is_refused_before_it_is_queued(
    prompt: list[int], sampling: SamplingParams, speculation: SpeculationParams | None, param: str, code: str
) -> None:
    core = tiny_core("llama")
    engine = make_engine(core)
    engine.start()
    with pytest.raises(InvalidRequestError) as refused:
        engine.check(request("r", prompt, sampling, speculation))
    assert (refused.value.param, refused.value.code) == (param, code)
    assert not core.has_work
    await engine.shutdown()


async def test_a_full_queue_is_busy_and_a_taken_name_is_refused() -> None:
    core = tiny_core("llama")
    engine = make_engine(core, max_waiting_tokens=10)
    engine._thread = type("Thread", (), {"is_alive": lambda self: True, "join": lambda self: None})()
    choices = [request("a", [1] * 20, GREEDY), request("a2", [1] * 20, GREEDY)]
    for choice in choices:  # an idle engine takes what alone is more than the queue's limit
        engine.check(choice)
    for choice in choices:
        engine.add(choice)
    with pytest.raises(EngineBusyError) as busy:
        engine.check(request("b", [1] * 8, GREEDY))
    assert 1 <= busy.value.retry_after <= 30
    with pytest.raises(InvalidRequestError):
        engine.check(request("a", [1], GREEDY))


def test_drawn_seeds_repeat_with_the_configured_seed_only() -> None:
    core = tiny_core("llama")
    first, second, free = make_engine(core, seed=1), make_engine(core, seed=1), make_engine(core)
    drawn = [first.draw_seed() for _ in range(4)]
    assert drawn == [second.draw_seed() for _ in range(4)]
    assert len({*drawn, free.draw_seed()}) == 5
    assert all(0 <= seed < 1 << 64 for seed in drawn)


async def test_an_abort_of_what_is_unknown_or_over_is_harmless() -> None:
    engine = make_engine(tiny_core("llama"))
    engine.start()
    engine.abort("never seen")
    outputs = await read(engine.add(request("r", PROMPT, dataclasses.replace(GREEDY, max_tokens=2))))
    engine.abort("r")
    assert len(ids(outputs)) == 2
    await engine.shutdown()
