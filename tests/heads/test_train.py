"""Training: what heads learn, and that a run broken off anywhere ends as an undisturbed one."""

from __future__ import annotations

import dataclasses
import json
import resource
from pathlib import Path

import pytest
import torch
from made_up_answers import HIDDEN, VOCAB, cyclic_answer, cyclic_answers, lm_head

from heads.errors import HeadsError
from heads.evaluate import evaluate
from heads.medusa import MedusaHeads
from heads.settings import TrainSettings
from heads.train import (
    CHECKPOINT_FILE,
    LOG_FILE,
    Progress,
    batches,
    learning_rate,
    share_trained,
    train,
    training_rate,
)

SETTINGS = TrainSettings(num_heads=2, epochs=6, batch_tokens=64, learning_rate=1e-2, checkpoint_steps=10)


def new_heads(num_heads: int = 2) -> MedusaHeads:
    return MedusaHeads(HIDDEN, num_heads, 2)


def test_heads_learn_the_token_that_is_theirs(tmp_path: Path) -> None:
    """Step 5 in a cycle of 12: only the right distance gives the right token, so an off-by-one would show."""
    heads = new_heads()
    train(heads, lm_head(), cyclic_answers(), SETTINGS, tmp_path, lambda _: None)
    found = evaluate(heads, lm_head(), [cyclic_answer(seed) for seed in range(VOCAB)])
    assert [accuracy[1] for accuracy in found.accuracy] == pytest.approx([1.0, 1.0])
    with torch.no_grad():
        state = cyclic_answer(3).states[:1].float()
        ahead = lm_head()(heads(state)).argmax(dim=-1).flatten().tolist()
    assert ahead == [(3 + 5) % VOCAB, (3 + 10) % VOCAB]


def test_the_loss_falls_towards_that_of_a_perfect_head(tmp_path: Path) -> None:
    told: list[Progress] = []
    train(new_heads(), lm_head(), cyclic_answers(), SETTINGS, tmp_path, told.append)
    least = float(torch.distributions.Categorical(logits=lm_head()(torch.eye(HIDDEN)[0])).entropy())
    for head in range(2):
        assert told[0].head_losses[head] > 5.0, "a new head is sure of the wrong token"
        assert least < told[-1].head_losses[head] < 0.5
    lines = [json.loads(line) for line in (tmp_path / LOG_FILE).read_text().splitlines()]
    assert [line["loss"] for line in lines] == pytest.approx([done.loss for done in told], abs=1e-5)
    assert told[0].loss == pytest.approx(told[0].head_losses[0] + 0.8 * told[0].head_losses[1])


def test_batches_hold_every_answer_once_an_epoch_in_an_order_of_the_seed() -> None:
    answers = cyclic_answers()
    plan = batches(answers, SETTINGS)
    assert plan == batches(answers, SETTINGS)
    assert plan != batches(answers, dataclasses.replace(SETTINGS, seed=1))
    flat = [index for step in plan for index in step]
    for epoch in range(SETTINGS.epochs):
        assert sorted(flat[epoch * len(answers) : (epoch + 1) * len(answers)]) == list(range(len(answers)))
    sizes = [sum(len(answers[index].tokens) for index in step) for step in plan]
    assert max(sizes) < 64 + 17


def test_the_learning_rate_rises_then_falls_to_nothing() -> None:
    rates = [learning_rate(step, 100, SETTINGS) for step in range(100)]
    assert rates[0] < rates[4] == pytest.approx(1e-2)
    assert rates[5:] == sorted(rates[5:], reverse=True)
    assert rates[-1] < 1e-5


class Broken(Exception):
    """Stands for a kill."""


@pytest.mark.parametrize("steps", [1, 9, 10, 15, 37])
def test_a_run_broken_off_ends_as_an_undisturbed_one(tmp_path: Path, steps: int) -> None:
    answers = cyclic_answers()
    whole = new_heads()
    train(whole, lm_head(), answers, SETTINGS, tmp_path / "whole", lambda _: None)

    def stop(done: Progress) -> None:
        if done.step == steps:
            raise Broken

    with pytest.raises(Broken):
        train(new_heads(), lm_head(), answers, SETTINGS, tmp_path / "broken", stop)
    resumed, first = new_heads(), []
    train(resumed, lm_head(), answers, SETTINGS, tmp_path / "broken", lambda done: first.append(done.step))
    assert first[0] == steps // 10 * 10 + 1
    for name, parameter in whole.state_dict().items():
        assert torch.equal(parameter, resumed.state_dict()[name]), name
    lines = [json.loads(line) for line in (tmp_path / "broken" / LOG_FILE).read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, lines[0]["steps"] + 1))


@pytest.mark.parametrize(("step_takes", "steps"), [(0.25, 20), (3.0, 4)])
def test_the_rate_is_that_of_timed_steps_on_a_copy(step_takes: float, steps: int) -> None:
    """Twenty steps or ten seconds; two that warm up do not count. Nothing is left of it in the heads."""
    heads, answers, calls = new_heads(), cyclic_answers(6), 0
    before = {name: parameter.clone() for name, parameter in heads.state_dict().items()}

    def clock() -> float:
        nonlocal calls
        calls += 1
        return calls * step_takes

    tokens = sum(len(answer.tokens) for answer in answers)
    assert training_rate(heads, lm_head(), answers, SETTINGS, clock) == pytest.approx(tokens / step_takes)
    assert calls == steps + 1
    assert all(torch.equal(parameter, before[name]) for name, parameter in heads.state_dict().items())
    assert all(parameter.grad is None for parameter in heads.parameters())


def test_the_share_trained_is_in_the_log(tmp_path: Path) -> None:
    assert share_trained(tmp_path) == 0.0
    shares: list[float] = []
    train(
        new_heads(), lm_head(), cyclic_answers(), SETTINGS, tmp_path, lambda _: shares.append(share_trained(tmp_path))
    )
    assert shares[-1] == 1.0
    assert shares[9] == pytest.approx(10 / len(shares))


def test_a_finished_run_is_not_repeated(tmp_path: Path) -> None:
    for expected in (True, False):
        steps: list[int] = []
        train(
            new_heads(),
            lm_head(),
            cyclic_answers(),
            SETTINGS,
            tmp_path,
            lambda done, steps=steps: steps.append(done.step),
        )
        assert bool(steps) is expected


def test_a_checkpoint_without_room_is_an_error_of_the_disk(tmp_path: Path) -> None:
    """The limit on a file's size stands for a full disk; the checkpoint is more than a file object holds back."""
    heads = MedusaHeads(HIDDEN, 2, 40)
    settings = dataclasses.replace(SETTINGS, checkpoint_steps=1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            train(heads, lm_head(), cyclic_answers(), settings, tmp_path, lambda _: None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not (tmp_path / CHECKPOINT_FILE).exists()


def test_checkpoints_of_other_runs_and_broken_ones_are_refused(tmp_path: Path) -> None:
    train(new_heads(), lm_head(), cyclic_answers(), SETTINGS, tmp_path, lambda _: None)
    other = dataclasses.replace(SETTINGS, learning_rate=1e-3)
    with pytest.raises(HeadsError, match="other answers or settings"):
        train(new_heads(), lm_head(), cyclic_answers(), other, tmp_path, lambda _: None)
    with pytest.raises(HeadsError, match="other answers or settings"):
        train(new_heads(), lm_head(), cyclic_answers(59), SETTINGS, tmp_path, lambda _: None)
    whole = (tmp_path / CHECKPOINT_FILE).read_bytes()
    for damaged in (b"not a checkpoint", b"", whole[: len(whole) // 2]):
        (tmp_path / CHECKPOINT_FILE).write_bytes(damaged)
        with pytest.raises(HeadsError, match="remove it to start again") as refused:
            train(new_heads(), lm_head(), cyclic_answers(), SETTINGS, tmp_path, lambda _: None)
        assert "\n" not in str(refused.value)
    for foreign in ({"step": 3}, [1, 2], torch.zeros(2)):
        torch.save(foreign, tmp_path / CHECKPOINT_FILE)
        with pytest.raises(HeadsError, match="remove it to start again"):
            train(new_heads(), lm_head(), cyclic_answers(), SETTINGS, tmp_path, lambda _: None)
    with pytest.raises(HeadsError, match="no answers"):
        train(new_heads(), lm_head(), [], SETTINGS, tmp_path / "none", lambda _: None)
