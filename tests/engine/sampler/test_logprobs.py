"""Log-probabilities come from raw logits, in the right precision, best first."""

from __future__ import annotations

import math

import pytest
import torch

from engine.errors import RequestFailedError
from engine.outputs import TokenLogprob
from engine.sampler.logprobs import token_logprobs


def test_the_chosen_token_and_the_best_ones() -> None:
    rows = torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.1, 0.1, 0.7, 0.1]], dtype=torch.float64).log() + 3.0
    first, second = token_logprobs(rows, [2, 3], 3)
    assert first.logprob == pytest.approx(math.log(0.2), abs=1e-12)
    assert [token for token, _ in first.top] == [0, 1, 2]
    assert [value for _, value in first.top] == pytest.approx([math.log(p) for p in (0.4, 0.3, 0.2)], abs=1e-12)
    assert second.logprob == pytest.approx(math.log(0.1), abs=1e-12)
    assert [token for token, _ in second.top] == [2, 0, 1]


def test_no_top_and_more_top_than_tokens() -> None:
    rows = torch.zeros(1, 3)
    assert token_logprobs(rows, [1], 0)[0].top == ()
    assert len(token_logprobs(rows, [1], 5)[0].top) == 3


def test_minus_infinity_becomes_the_wire_value() -> None:
    result = token_logprobs(torch.tensor([[0.0, -torch.inf, 0.0]]), [1], 3)[0]
    assert result.logprob == -9999.0
    assert result.top[2] == (1, -9999.0)


def test_low_precision_is_computed_in_fp32() -> None:
    row = torch.randn(1, 500, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    exact = row.double().log_softmax(-1)[0, 7].item()
    assert token_logprobs(row, [7], 0)[0].logprob == pytest.approx(exact, abs=1e-5)
    assert row.log_softmax(-1)[0, 7].item() != pytest.approx(exact, abs=1e-5)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    rows = torch.randn(9, 1001, generator=torch.Generator().manual_seed(1)) * 5
    together = token_logprobs(rows, list(range(9)), 4)
    assert together == [token_logprobs(rows[[row]], [row], 4)[0] for row in range(9)]


def test_ties_are_listed_by_id() -> None:
    row = torch.zeros(1, 3000)
    row[0, 100:] = 1.0
    assert [token for token, _ in token_logprobs(row, [0], 4)[0].top] == [100, 101, 102, 103]


def test_no_rows() -> None:
    empty: list[TokenLogprob] = []
    assert token_logprobs(torch.empty(0, 5), [], 2) == empty


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_rows_that_are_not_finite_are_refused(value: float) -> None:
    with pytest.raises(RequestFailedError):
        token_logprobs(torch.tensor([[0.0, 1.0], [0.0, value]]), [0, 0], 1)
