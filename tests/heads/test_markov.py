"""Markov heads in training: what their logits are, how they begin, and that they learn what Medusa heads cannot."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from made_up_answers import HIDDEN, VOCAB, lm_head

from heads.batch import make_batch
from heads.data import Answer, Ask
from heads.evaluate import evaluate
from heads.loss import DraftHeads, learn
from heads.markov import MarkovHeads, MarkovSizes, start
from heads.medusa import MedusaHeads
from heads.settings import TrainSettings
from heads.train import TrainableHeads, train

DEPTHS, RANK = 3, 4
DRAFTED = [0, 2, 3, 7, 11]


def new_heads(draft_vocab: int = VOCAB, depths: int = DEPTHS) -> MarkovHeads:
    made = MarkovHeads(MedusaHeads(HIDDEN, depths, 2), MarkovSizes(RANK, VOCAB, draft_vocab))
    start(made, 0)
    return made


def random_heads(draft_vocab: int = VOCAB) -> MarkovHeads:
    made = new_heads(draft_vocab)
    torch.manual_seed(1)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return made


def answer(length: int, seed: int) -> Answer:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCAB, (length,), generator=generator).tolist()
    return Answer(Ask((seed,), 0.0, seed), tuple(tokens), torch.randn(length, HIDDEN, generator=generator))


def all_logits(heads: DraftHeads, answers: list[Answer], token_ids: list[int] | None = None) -> list[torch.Tensor]:
    shared = lm_head(token_ids)
    outputs = heads.outputs(make_batch(answers, shared))
    return [heads.logits(shared, output, depth) for depth, output in enumerate(outputs, start=1)]


@torch.no_grad()
def test_logits_are_those_of_the_definition() -> None:
    """Row by row with plain matrices; a token outside the draft vocabulary may be the one before."""
    answers, made = [answer(6, 1), answer(1, 2), answer(4, 3)], random_heads(len(DRAFTED))
    weights, shared = made.state_dict(), lm_head(DRAFTED).linear.weight
    for depth, found in enumerate(all_logits(made, answers, DRAFTED), start=1):
        expected = []
        for one in answers:
            for row in range(len(one.tokens) - depth):
                x = one.states[row]
                for block in range(2):
                    name = f"medusa.heads.{depth - 1}.{block}.linear"
                    z = weights[f"{name}.weight"] @ x + weights[f"{name}.bias"]
                    x = x + z * torch.sigmoid(z)
                before = weights["embedding.weight"][one.tokens[row + depth - 1]]
                expected.append(shared @ x + weights[f"biases.{depth - 1}.weight"] @ before)
        assert found.shape == (len(expected), len(DRAFTED))
        assert torch.allclose(found, torch.stack(expected), atol=1e-4)


@torch.no_grad()
def test_new_heads_are_medusa_heads() -> None:
    answers, made = [answer(6, 1), answer(4, 3)], new_heads()
    for parameter in made.medusa.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    for found, expected in zip(all_logits(made, answers), all_logits(made.medusa, answers), strict=True):
        assert torch.equal(found, expected)


def test_new_heads_leave_that_beginning() -> None:
    made, shared = new_heads(), lm_head()
    batch = make_batch([answer(6, 1)], shared)
    learn(made, shared, batch, [1.0] * DEPTHS)
    gradient = made.embedding.weight.grad
    assert gradient is not None
    seen = set(batch.tokens[:5].tolist())
    assert set(gradient.any(dim=1).nonzero().flatten().tolist()) == seen, "of the tokens that another follows"


def text(seed: int) -> Answer:
    """Each token is followed by one of two; two further on there are four, and which two of them, the token between
    alone can tell. The states say which token they chose, so that the teacher's distribution is sharp."""
    draw = random.Random(seed)
    tokens = [draw.randrange(VOCAB)]
    while len(tokens) < 16:
        tokens.append((5 * tokens[-1] + draw.choice((1, 2))) % VOCAB)
    states = torch.nn.functional.one_hot(torch.tensor(tokens), HIDDEN).float()
    return Answer(Ask((seed,), 0.0, seed), tuple(tokens), states)


def trained(heads: TrainableHeads, folder: Path) -> list[float]:
    """How often the token is among the three likeliest, by depth: always, for heads that know the bigrams."""
    settings = TrainSettings(num_heads=DEPTHS, epochs=12, batch_tokens=64, learning_rate=2e-2)
    train(heads, lm_head(), [text(seed) for seed in range(100)], settings, folder, lambda _: None)
    found = evaluate(heads, lm_head(), [text(seed) for seed in range(200, 240)])
    return [accuracy[3] for accuracy in found.accuracy]


def test_they_learn_bigrams_that_medusa_heads_cannot(tmp_path: Path) -> None:
    markov = trained(new_heads(), tmp_path / "markov")
    medusa = trained(MedusaHeads(HIDDEN, DEPTHS, 2), tmp_path / "medusa")
    assert min(markov) > 0.95
    assert medusa[0] > 0.95, "depth 1 follows from the state's own token"
    assert max(medusa[1:]) < 0.85


@pytest.mark.parametrize("depths", [1, 2])
def test_as_many_heads_as_asked_for(depths: int) -> None:
    made = new_heads(depths=depths)
    assert (made.num_heads, len(made.biases)) == (depths, depths)
    assert len({id(bias) for bias in made.biases}) == depths
