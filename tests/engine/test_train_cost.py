"""The estimate's arithmetic, on a fake clock and on numbers that can be reckoned by hand."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from engine.train_cost import Cost, Done, Machine, Rates, Workload, cost, tell
from engine.train_slice import AnswerPace, made_up_answers, with_contexts
from heads.data import Answer, Ask, Context

WORK = Workload(
    target=1600, asks=100, max_tokens=40, prompt_tokens=1000, epochs=3, hidden=8, context=0, parameters=1000
)
RATES = Rates(answers=10.0, contexts=50.0, training=20.0)


def test_a_run_from_the_start() -> None:
    """1600 tokens at 10 a second; three epochs of 15/16 of them at 20 a second."""
    found = cost(WORK, Done(), RATES)
    assert (found.answers, found.contexts, found.training) == (160.0, 0.0, 225.0)
    assert found.seconds == 385.0
    # 40 answers of 40 tokens: states in half precision and ids; prompts of 10 tokens; a checkpoint and the one before
    # (3 numbers of 4 bytes a parameter); the heads in half precision.
    assert found.disk == 1600 * (2 * 8 + 4) + 40 * 10 * 4 + 2 * 1000 * 12 + 2 * 1000
    # In memory one copy: weights, moments, gradients.
    assert found.held == 1600 * (2 * 8 + 4) + 40 * 10 * 4 + 1000 * 16


def test_contexts_are_read_for_every_token_and_kept_beside_the_answers() -> None:
    """2000 entries, 40 prompts of 10 tokens with the answers' 1600, of 6 numbers each; prompts' states."""
    found = cost(dataclasses.replace(WORK, context=6), Done(), RATES)
    assert found.contexts == 2000 / 50
    assert found.disk - cost(WORK, Done(), RATES).disk == 2 * (2000 * 6 + 400 * 8)
    assert found.held - cost(WORK, Done(), RATES).held == 2 * (2000 * 6 + 400 * 8)


def test_what_is_done_is_not_counted_again() -> None:
    """Answers turned out 20 tokens long: 80 of them make 1600."""
    work = dataclasses.replace(WORK, context=6)
    done = Done(answers=20, tokens=400, writing=100, entries=600, trained=0.0)
    found = cost(work, done, RATES)
    assert found.answers == (1600 - 400 - 100) / 10
    assert found.contexts == (1600 + 80 * 10 - 600) / 50
    trained = cost(
        work, Done(answers=80, tokens=1600, entries=2400, trained=0.8), dataclasses.replace(RATES, answers=0)
    )
    assert trained.answers == 0.0
    assert trained.contexts == 0.0
    assert trained.training == pytest.approx(0.2 * 225)


def test_few_prompts_end_before_the_tokens_wanted() -> None:
    few = dataclasses.replace(WORK, asks=10, prompt_tokens=100)
    assert cost(few, Done(), RATES).answers == 10 * 40 / 10
    assert cost(few, Done(answers=5, tokens=100), RATES).answers == (10 * 20 - 100) / 10
    assert cost(few, Done(answers=10, tokens=1700), RATES).answers == 0.0


def test_what_is_told() -> None:
    found = Cost(answers=90.0, contexts=30.0, training=600.0, disk=2_000_000, held=500_000_000)
    machine = Machine(used=1_500_000_000, free=30_000_000_000, is_cpu=True)
    lines = list(tell(found, WORK, machine))
    assert lines == [
        "Estimate from a measured slice: answers 1.5 min, training 10 min, in all 12 min from here; "
        "the test at the end is not counted",
        "It takes up to 2 MB on disk (30.0 GB free) and about 2.0 GB of main memory",
    ]
    assert "contexts 0.5 min" in next(tell(found, dataclasses.replace(WORK, context=6), machine))


@pytest.mark.parametrize(("minutes", "is_cpu", "is_told"), [(149, True, False), (151, True, True), (999, False, False)])
def test_a_long_run_on_a_cpu_is_told_how_to_shrink(minutes: int, is_cpu: bool, is_told: bool) -> None:
    found = Cost(answers=60.0 * (minutes - 30), contexts=0.0, training=1800.0, disk=1, held=1)
    lines = list(tell(found, WORK, Machine(1, 1, is_cpu)))
    assert ("--tokens, now 1600" in lines[-1] and "training.epochs=, now 3" in lines[-1]) is is_told


class Clock:
    """Stands still until told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_pace_is_told_once_after_half_a_minute_and_tokens_enough() -> None:
    clock, told = Clock(), list[float]()
    pace = AnswerPace(8, told.append, clock)
    clock.now += 1000.0  # before the first answer is begun nothing counts
    pace.begin()
    clock.now += 29.0
    pace.count(40)
    assert told == []
    pace.begin()  # a second shard; the clock goes on
    clock.now += 2.0
    pace.count(22)
    assert told == [2.0]
    clock.now += 60.0
    pace.count(100)
    pace.finish()
    assert told == [2.0]


def test_a_slow_model_is_given_the_time_for_some_tokens() -> None:
    clock, told = Clock(), list[float]()
    pace = AnswerPace(8, told.append, clock)
    pace.begin()
    for _ in range(4):
        clock.now += 30.0
        pace.count(8)
    assert told == [32 / 120]


def test_a_run_that_ends_early_or_writes_nothing_is_told_of_too() -> None:
    clock, told = Clock(), list[float]()
    pace = AnswerPace(8, told.append, clock)
    pace.finish()
    assert told == [0.0]
    pace = AnswerPace(8, told.append, clock)
    pace.begin()
    clock.now += 4.0
    pace.count(6)
    pace.finish()
    assert told == [0.0, 1.5]


ASKS = [Ask((1, 2, 3), 0.0, 1), Ask((4, 5), 0.8, 2)]


def test_made_up_answers_are_as_large_as_a_step() -> None:
    before = torch.get_rng_state()
    answers = made_up_answers(ASKS, (16, 8, 50), 40)
    assert [answer.ask for answer in answers] == [ASKS[0], ASKS[1], ASKS[0]]
    assert all(len(answer.tokens) == 16 and answer.states.shape == (16, 8) for answer in answers)
    assert all(0 <= token < 50 for answer in answers for token in answer.tokens)
    assert torch.equal(torch.get_rng_state(), before), "a run's own random numbers must not move"


def test_contexts_are_timed_after_one_to_warm_up() -> None:
    clock = Clock()
    empty = Context(*(torch.empty(0) for _ in range(4)))

    def add_context(answer: Answer) -> Answer:
        clock.now += 2.0
        return dataclasses.replace(answer, context=empty)

    answers = made_up_answers(ASKS, (16, 8, 50), 32)
    read, rate = with_contexts(answers, add_context, clock)
    assert [answer.context for answer in read] == [empty, empty]
    assert rate == pytest.approx((3 + 16 + 2 + 16) / 4.0)
