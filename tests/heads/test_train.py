"""Training: what heads learn, and that a run broken off anywhere ends as an undisturbed one."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from made_up_answers import HIDDEN, VOCAB, cyclic_answer, cyclic_answers, lm_head

from heads.data import Answer, Ask
from heads.errors import HeadsError
from heads.evaluate import evaluate
from heads.loss import head_losses
from heads.medusa import MedusaHeads
from heads.settings import TrainSettings
from heads.train import CHECKPOINT_FILE, LOG_FILE, Progress, batches, draft_indices, learning_rate, make_batch, train

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


def test_no_answer_teaches_beyond_its_end() -> None:
    batch = make_batch([cyclic_answer(0, length=3), cyclic_answer(1, length=2)], lm_head())
    assert batch.ends.tolist() == [3, 3, 3, 5, 5]
    seen: list[int] = []

    class Spy(torch.nn.Module):
        def forward(self, states: torch.Tensor) -> torch.Tensor:
            seen.append(len(states))
            return states

    heads = torch.nn.Module()
    heads.heads = torch.nn.ModuleList([Spy(), Spy()])
    for loss in head_losses(heads, lm_head(), batch.states, batch.targets, batch.ends):
        assert loss > 0
    assert seen == [3, 1]


def test_targets_are_the_models_own_distribution() -> None:
    """The entropy of the teacher is the least a head can reach, and a perfect head reaches it."""
    torch.manual_seed(0)
    states = torch.randn(6, HIDDEN)
    answer = Answer(Ask((1,), 0.0, 1), (0, 1, 2, 3, 4, 5), states)
    batch = make_batch([answer], lm_head())

    class Foresight(torch.nn.Module):
        def forward(self, given: torch.Tensor) -> torch.Tensor:
            return states[1:]

    heads = torch.nn.Module()
    heads.heads = torch.nn.ModuleList([Foresight()])
    (loss,) = head_losses(heads, lm_head(), batch.states, batch.targets, batch.ends)
    teacher = torch.softmax(lm_head()(states[1:]), dim=-1)
    assert float(loss) == pytest.approx(float(-(teacher * teacher.log()).sum(-1).mean()), rel=1e-5)


def test_tokens_outside_the_draft_vocabulary_are_no_targets() -> None:
    assert draft_indices(torch.tensor([2, 3, 9, 11]), torch.tensor([2, 9, 10])).tolist() == [0, -1, 1, -1]
    batch = make_batch([cyclic_answer(0, length=4)], lm_head([0, 5]))
    assert batch.targets.tolist() == [0, 1, -1, -1]


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


def test_checkpoints_of_other_runs_and_broken_ones_are_refused(tmp_path: Path) -> None:
    train(new_heads(), lm_head(), cyclic_answers(), SETTINGS, tmp_path, lambda _: None)
    other = dataclasses.replace(SETTINGS, learning_rate=1e-3)
    with pytest.raises(HeadsError, match="other answers or settings"):
        train(new_heads(), lm_head(), cyclic_answers(), other, tmp_path, lambda _: None)
    with pytest.raises(HeadsError, match="other answers or settings"):
        train(new_heads(), lm_head(), cyclic_answers(59), SETTINGS, tmp_path, lambda _: None)
    (tmp_path / CHECKPOINT_FILE).write_bytes(b"not a checkpoint")
    with pytest.raises(HeadsError, match="remove it to start again"):
        train(new_heads(), lm_head(), cyclic_answers(), SETTINGS, tmp_path, lambda _: None)
    with pytest.raises(HeadsError, match="no answers"):
        train(new_heads(), lm_head(), [], SETTINGS, tmp_path / "none", lambda _: None)


def test_calibration_is_the_share_that_was_right() -> None:
    """Untrained heads repeat the current token with full confidence, and are never right here."""
    found = evaluate(new_heads(), lm_head(), [cyclic_answer(seed, 40) for seed in range(VOCAB)])
    assert found.positions == VOCAB * 39
    assert found.accuracy[0][1] == 0.0
    assert found.calibration.edges[-1] == 1.0
    assert found.calibration.rates[0][-1] < 0.1
