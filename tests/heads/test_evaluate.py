"""Accuracy and calibration of heads whose guesses are known, against counting by hand and in loops."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from made_up_answers import VOCAB, cyclic_answer, lm_head

from heads.config import CONFIDENCE_EDGES
from heads.data import Answer, Ask
from heads.evaluate import TOP, evaluate
from heads.lm_head import DraftLmHead, OutputHead
from heads.medusa import MedusaHeads

PRIOR = 20.0  # what the heads' own confidence weighs


class SaysAlways(torch.nn.Module):
    def __init__(self, probabilities: Sequence[float]) -> None:
        super().__init__()
        self.logits = torch.tensor(probabilities).log()

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.logits.expand(len(states), -1)


def heads_that_say(*rows: Sequence[float]) -> MedusaHeads:
    heads = MedusaHeads(len(rows[0]), len(rows))
    heads.heads = torch.nn.ModuleList([SaysAlways(row) for row in rows])
    return heads


def plain_lm_head(size: int, token_ids: list[int]) -> DraftLmHead:
    """The logit of drafted token i is number i of the state."""
    weight = torch.zeros(VOCAB, size)
    weight[token_ids] = torch.eye(size)
    return DraftLmHead(OutputHead(weight), torch.tensor(token_ids))


def answer(tokens: Sequence[int], size: int) -> Answer:
    return Answer(Ask((len(tokens),), 0.0, 0), tuple(tokens), torch.zeros(len(tokens), size))


def bucket(confidence: float) -> int:
    return next(index for index, edge in enumerate(CONFIDENCE_EDGES) if confidence <= edge)


def test_counted_by_hand() -> None:
    """Drafted are 2, 4 and 7; nine stands for what cannot be drafted."""
    heads = heads_that_say([0.6, 0.3, 0.1], [0.2, 0.1, 0.7])
    shared = plain_lm_head(3, [2, 4, 7])
    found = evaluate(heads, shared, [answer([9, 2, 4, 2, 9, 7], 3), answer([2, 2], 3)])
    # One ahead: 2 4 2 9 7 and 2. Two ahead: 4 2 9 7.
    assert found.positions == 6
    assert found.accuracy[0] == pytest.approx({1: 3 / 6, 3: 5 / 6, 5: 5 / 6, 10: 5 / 6})
    assert found.accuracy[1] == pytest.approx({1: 1 / 4, 3: 3 / 4, 5: 3 / 4, 10: 3 / 4})
    rates = found.calibration.rates
    assert rates[0][bucket(0.6)] == pytest.approx((3 + PRIOR * 0.6) / (6 + PRIOR), abs=1e-4)
    assert rates[0][bucket(0.3)] == pytest.approx((1 + PRIOR * 0.3) / (6 + PRIOR), abs=1e-4)
    # Head 2 counts where the token before could be drafted: 4 2 9, not the 7 behind the 9.
    assert rates[1][bucket(0.7)] == pytest.approx((0 + PRIOR * 0.7) / (3 + PRIOR), abs=1e-4)
    assert rates[1][bucket(0.2)] == pytest.approx((1 + PRIOR * 0.2) / (3 + PRIOR), abs=1e-4)


def test_a_bucket_that_no_candidate_fell_into_keeps_its_own_confidence() -> None:
    found = evaluate(heads_that_say([0.6, 0.3, 0.1]), plain_lm_head(3, [2, 4, 7]), [answer([2, 2], 3)])
    assert found.calibration.rates[0][0] == pytest.approx(CONFIDENCE_EDGES[0] / 2, abs=1e-4)
    assert found.calibration.rates[0][-1] == pytest.approx(0.95)


def test_counted_in_loops_over_more_than_one_part() -> None:
    """So many answers that they are evaluated in several parts; no position is lost or counted across answers."""
    draw = random.Random(1)
    # Each confidence has a bucket of its own.
    rows = ([0.4, 0.28, 0.22, 0.1], [0.06, 0.13, 0.3, 0.51], [0.3, 0.55, 0.045, 0.105])
    drafted = [1, 3, 4, 10]
    answers = [answer(draw.choices(range(VOCAB), k=draw.randint(1, 30)), 4) for _ in range(150)]
    assert sum(len(one.tokens) for one in answers) > 2048
    found = evaluate(heads_that_say(*rows), plain_lm_head(4, drafted), answers)
    for depth, row in enumerate(rows, start=1):
        ranked = sorted(range(4), key=lambda index: -row[index])
        seen, reached, right, hits = 0, 0, [0] * 4, dict.fromkeys(TOP, 0)
        for one in answers:
            for i in range(len(one.tokens) - depth):
                truth = one.tokens[i + depth]
                seen += 1
                for count in TOP:
                    hits[count] += truth in [drafted[index] for index in ranked[:count]]
                if all(token in drafted for token in one.tokens[i + 1 : i + depth]):
                    reached += 1
                    for index in range(4):
                        right[index] += truth == drafted[index]
        assert found.accuracy[depth - 1] == pytest.approx({count: hits[count] / seen for count in TOP})
        for index in range(4):
            wanted = (right[index] + PRIOR * row[index]) / (reached + PRIOR)
            assert found.calibration.rates[depth - 1][bucket(row[index])] == pytest.approx(wanted, abs=1e-4)


def test_confident_heads_that_are_never_right_lose_their_confidence() -> None:
    """Untrained heads repeat the current token, which never follows here."""
    found = evaluate(MedusaHeads(16, 2), lm_head(), [cyclic_answer(seed, 40) for seed in range(VOCAB)])
    assert found.positions == VOCAB * 39
    assert found.accuracy[0][1] == 0.0
    assert found.calibration.rates[0][-1] < 0.1
