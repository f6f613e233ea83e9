"""A margin is what its definition says: no smaller move of the logits changes the token, a larger one can."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sampler import margins
from engine.sampler.filters import Filter, MinP, TopK
from engine.sampler.margins import NO_RIVAL_MARGIN, boundary_distance, choice_margin, log_odds_distance
from engine.sampler.noise import NoiseKey
from engine.sampler.processing import RowContext, TargetRow, target_row
from engine.sampler.sample import perturbed, sample
from engine.sampling_params import SamplingParams

KEY = NoiseKey(11, 5)


def chosen(values: torch.Tensor, sampling: SamplingParams, key: NoiseKey = KEY) -> tuple[int, TargetRow]:
    target = target_row(values.clone(), RowContext(sampling, [], 0))
    return sample(target.logits[None], [sampling], [key])[0], target


def margin_of(values: torch.Tensor, sampling: SamplingParams, key: NoiseKey = KEY) -> tuple[int, float]:
    token, target = chosen(values, sampling, key)
    return token, choice_margin(target, sampling, key, token)


def test_greedy_margin_is_the_top_two_gap_in_plain_logits() -> None:
    row = torch.tensor([1.0, 4.0, 3.25], dtype=torch.float64)
    assert margin_of(row, SamplingParams(temperature=0.0, return_margins=True)) == (1, 0.75)
    tie = torch.tensor([4.0, 4.0], dtype=torch.float64)
    assert margin_of(tie, SamplingParams(temperature=0.0, return_margins=True)) == (0, 0.0)


def test_without_a_rival_the_margin_is_large_and_finite() -> None:
    row = torch.tensor([1.0, -math.inf, -math.inf])
    for sampling in (SamplingParams(temperature=0.0), SamplingParams(), SamplingParams(top_k=2, top_p=0.5, min_p=0.1)):
        assert margin_of(row, sampling) == (0, NO_RIVAL_MARGIN)


def test_a_plain_sample_is_measured_on_perturbed_scaled_logits() -> None:
    row = torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64)
    sampling = SamplingParams(temperature=0.5, return_margins=True)
    scores = perturbed(row[None] / 0.5, [KEY])[0].sort(descending=True).values
    assert margin_of(row, sampling)[1] == pytest.approx(float(scores[0] - scores[1]))


def test_a_token_nearly_filtered_out_has_a_small_margin() -> None:
    row = torch.tensor([0.0, -1e-3, -5.0], dtype=torch.float64)
    sampling = SamplingParams(top_k=1, return_margins=True)
    token, margin = margin_of(row, sampling)
    assert token == 0
    assert margin == pytest.approx(1e-3)


def test_a_filtered_token_counts_only_if_it_would_have_won() -> None:
    """Token 1 is just outside top-k 1. Where its noise makes it far worse than token 0, losing 0 is what counts."""
    row = torch.tensor([0.0, -0.5, -9.0], dtype=torch.float64)
    sampling = SamplingParams(top_k=1, return_margins=True)
    for seed in range(40):
        _, target = chosen(row, sampling, NoiseKey(seed, 0))
        # With one survivor the winner leaves exactly when the outsider enters, whatever the noise.
        assert choice_margin(target, sampling, NoiseKey(seed, 0), 0) == pytest.approx(0.5)
    sampling = SamplingParams(top_k=2, return_margins=True)
    row = torch.tensor([3.0, 0.1, 0.0], dtype=torch.float64)
    sizes = set()
    for seed in range(400):
        key = NoiseKey(seed, 0)
        token, target = chosen(row, sampling, key)
        if token != 0:
            continue
        lead = perturbed(row[None], [key])[0]
        outsider = max(0.1, float(lead[0] - lead[2]))
        expected = min(float(lead[0] - lead[1]), outsider, 3.0)
        assert choice_margin(target, sampling, key, 0) == pytest.approx(expected)
        sizes.add(outsider == 0.1)
    assert sizes == {True, False}


def test_an_outsider_must_pass_every_filter_that_removes_it() -> None:
    row = torch.tensor([2.0, 1.9, -1.0], dtype=torch.float64)
    sampling = SamplingParams(top_k=2, min_p=0.5, return_margins=True)
    target = target_row(row.clone(), RowContext(sampling, [], 0))
    assert boundary_distance(target, [TopK(2)], 2) == pytest.approx(2.9)
    from_both = boundary_distance(target, [TopK(2), MinP(0.5)], 2)
    assert from_both == pytest.approx(max(2.9, 2.0 + math.log(0.5) + 1.0))
    assert boundary_distance(target, [MinP(0.9)], 2) == pytest.approx(3.0 + math.log(0.9))


def test_log_odds_distance() -> None:
    assert log_odds_distance(0.5, 0.5) == 0.0
    assert log_odds_distance(0.8, 0.5) == pytest.approx(math.log(4.0))
    assert log_odds_distance(0.5, 0.8) == pytest.approx(math.log(4.0))
    assert log_odds_distance(1.0, 0.5) == log_odds_distance(0.0, 0.5) == NO_RIVAL_MARGIN


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.floats(-2, 2), min_size=6, max_size=6),
    st.sampled_from(
        [
            SamplingParams(temperature=0.0, return_margins=True),
            SamplingParams(return_margins=True),
            SamplingParams(top_k=2, return_margins=True),
            SamplingParams(top_p=0.6, return_margins=True),
            SamplingParams(top_p=0.9, return_margins=True),
            SamplingParams(min_p=0.4, return_margins=True),
        ]
    ),
    st.integers(0, 2**32),
    st.lists(st.sampled_from([-1.0, 1.0]), min_size=6, max_size=6),
)
def test_no_move_within_the_margin_changes_the_token(
    values: list[float], sampling: SamplingParams, seed: int, signs: list[float]
) -> None:
    row, key = torch.tensor(values, dtype=torch.float64), NoiseKey(seed, 0)
    token, margin = margin_of(row, sampling, key)
    assert 0.0 <= margin <= NO_RIVAL_MARGIN
    if margin < 1e-6:
        return
    size = min(margin, 20.0) / 2 - 1e-9
    moves = [torch.tensor(signs, dtype=torch.float64)]
    for rival in range(6):
        worst = torch.full((6,), -1.0, dtype=torch.float64)
        worst[rival] = 1.0
        others_up = -worst
        others_up[[rival, token]] = torch.tensor([1.0, -1.0], dtype=torch.float64)
        moves += [worst, others_up] if rival != token else []
    for move in moves:
        assert chosen(row + move * size, sampling, key)[0] == token


def test_margins_of_near_ties_are_found_among_many_seeds() -> None:
    """A larger move does change the token: the margin is no mere lower bound where two scores compete."""
    row = torch.tensor([0.3, 0.2, 0.1, 0.0], dtype=torch.float64)
    sampling = SamplingParams(return_margins=True)
    for seed in range(100):
        key = NoiseKey(seed, 0)
        token, margin = margin_of(row, sampling, key)
        rival = int(perturbed(row[None], [key])[0].argsort(descending=True)[1])
        moved = row.clone()
        moved[token] -= margin / 2 + 1e-9
        moved[rival] += margin / 2 + 1e-9
        assert chosen(moved, sampling, key)[0] == rival


def test_a_flat_row_behind_one_favoured_token_is_not_searched_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of tokens stand outside, each nearer to being let in than luck made the favourite's lead wide."""
    torch.manual_seed(0)
    row = torch.randn(49_152)
    row[7] = 60.0
    sampling = SamplingParams(temperature=2.0, top_p=0.1, seed=3, return_margins=True)
    looked_at: list[int] = []

    def counted(target: TargetRow, filters: Sequence[Filter], token: int) -> float:
        looked_at.append(token)
        return boundary_distance(target, filters, token)

    monkeypatch.setattr(margins, "boundary_distance", counted)
    for position in range(10):
        target = target_row(row.clone(), RowContext(sampling, [1, 2], 1))
        assert 10 < choice_margin(target, sampling, NoiseKey(3, position), 7) < 60
    assert len(looked_at) < 400
