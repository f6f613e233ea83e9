"""A drafter is asked while its drafts save more time than they take."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

import pytest

from engine.commit import Emission
from engine.outputs import TokenOutput
from engine.request import Request
from engine.sampling_params import EngineRequest, SamplingParams
from engine.scheduler import ScheduledRequest, SchedulerLimits
from engine.spec_decode.controller import StepCosts
from engine.spec_decode.drafter import DraftContext
from engine.spec_decode.drafting import Drafting
from engine.spec_decode.pacing import DraftPace
from engine.spec_decode.suffix import SuffixDrafter
from engine.spec_decode.tree import ROOT, DraftTree

COSTS = StepCosts({1: 0.010, 2: 0.011, 4: 0.013, 8: 0.020})


def scheduled(*survivals: float, method: str = "medusa") -> list[ScheduledRequest]:
    """One decoding request whose drafted rows are siblings of these survivals."""
    request = Request.from_source(EngineRequest("r", (1,), SamplingParams(max_tokens=9)), ())
    tree = DraftTree()
    for token, survival in enumerate(survivals):
        tree.add(token, ROOT, survival, method)
    return [ScheduledRequest(request, 0, 1, tree)]


def played(pace: DraftPace, steps: int, saved: list[ScheduledRequest], seconds: float, requests: int = 1) -> list[int]:
    """The steps at which the drafter was asked."""
    asked = []
    for step in range(steps):
        if pace.asks("medusa", requests):
            asked.append(step)
            pace.spend("medusa", requests, seconds)
        pace.settle(saved)
    return asked


def test_drafts_that_pay_are_always_made() -> None:
    # Half a token more is worth 5 ms; the row costs 1 ms, drafting 2 ms.
    assert played(DraftPace(COSTS), 200, scheduled(0.5), 0.002) == list(range(200))


def test_drafts_that_are_never_verified_are_made_as_often_as_costs_next_to_nothing() -> None:
    asked = played(DraftPace(COSTS), 3000, scheduled(), 0.002)
    assert asked[:3] == [0, 1, 2]
    # 2 ms are a fifth of a percent of a hundred steps of 10 ms.
    assert {after - before - 1 for before, after in itertools.pairwise(asked[2:])} == {100}
    dear = played(DraftPace(COSTS), 3000, scheduled(), 0.1)
    assert {after - before - 1 for before, after in itertools.pairwise(dear[2:])} == {256}


def test_a_drafter_comes_back_once_it_pays() -> None:
    pace = DraftPace(COSTS)
    played(pace, 400, scheduled(), 0.002)
    asked = played(pace, 1000, scheduled(0.9), 0.002)
    assert asked[-100:] == list(range(900, 1000))


def test_drafts_that_cost_more_than_they_save_are_given_up() -> None:
    assert len(played(DraftPace(COSTS), 200, scheduled(0.5), 0.006)) < 20


def test_a_prompt_in_the_step_makes_no_draft_pay() -> None:
    costs = StepCosts({1: 0.010, 2: 0.012, 128: 0.264})
    prompt = Request.from_source(EngineRequest("p", (1,) * 90, SamplingParams()), ())
    prompts = [ScheduledRequest(prompt, 0, 40, DraftTree())] * 2
    # Of three that will decode together a token costs 4.7 ms, a row 2 ms: half a token is worth 0.3 ms.
    assert len(played(DraftPace(costs), 200, [*scheduled(0.5), *prompts], 0.001)) < 20
    assert len(played(DraftPace(costs), 200, [*scheduled(0.9), *prompts], 0.001)) == 200


def test_batches_of_another_size_and_other_methods_have_books_of_their_own() -> None:
    pace = DraftPace(COSTS)
    played(pace, 100, scheduled(), 0.002, requests=8)
    assert not pace.asks("medusa", 8)
    assert pace.asks("medusa", 1)
    assert pace.asks("suffix", 8)


def test_a_larger_batch_begins_where_a_smaller_one_stands() -> None:
    pace = DraftPace(COSTS)
    played(pace, 100, scheduled(), 0.002, requests=2)
    assert not pace.asks("medusa", 8)
    assert pace.asks("medusa", 1)
    played(pace, 100, scheduled(0.9), 0.002, requests=1)
    fresh = DraftPace(COSTS)
    played(fresh, 100, scheduled(0.9), 0.002, requests=1)
    assert fresh.asks("medusa", 8)


def test_what_another_method_saves_does_not_count() -> None:
    assert len(played(DraftPace(COSTS), 200, scheduled(0.9, method="suffix"), 0.002)) < 20


def test_without_costs_every_drafter_is_asked() -> None:
    assert len(played(DraftPace(), 300, scheduled(), 1.0)) == 300


@pytest.mark.parametrize("slow", ["read", "propose"])
def test_learning_the_text_does_not_speak_against_drafting(slow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    asked = 0

    class Slow(SuffixDrafter):
        def read(self, contexts: Sequence[DraftContext]) -> None:
            nonlocal now
            now += 0.002 * (slow == "read")

        def propose(self, contexts: Sequence[DraftContext]) -> list[DraftTree]:
            nonlocal now, asked
            asked += 1
            now += 0.002 * (slow == "propose")
            return [DraftTree() for _ in contexts]

    drafting = Drafting([Slow()], SchedulerLimits(1, 8, 64, 4), vocab_size=9, block_size=4, costs=COSTS)
    item = scheduled()[0]
    for _ in range(30):
        drafting.learn_and_propose([(item.request, Emission(tokens=(TokenOutput(1),)))])
        drafting.settle([item])
    assert asked == (30 if slow == "read" else 3)
