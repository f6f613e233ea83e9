"""Choosing a token: exact skipping, ties, and independence of the batch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_sampler import next_token

from engine.sampler import sample as sample_module
from engine.sampler.noise import GUMBEL_MAX, GUMBEL_MIN, NoiseKey
from engine.sampler.sample import dense_argmax, first_argmax, gumbel_argmax, perturbed, sample
from engine.sampling_params import SamplingParams


def rows_of(scale: float, count: int, vocab: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(count, vocab, generator=torch.Generator().manual_seed(7)) * scale).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [0.1, 3.0, 8.0, 12.0, 40.0, 1e6])
def test_skipping_tokens_that_cannot_win_changes_nothing(scale: float, dtype: torch.dtype) -> None:
    logits = rows_of(scale, 40, 2048, dtype)
    keys = [NoiseKey(seed, 3) for seed in range(40)]
    assert gumbel_argmax(logits, keys) == dense_argmax(logits, keys)


def test_both_ways_of_choosing_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of flat and peaked rows, drawn whole, token by token, and as it comes."""
    logits = rows_of(1.0, 64, 512) * torch.linspace(0.1, 30.0, 64)[:, None]
    keys = [NoiseKey(seed, 3) for seed in range(64)]
    usual = gumbel_argmax(logits, keys)
    shares = (logits >= logits.amax(1, keepdim=True) - 26.0).float().mean(1)
    assert shares.min() < sample_module._SPARSE_SHARE < shares.max()
    for share in (0.0, 1.0):
        monkeypatch.setattr(sample_module, "_SPARSE_SHARE", share)
        assert gumbel_argmax(logits, keys) == usual


def test_a_token_out_of_reach_of_the_noise_never_wins() -> None:
    """The largest noise on one token and the least on another differ by the reach."""
    reach = sample_module._REACH
    logits = torch.tensor([[reach + 1e-3] + [0.0] * 99], dtype=torch.float64)
    keys = [NoiseKey(seed, 0) for seed in range(2000)]
    scores = perturbed(logits.expand(2000, 100), keys)
    assert bool((scores.argmax(1) == 0).all())
    assert reach == pytest.approx(33 * math.log(2) + math.log(33 * math.log(2)), abs=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("level", [0.0, 7.3, 1000.3, 54_321.7])
def test_the_last_token_within_reach_wins_with_the_largest_noise(
    level: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However the row rounds: the best token draws the least noise, and the farthest that can still pass it wins."""
    extremes = np.array([GUMBEL_MIN, GUMBEL_MAX])
    monkeypatch.setattr(sample_module, "gumbel_at", lambda keys, rows, tokens: extremes[tokens])
    monkeypatch.setattr(sample_module, "_SPARSE_SHARE", 1.0)
    best = torch.tensor(level, dtype=dtype)
    rival = best + (GUMBEL_MIN - GUMBEL_MAX)
    while float(rival) + GUMBEL_MAX <= float(best) + GUMBEL_MIN:
        rival = rival.nextafter(best)
    assert gumbel_argmax(torch.stack([best, rival])[None], [NoiseKey(0, 0)]) == [1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_tie_goes_to_the_lowest_id(dtype: torch.dtype) -> None:
    for vocab in (3, 17, 1000, 49_152):
        rows = torch.zeros(4, vocab, dtype=dtype)
        rows[1, vocab // 2 :] = 1.0
        rows[2, vocab - 2 :] = 1.0
        rows[3, :] = -torch.inf
        rows[3, [vocab - 2, vocab - 1]] = -5.0
        assert first_argmax(rows) == [0, vocab // 2, vocab - 2, vocab - 2]
        assert [first_argmax(row[None])[0] for row in rows] == first_argmax(rows)


def test_tied_scores_go_to_the_lowest_id_in_the_sparse_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_module, "gumbel_at", lambda keys, rows, tokens: 0.0 * tokens)
    monkeypatch.setattr(sample_module, "_SPARSE_SHARE", 1.0)
    rows = torch.tensor([[0.0, 2.0, 2.0, 1.0], [5.0, -torch.inf, 5.0, 5.0], [0.0, 0.0, 0.0, 1.0]])
    assert gumbel_argmax(rows, [NoiseKey(0, 0)] * 3) == [1, 0, 3]


def test_rows_do_not_depend_on_their_neighbours_or_their_order() -> None:
    logits = torch.cat([rows_of(scale, 6, 1000) for scale in (0.5, 5.0, 50.0)])
    samplings = [SamplingParams(temperature=float(row % 3 > 0)) for row in range(18)]
    keys = [NoiseKey(row * 31, row) for row in range(18)]
    together = sample(logits, samplings, keys)
    alone = [sample(logits[[row]], [samplings[row]], [keys[row]])[0] for row in range(18)]
    assert together == alone
    order = torch.randperm(18, generator=torch.Generator().manual_seed(1)).tolist()
    shuffled = sample(logits[order], [samplings[row] for row in order], [keys[row] for row in order])
    assert shuffled == [together[row] for row in order]


def test_minus_infinity_is_never_chosen() -> None:
    logits = torch.full((500, 8), -torch.inf)
    logits[:, [2, 5]] = 0.0
    tokens = sample(logits, [SamplingParams()] * 500, [NoiseKey(seed, 0) for seed in range(500)])
    assert set(tokens) == {2, 5}


def test_no_rows_give_no_tokens() -> None:
    assert sample(torch.empty(0, 8), [], []) == []


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-8, 8), min_size=2, max_size=9), st.integers(0, 2**64 - 1), st.integers(1, 1000))
def test_the_token_is_the_slow_reference_s(logits: list[float], seed: int, position: int) -> None:
    row = torch.tensor([logits], dtype=torch.float64)
    expected = next_token(logits, SamplingParams(seed=seed), [0] * position, [])
    assert sample(row, [SamplingParams(seed=seed)], [NoiseKey(seed, position)]) == [expected]
