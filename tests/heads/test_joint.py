"""Joint training against the same loss written out in one expression, on a base model that is one matrix."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from made_up_answers import HIDDEN, VOCAB, cyclic_answers, lm_head

from heads.batch import make_batch
from heads.data import Answer
from heads.errors import HeadsError
from heads.joint import Joint, Reading, divergence, learn_jointly
from heads.lm_head import DraftLmHead, OutputHead
from heads.loss import depth_loss, teacher_of
from heads.medusa import MedusaHeads
from heads.settings import LoraSettings, TrainSettings
from heads.train import base_learning_rate, learning_rate, train

LORA = LoraSettings(learning_rate=1e-2, base_weight=1.5, heads_first=0.4)
SETTINGS = TrainSettings(num_heads=2, epochs=2, batch_tokens=64, learning_rate=1e-2, checkpoint_steps=3)


class MatrixBase:
    """States are the stored ones times (1 + change)."""

    def __init__(self, scale: float = 0.0) -> None:
        generator = torch.Generator().manual_seed(4)
        self.change = torch.nn.Parameter(scale * torch.randn(HIDDEN, HIDDEN, generator=generator))

    def read(self, answers: Sequence[Answer]) -> Reading:
        states = torch.cat([answer.states for answer in answers]).float()
        return Reading(states + states @ self.change, ())

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        yield self.change

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"change": self.change.detach()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.change.copy_(state["change"])


def made_heads() -> MedusaHeads:
    torch.manual_seed(1)
    heads = MedusaHeads(HIDDEN, 2)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return heads


def soft_head(token_ids: list[int] | None = None) -> DraftLmHead:
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(VOCAB, HIDDEN, generator=generator)
    return DraftLmHead(OutputHead(weight), None if token_ids is None else torch.tensor(token_ids))


def test_one_walk_gives_the_gradients_of_the_whole_loss() -> None:
    """Of heads over a part of the vocabulary, and more rows than are worked off at a time."""
    answers = cyclic_answers(12)
    drafted = soft_head([0, 1, 3, 4, 6, 7, 9, 11])
    found, wanted = (made_heads(), MatrixBase(0.2)), (made_heads(), MatrixBase(0.2))
    losses, kl = learn_jointly(Joint(found[1], soft_head(), LORA), found[0], drafted, answers, [1.0, 0.5])

    heads, base = wanted
    original = make_batch(answers, drafted)
    assert len(original.states) > 128
    states = original.states + original.states @ base.change
    batch = dataclasses.replace(original, states=states)
    teacher = teacher_of(drafted, original)
    parts = [
        depth_loss(heads, drafted, batch, teacher, depth, output)
        for depth, output in enumerate(heads.outputs(batch), start=1)
    ]
    before, now = (soft_head()(s).log_softmax(dim=-1) for s in (original.states, states))
    drift = (before.exp() * (before - now)).sum(dim=-1).mean()
    (parts[0] + 0.5 * parts[1] + 1.5 * drift).backward()

    assert losses == pytest.approx([part.item() for part in parts], rel=1e-5)
    assert kl == pytest.approx(drift.item(), rel=1e-4)
    assert kl > 0.01
    for one, other in zip([*found[0].parameters(), found[1].change], [*heads.parameters(), base.change], strict=True):
        assert one.grad is not None
        assert torch.allclose(one.grad, other.grad, rtol=1e-4, atol=1e-6)
    assert float(base.change.grad.abs().max()) > 1e-3


def test_divergence_is_that_of_torch_and_zero_to_itself() -> None:
    generator = torch.Generator().manual_seed(3)
    one, other = torch.randn(2, 7, HIDDEN, generator=generator)
    p, q = (torch.distributions.Categorical(logits=soft_head()(states)) for states in (one, other))
    expected = torch.distributions.kl_divergence(p, q)
    assert torch.allclose(divergence(soft_head(), one, other), expected, atol=1e-5)
    assert torch.allclose(divergence(soft_head(), one, one), torch.zeros(7), atol=1e-6)


def test_the_base_begins_after_the_heads_and_falls_with_them() -> None:
    settings = dataclasses.replace(SETTINGS, warmup=0.1)
    rates = [base_learning_rate(step, 100, settings, LORA) for step in range(100)]
    assert rates[:40] == [0.0] * 40
    shares = [learning_rate(step, 100, settings) / settings.learning_rate for step in range(100)]
    assert rates[40:50] == pytest.approx([1e-2 * shares[40 + step] * (step + 1) / 10 for step in range(10)])
    assert rates[50:] == sorted(rates[50:], reverse=True)
    assert rates[60] == pytest.approx(1e-2 * shares[60])
    at_once = dataclasses.replace(LORA, heads_first=0.0)
    assert max(base_learning_rate(step, 100, settings, at_once) for step in range(100)) == pytest.approx(1e-2)


class Broken(Exception):
    """Stands for a kill."""


@pytest.mark.parametrize("steps", [2, 7, 14])
def test_base_and_heads_go_on_where_they_stood(tmp_path: Path, steps: int) -> None:
    def run(folder: Path, stops: int | None) -> tuple[MedusaHeads, MatrixBase]:
        heads, base = made_heads(), MatrixBase()

        def stop(done: Any) -> None:
            if done.step == stops:
                raise Broken

        train(heads, lm_head(), cyclic_answers(), SETTINGS, folder, stop, Joint(base, lm_head(), LORA))
        return heads, base

    whole = run(tmp_path / "whole", None)
    with pytest.raises(Broken):
        run(tmp_path / "broken", steps)
    resumed = run(tmp_path / "broken", None)
    assert bool(whole[1].change.any())
    assert torch.equal(whole[1].change, resumed[1].change)
    assert all(torch.equal(tensor, resumed[0].state_dict()[name]) for name, tensor in whole[0].state_dict().items())
    other = Joint(MatrixBase(), lm_head(), dataclasses.replace(LORA, base_weight=2.0))
    with pytest.raises(HeadsError, match="other answers or settings"):
        train(made_heads(), lm_head(), cyclic_answers(), SETTINGS, tmp_path / "whole", lambda _: None, other)
