"""The self-test at load: what it says of good, bad and foreign heads, and that it leaves nothing behind."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from tiny_engine import VOCAB, HostileDrafter, ScriptedDrafter, Sizes, assert_all_free, tiny_core, tiny_model

from engine.batch import Batch
from engine.draft_test import SELF_TEST_TOKENS, measure_acceptance, self_test
from engine.errors import ModelLoadError, RequestFailedError
from engine.loading.heads import output_head
from engine.model_runner import ForwardResult
from engine.sampling_params import EngineRequest, SamplingParams
from engine.spec_decode.drafter import DraftContext
from engine.spec_decode.medusa import MedusaDrafter
from engine.spec_decode.tree import ROOT, DraftTree
from engine.step_bench import StepBench
from heads.config import BaseModel, HeadsConfig
from heads.lm_head import DraftLmHead
from heads.medusa import MedusaHeads

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPTS = [(3, 4, 5), (6, 7)]
SIZES = Sizes(max_draft_tokens=VOCAB, max_num_batched_tokens=70)  # the tree of one request fits, two do not


class EveryToken(ScriptedDrafter):
    """Drafts every token of the tiny vocabulary: one draft a step is always right."""

    method = "medusa"

    def propose(self, contexts: Sequence[DraftContext]) -> list[DraftTree]:
        trees = []
        for _ in contexts:
            tree = DraftTree()
            for token in range(VOCAB):
                tree.add(token, ROOT, 0.5, self.method)
            trees.append(tree)
        return trees


class OneToken(EveryToken):
    def propose(self, contexts: Sequence[DraftContext]) -> list[DraftTree]:
        trees = [DraftTree() for _ in contexts]
        for tree in trees:
            tree.add(VOCAB - 1, ROOT, 0.5, self.method)
        return trees


def config(baseline: float | None = None) -> HeadsConfig:
    found = {} if baseline is None else {"held-out": baseline}
    return HeadsConfig("medusa", 1, 32, VOCAB, BaseModel("llama", "0"), baseline=found, self_test=tuple(PROMPTS))


def told(core_drafter: ScriptedDrafter, baseline: float | None, caplog: pytest.LogCaptureFixture) -> tuple[int, str]:
    core = tiny_core("llama", [core_drafter], SIZES)
    controller = core.scheduler.controller
    caplog.clear()
    with caplog.at_level(logging.INFO, "headlong.engine"):
        self_test(core, config(baseline))
    assert core.scheduler.controller is controller
    assert_all_free(core)
    (record,) = [record for record in caplog.records if "self-test" in record.getMessage()]
    return record.levelno, record.getMessage()


def test_good_heads_are_reported_with_their_acceptance_length(caplog: pytest.LogCaptureFixture) -> None:
    level, message = told(EveryToken(), 2.0, caplog)
    assert level == logging.INFO
    assert "acceptance length 1.78" in message  # the prompt brings one of 16 tokens, pairs the rest


def test_heads_that_are_never_right_are_a_warning_with_the_likely_cause(caplog: pytest.LogCaptureFixture) -> None:
    level, message = told(OneToken(), None, caplog)
    assert level == logging.WARNING
    assert "trained on other weights" in message
    assert "hidden state" in message


def test_real_heads_with_random_weights_are_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    heads = MedusaHeads(32, 3)
    torch.manual_seed(0)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=3.0)  # so large that nothing of the state is left
    drafter = MedusaDrafter(heads, DraftLmHead(output_head(tiny_model("llama")), None))
    core = tiny_core("llama", [drafter], Sizes(max_draft_tokens=1))  # of 61 tokens one is tried
    with caplog.at_level(logging.INFO, "headlong.engine"):
        found = self_test(core, dataclasses.replace(config(), self_test=()))
    assert found.length < 1.05
    assert "hardly ever right" in caplog.text
    assert_all_free(core)


def test_heads_far_below_what_they_reached_in_training_are_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    level, message = told(EveryToken(), 4.0, caplog)
    assert level == logging.WARNING
    assert "1.78 in the self-test, 4.00 after training" in message


class Noting(EveryToken):
    """Notes below which survival the nodes of each proposal would not pay."""

    def __init__(self) -> None:
        self.least: list[float] = []

    def propose(self, contexts: Sequence[DraftContext]) -> list[DraftTree]:
        self.least += [context.least for context in contexts]
        return super().propose(contexts)


def test_what_drafts_cost_does_not_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(StepBench, "time_step", lambda _, rows: float(rows))  # a row more never pays
    drafter = Noting()
    core = tiny_core("llama", [drafter], SIZES, measures_steps=True)
    found = measure_acceptance(core, PROMPTS, GREEDY)
    assert (found.tokens, found.forwards) == (24, 14)
    assert set(drafter.least) == {0.0}
    core.add(EngineRequest("r", (3, 4, 5), GREEDY))
    drafter.least.clear()
    while core.has_work:
        core.step()
    assert drafter.least == pytest.approx([1.0] * 3)  # then its book is in the red


def test_tokens_and_forwards_are_counted_as_the_acceptance_length_wants() -> None:
    found = measure_acceptance(tiny_core("llama", [EveryToken()], SIZES), PROMPTS, GREEDY)
    # Twelve tokens: one with the prompt, then pairs, the last one cut by max_tokens.
    assert (found.tokens, found.forwards) == (24, 14)
    plain = measure_acceptance(tiny_core("llama"), PROMPTS, GREEDY)
    assert plain.length == 1.0


def test_hostile_drafts_end_it_no_differently() -> None:
    core = tiny_core("llama", [HostileDrafter(1)])
    assert measure_acceptance(core, PROMPTS, GREEDY).tokens == 24
    assert_all_free(core)


def test_a_prompt_longer_than_the_context_is_cut(caplog: pytest.LogCaptureFixture) -> None:
    """A server with a small context must not take its own limit for bad heads."""
    core = tiny_core("llama", [EveryToken()], SIZES)
    long = tuple(range(3, 50)) * 4
    assert len(long) > core.scheduler.limits.max_model_len
    found = self_test(core, dataclasses.replace(config(), self_test=(long,)))
    assert found.tokens == SELF_TEST_TOKENS
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_heads_without_prompts_are_tried_on_made_up_ones() -> None:
    found = self_test(tiny_core("llama", [EveryToken()], SIZES), dataclasses.replace(config(), self_test=()))
    assert found.tokens == 4 * SELF_TEST_TOKENS
    assert found.length > 1.5


def test_a_self_test_that_fails_refuses_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    core = tiny_core("llama", [EveryToken()], SIZES)
    monkeypatch.setattr(core._runner, "forward", lambda batch: (_ for _ in ()).throw(ValueError("broken")))
    with pytest.raises(ModelLoadError, match="self-test of the medusa heads failed: ValueError: broken"):
        self_test(core, config())


def test_when_one_request_fails_the_others_are_not_left(monkeypatch: pytest.MonkeyPatch) -> None:
    core = tiny_core("llama")
    controller, forward, calls = core.scheduler.controller, core._runner.forward, []

    def fails_once(batch: Batch) -> ForwardResult:
        calls.append(batch)
        if len(calls) == 3:
            raise ValueError("broken")
        return forward(batch)

    monkeypatch.setattr(core._runner, "forward", fails_once)
    with pytest.raises(RequestFailedError, match="broken"):
        measure_acceptance(core, PROMPTS, GREEDY)
    assert len(calls) > 10, "the other request ran to its end"
    assert core.scheduler.controller is controller
    assert_all_free(core)


def test_a_failing_request_is_an_error_and_leaves_the_controller(monkeypatch: pytest.MonkeyPatch) -> None:
    core = tiny_core("llama")
    controller = core.scheduler.controller
    monkeypatch.setattr(core._runner, "forward", lambda batch: (_ for _ in ()).throw(ValueError("broken")))
    with pytest.raises(RequestFailedError, match="broken"):
        measure_acceptance(core, PROMPTS, GREEDY)
    assert core.scheduler.controller is controller
