"""Answers to train on: the state beside each token is the one that chose it, and loops are cut."""

from __future__ import annotations

import pytest
import torch
from tiny_engine import ARCHITECTURES, EOS, as_loaded, request, run, tiny_core, tiny_model

from engine.assembly import assemble
from engine.backend import Backend, TransformersBackend
from engine.config import EngineConfig, EngineSettings, ModelConfig, SpeculationConfig
from engine.distill import AnswerGenerator, StateRecorder, answer_plan, make_asks
from engine.errors import RequestFailedError
from engine.model_runner import ModelRunner
from engine.outputs import StepOutput
from engine.sampling_params import SamplingParams
from heads.data import Ask, first_loop
from heads.settings import AnswerSettings


def backend_of(architecture: str, digest: str = "0") -> Backend:
    return TransformersBackend(as_loaded(tiny_model(architecture), architecture, digest))


def generator(architecture: str, *, max_tokens: int = 24, seqs: int = 4, memory: int = 1 << 20) -> AnswerGenerator:
    recorders: list[StateRecorder] = []

    def recorder(runner: ModelRunner) -> ModelRunner:
        recorders.append(StateRecorder(runner))
        return recorders[0]

    engine = EngineConfig(
        device="cpu", block_size=4, kv_cache_memory=memory, max_num_seqs=seqs, max_num_batched_tokens=16
    )
    settings = EngineSettings(ModelConfig("tiny", dtype="float64"), engine, SpeculationConfig(enabled=False))
    core = assemble(backend_of(architecture), settings, lambda _: None, [], recorder=recorder).core
    return AnswerGenerator(core, recorders[0], max_tokens)


ASKS = [Ask((1 + index, 5, 9, index), 0.0 if index % 2 == 0 else 0.9, index) for index in range(9)]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_each_state_is_the_one_that_chose_its_token(architecture: str) -> None:
    answers = generator(architecture)(ASKS)
    head = tiny_model(architecture).lm_head.weight
    for answer in answers:
        assert answer.states.shape == (len(answer.tokens), 32)
        if answer.ask.temperature == 0.0:
            chosen = (answer.states.double() @ head.T).argmax(dim=-1)
            right = float((chosen == torch.tensor(answer.tokens)).double().mean())
            assert right > 0.95, "states and tokens are out of step"  # half precision may swap a near-tie


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_answers_are_what_a_client_would_get(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same tokens as plain requests, up to a loop; whatever runs beside them, preemption included."""
    core = tiny_core(architecture)
    wanted = run(
        core,
        [
            request(f"r{index}", ask.prompt, SamplingParams(temperature=ask.temperature, seed=ask.seed, max_tokens=24))
            for index, ask in enumerate(ASKS)
        ],
    )
    small = generator(architecture, seqs=9, memory=30_000)
    preemptions: list[int] = []
    step = small.core.step

    def counting() -> StepOutput:
        done = step()
        preemptions.append(done.stats.preemptions)
        return done

    monkeypatch.setattr(small.core, "step", counting)
    for made in (generator(architecture, seqs=1), generator(architecture, seqs=9), small):
        for index, answer in enumerate(made(ASKS)):
            ids = wanted[f"r{index}"].ids
            cut = first_loop(ids)
            assert list(answer.tokens) == (ids if cut is None else ids[:cut])
            assert len(answer.states) == len(answer.tokens)
    assert sum(preemptions) > 0, "the small pool was large enough"


def test_a_loop_is_cut_and_the_request_ends_early() -> None:
    """A tiny greedy model repeats itself sooner or later; steps after that are not worth their time."""
    counted: list[int] = []
    made = generator("llama", max_tokens=80)
    made.on_tokens = counted.append
    asks = [Ask((start, 2, 3), 0.0, start) for start in range(12)]
    answers = made(asks)
    looping = [answer for answer in answers if len(answer.tokens) < 80 and answer.tokens[-1] != EOS]
    assert looping
    assert all(first_loop(answer.tokens) is None for answer in answers)
    assert sum(counted) < sum(80 if answer in looping else len(answer.tokens) for answer in answers)
    assert not made.core.has_work


def test_a_fault_of_the_engine_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    made = generator("llama")
    monkeypatch.setattr(made.recorder, "forward", lambda batch: (_ for _ in ()).throw(ValueError("broken")))
    with pytest.raises(RequestFailedError, match="broken"):
        made(ASKS)


def test_every_other_ask_is_greedy_and_seeds_fit_a_shard() -> None:
    asks = make_asks([(index,) for index in range(9)], AnswerSettings(temperatures=(0.7, 1.0)), seed=-1)
    assert [ask.temperature for ask in asks] == [0.0, 0.7, 0.0, 1.0, 0.0, 0.7, 0.0, 1.0, 0.0]
    assert len({ask.seed for ask in asks}) == 9
    assert all(0 <= ask.seed < 2**63 for ask in asks)
    assert asks == make_asks([(index,) for index in range(9)], AnswerSettings(temperatures=(0.7, 1.0)), seed=-1)


def test_the_plan_tells_runs_apart() -> None:
    settings, backend = AnswerSettings(), backend_of("llama")
    plan = answer_plan(backend, ASKS, settings)
    assert plan == answer_plan(backend, ASKS, AnswerSettings(tokens=5, concurrency=2)), (
        "more of the same is no other run"
    )
    assert plan != answer_plan(backend_of("llama", "other"), ASKS, settings)
    assert plan != answer_plan(backend, ASKS[1:], settings)
    assert plan != answer_plan(backend, ASKS, AnswerSettings(max_tokens=5))
    backend.quantization = "int8"
    assert plan != answer_plan(backend, ASKS, settings), "other weights choose other tokens"
