"""Top-k, top-p and min-p: ties, edges, and distances to their boundaries."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_sampler import filtered_logits

from engine.sampler.filters import Filter, MinP, TopK, TopP, active_filters
from engine.sampling_params import SamplingParams

INF = float("inf")


def kept(cut: Filter, values: list[float], dtype: torch.dtype = torch.float32) -> list[int]:
    row = torch.tensor(values, dtype=dtype)
    cut.apply(row)
    survivors = (row > -INF).nonzero().squeeze(1).tolist()
    assert [row[token].item() for token in survivors] == [
        torch.tensor(values, dtype=dtype)[token].item() for token in survivors
    ]
    return [int(token) for token in survivors]


def log(*probabilities: float) -> list[float]:
    return [math.log(p) if p else -INF for p in probabilities]


def test_top_k_breaks_ties_by_lower_id() -> None:
    assert kept(TopK(2), [1.0, 3.0, 1.0, 1.0]) == [0, 1]
    assert kept(TopK(3), [0.0, 1.0, 0.0, 1.0, 0.0]) == [0, 1, 3]
    assert kept(TopK(1), [2.0] * 5) == [0]


def test_top_k_keeps_all_it_is_asked_for_and_no_removed_token() -> None:
    assert kept(TopK(9), [1.0, 2.0]) == [0, 1]
    assert kept(TopK(2), [1.0, 2.0]) == [0, 1]
    assert kept(TopK(3), [1.0, -INF, -INF, 2.0]) == [0, 3]


def test_top_p_keeps_the_smallest_set_that_reaches_p() -> None:
    logits = log(0.1, 0.2, 0.4, 0.3)
    assert kept(TopP(0.39), logits) == [2]
    assert kept(TopP(0.41), logits) == [2, 3]
    assert kept(TopP(0.69), logits) == [2, 3]
    assert kept(TopP(0.71), logits) == [1, 2, 3]
    assert kept(TopP(0.95), logits) == [0, 1, 2, 3]


def test_top_p_at_the_exact_mass_stops_there_and_breaks_ties_by_lower_id() -> None:
    assert kept(TopP(0.5), [0.0] * 4) == [0, 1]
    assert kept(TopP(0.51), [0.0] * 4) == [0, 1, 2]
    assert kept(TopP(0.0), [0.0, 1.0]) == [1]
    assert kept(TopP(1e-12), [0.0, 0.0]) == [0]


def test_top_p_counts_what_an_earlier_filter_left() -> None:
    assert kept(TopP(0.55), [*log(0.4, 0.3), -INF, -INF]) == [0]


def test_min_p_is_relative_to_the_best() -> None:
    assert kept(MinP(0.5), log(0.4, 0.21, 0.19, 0.2001)) == [0, 1, 3]
    assert kept(MinP(1.0), [1.0, 2.0, 2.0]) == [1, 2]


def test_filters_act_in_the_plain_sampler_s_order() -> None:
    cuts = active_filters(SamplingParams(min_p=0.1, top_p=0.9, top_k=3))
    assert cuts == [TopK(3), TopP(0.9), MinP(0.1)]
    assert active_filters(SamplingParams()) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_large_vocabulary_equals_the_slow_reference(dtype: torch.dtype) -> None:
    values = (torch.randn(1200, generator=torch.Generator().manual_seed(2)) * 2).round(decimals=2).to(dtype)
    for cut, sampling in (
        (TopK(300), SamplingParams(top_k=300)),
        (TopP(0.9), SamplingParams(top_p=0.9)),
        (TopP(0.999), SamplingParams(top_p=0.999)),
        (MinP(0.01), SamplingParams(min_p=0.01)),
    ):
        expected = filtered_logits(values.tolist(), sampling)
        assert kept(cut, values.tolist(), dtype) == [token for token, value in enumerate(expected) if value > -INF]


def test_distances_of_known_rows() -> None:
    row = torch.tensor([3.0, 2.0, 1.5, 0.0], dtype=torch.float64)
    assert TopK(2).distance(row, 0, is_kept=True) == pytest.approx(1.5)
    assert TopK(2).distance(row, 1, is_kept=True) == pytest.approx(0.5)
    assert TopK(2).distance(row, 3, is_kept=False) == pytest.approx(2.0)
    assert TopK(4).distance(row, 3, is_kept=True) == INF
    cut = math.log(0.2)
    assert MinP(0.2).distance(row, 2, is_kept=True) == pytest.approx(1.5 - (3.0 + cut))
    assert MinP(0.2).distance(row, 3, is_kept=False) == pytest.approx(3.0 + cut)
    assert MinP(0.2).distance(row, 0, is_kept=True) == pytest.approx(3.0 - (2.0 + cut))


def test_top_p_distance_is_in_log_odds_where_no_order_changes() -> None:
    row = torch.tensor(log(0.6, 0.3, 0.1), dtype=torch.float64)

    def odds(p: float) -> float:
        return math.log(p / (1 - p))

    assert TopP(0.65).distance(row, 1, is_kept=True) == pytest.approx(odds(0.65) - odds(0.6))
    assert TopP(0.88).distance(row, 2, is_kept=False) == pytest.approx(odds(0.9) - odds(0.88))


def test_top_p_distance_sees_a_swap_with_a_near_equal() -> None:
    """The mass before the last kept token is far from p, but a token just behind it would take its place."""
    row = torch.tensor(log(0.5, 0.2501, 0.2499), dtype=torch.float64)
    gap = math.log(0.2501 / 0.2499)
    assert TopP(0.7).distance(row, 1, is_kept=True) == pytest.approx(gap)
    assert TopP(0.7).distance(row, 2, is_kept=False) == pytest.approx(gap)


CUTS: list[Filter] = [TopK(1), TopK(3), TopP(0.3), TopP(0.8), TopP(0.97), MinP(0.05), MinP(0.5)]


@settings(max_examples=400, deadline=None)
@given(
    st.lists(st.floats(-3, 3), min_size=5, max_size=5),
    st.sampled_from(CUTS),
    st.lists(st.sampled_from([-1.0, 1.0, 0.3]), min_size=5, max_size=5),
)
def test_no_move_within_the_distance_takes_a_token_across(
    values: list[float], cut: Filter, directions: list[float]
) -> None:
    row = torch.tensor(values, dtype=torch.float64)
    sides = row.clone()
    cut.apply(sides)
    for token in range(len(row)):
        is_kept = bool(sides[token] > -INF)
        distance = cut.distance(row, token, is_kept=is_kept)
        assert distance >= 0.0
        if distance == INF or distance < 1e-6:
            continue
        for signs in (directions, [1.0 if (other == token) != is_kept else -1.0 for other in range(5)]):
            moved = row + torch.tensor(signs, dtype=torch.float64) * (distance / 2 - 1e-9)
            cut.apply(moved)
            assert bool(moved[token] > -INF) == is_kept


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(-3, 3), min_size=5, max_size=5, unique=True), st.sampled_from([TopK(3), MinP(0.5)]))
def test_the_worst_move_past_the_distance_takes_a_token_across(values: list[float], cut: Filter) -> None:
    row = torch.tensor(values, dtype=torch.float64)
    sides = row.clone()
    cut.apply(sides)
    for token in range(len(row)):
        is_kept = bool(sides[token] > -INF)
        distance = cut.distance(row, token, is_kept=is_kept)
        signs = torch.tensor([1.0 if (other == token) != is_kept else -1.0 for other in range(5)]).double()
        moved = row + signs * (distance / 2 + 1e-6)
        cut.apply(moved)
        assert bool(moved[token] > -INF) != is_kept
