"""The loss of heads against the same sums written out in loops."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from made_up_answers import HIDDEN, VOCAB, cyclic_answer, lm_head

from heads.batch import Batch, draft_indices, make_batch
from heads.data import Answer, Ask
from heads.lm_head import DraftLmHead, OutputHead
from heads.loss import depth_loss, learn, teacher_of
from heads.medusa import MedusaHeads


def random_answers() -> list[Answer]:
    generator = torch.Generator().manual_seed(0)
    answers = []
    for seed, length in enumerate((5, 1, 7, 2, 4)):
        tokens = torch.randint(0, VOCAB, (length,), generator=generator).tolist()
        answers.append(Answer(Ask((seed,), 0.0, seed), tuple(tokens), torch.randn(length, HIDDEN, generator=generator)))
    return answers


def random_heads(num_heads: int) -> MedusaHeads:
    torch.manual_seed(1)
    heads = MedusaHeads(HIDDEN, num_heads)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return heads


def random_lm_head(token_ids: list[int] | None) -> DraftLmHead:
    generator = torch.Generator().manual_seed(2)
    head = OutputHead(
        torch.randn(VOCAB, HIDDEN, generator=generator), torch.randn(VOCAB, generator=generator), scale=0.5, softcap=2.0
    )
    return DraftLmHead(head, None if token_ids is None else torch.tensor(token_ids))


def losses_of(heads: MedusaHeads, shared: DraftLmHead, batch: Batch) -> list[torch.Tensor]:
    teacher = teacher_of(shared, batch)
    return [
        depth_loss(heads, shared, batch, teacher, depth, output)
        for depth, output in enumerate(heads.outputs(batch), start=1)
    ]


def heads_of(*parts: torch.nn.Module) -> MedusaHeads:
    heads = MedusaHeads(HIDDEN, len(parts))
    heads.heads = torch.nn.ModuleList(parts)
    return heads


def written_out(answers: list[Answer], heads: MedusaHeads, shared: DraftLmHead) -> Iterator[float]:
    """Of each head the mean over every pair of a state and the one k tokens later in the same answer."""
    drafted = shared.token_ids.tolist()
    for depth, head in enumerate(heads.heads, start=1):
        values = []
        for answer in answers:
            for i in range(len(answer.tokens) - depth):
                if answer.tokens[i + depth] in drafted:
                    teacher = torch.softmax(shared(answer.states[i + depth]), dim=0)
                    student = torch.log_softmax(shared(head(answer.states[i])), dim=0)
                    values.append(-float(teacher @ student))
        yield sum(values) / len(values)


@pytest.mark.parametrize("token_ids", [None, [0, 2, 3, 5, 8, 11]])
@torch.no_grad()
def test_each_head_is_taught_by_the_state_that_many_tokens_later(token_ids: list[int] | None) -> None:
    answers, heads, shared = random_answers(), random_heads(3), random_lm_head(token_ids)
    batch = make_batch(answers, shared)
    found = [float(loss) for loss in losses_of(heads, shared, batch)]
    assert found == pytest.approx(list(written_out(answers, heads, shared)), rel=1e-5)


def test_no_answer_teaches_beyond_its_end() -> None:
    batch = make_batch([cyclic_answer(0, length=3), cyclic_answer(1, length=2)], lm_head())
    assert batch.ends.tolist() == [3, 3, 3, 5, 5]
    seen: list[int] = []

    class Spy(torch.nn.Module):
        def forward(self, states: torch.Tensor) -> torch.Tensor:
            seen.append(len(states))
            return states

    assert all(loss > 0 for loss in losses_of(heads_of(Spy(), Spy()), lm_head(), batch))
    assert seen == [3, 1]


def test_the_least_loss_is_the_entropy_of_the_models_own_distribution() -> None:
    torch.manual_seed(0)
    states = torch.randn(6, HIDDEN)
    batch = make_batch([Answer(Ask((1,), 0.0, 1), (0, 1, 2, 3, 4, 5), states)], lm_head())

    class Foresight(torch.nn.Module):
        def forward(self, given: torch.Tensor) -> torch.Tensor:
            return states[1:]

    (loss,) = losses_of(heads_of(Foresight()), lm_head(), batch)
    teacher = torch.softmax(lm_head()(states[1:]), dim=-1)
    assert float(loss) == pytest.approx(float(-(teacher * teacher.log()).sum(-1).mean()), rel=1e-5)


def test_a_head_without_a_position_learns_nothing_and_breaks_nothing() -> None:
    """Answers shorter than the head's distance, or wholly outside the draft vocabulary."""
    heads = random_heads(3)
    batch = make_batch([cyclic_answer(0, length=3)], lm_head())
    losses = losses_of(heads, lm_head(), batch)
    assert losses[2].item() == 0.0
    outside = make_batch([cyclic_answer(0, length=3)], lm_head([1, 2]))
    for loss in losses_of(heads, lm_head([1, 2]), outside):
        assert loss.item() == 0.0
        loss.backward()
    assert all(
        parameter.grad is None or math.isclose(float(parameter.grad.abs().max()), 0.0)
        for parameter in heads.parameters()
    )


def test_tokens_outside_the_draft_vocabulary_are_no_targets() -> None:
    assert draft_indices(torch.tensor([2, 3, 9, 11]), torch.tensor([2, 9, 10])).tolist() == [0, -1, 1, -1]
    batch = make_batch([cyclic_answer(0, length=4)], lm_head([0, 5]))
    assert batch.targets.tolist() == [0, 1, -1, -1]


def test_the_gradient_is_that_of_the_weighted_sum() -> None:
    """``learn`` works the vocabulary off depth by depth, which must not change what is learned."""
    answers, shared = random_answers(), random_lm_head([0, 2, 3, 5, 8, 11])
    batch, weights = make_batch(answers, shared), (1.0, 0.8, 0.64)
    told, whole = random_heads(3), random_heads(3)
    losses = learn(told, shared, batch, weights)
    expected = losses_of(whole, shared, batch)
    assert losses == pytest.approx([float(loss.detach()) for loss in expected], rel=1e-5)
    sum(weight * loss for weight, loss in zip(weights, expected, strict=True)).backward()
    for found, wanted in zip(told.parameters(), whole.parameters(), strict=True):
        assert torch.allclose(found.grad, wanted.grad, rtol=1e-4, atol=1e-6)
