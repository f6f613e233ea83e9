"""Candidates of draft heads: the plain way against what is defined, and the compiled way against the plain one."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from compiled_models import library
from torch import nn

from engine.compiled.heads import CompiledHeadCompute, CompiledLinear
from engine.compiled.library import Team
from engine.sampler.noise import NoiseKey, gumbel_rows
from engine.spec_decode.candidates import NOISED, Candidates, HeadCompute, PlainHeadCompute, Wish

VOCAB = 5000


def ids(count: int) -> np.ndarray:
    return np.sort(np.random.default_rng(count).choice(VOCAB, count, replace=False)).astype(np.int64)


def compiled(threads: int = 2) -> HeadCompute:
    return CompiledHeadCompute(Team(library(), threads), is_int8=True)


COMPUTES = {"plain": PlainHeadCompute, "compiled": compiled}


@pytest.fixture(params=COMPUTES)
def compute(request: pytest.FixtureRequest) -> HeadCompute:
    return COMPUTES[request.param]()


def test_without_noise_they_are_the_likeliest_with_their_softmax(compute: HeadCompute) -> None:
    logits, tokens = torch.randn(3, 700, generator=torch.Generator().manual_seed(0)), ids(700)
    found = compute.candidates(logits, tokens, [Wish(5), Wish(1), Wish(0)])
    shares, ranks = logits.softmax(-1).topk(5)
    for row, count in enumerate((5, 1, 0)):
        assert found[row].tokens == tokens[ranks[row, :count].numpy()].tolist()
        assert found[row].confidences == pytest.approx(shares[row, :count].tolist(), rel=1e-4)


def test_noise_is_that_of_the_verification(compute: HeadCompute) -> None:
    """So few tokens that all get noise: then the first candidate is the very sample."""
    logits, tokens, key = torch.randn(1, 300) * 2, ids(300), NoiseKey(2**63 + 5, 17)
    perturbed = logits[0].double() + gumbel_rows([key], VOCAB, torch.device("cpu"))[0, torch.from_numpy(tokens)]
    found = compute.candidates(logits, tokens, [Wish(8, key)])[0]
    shares, ranks = perturbed.softmax(-1).topk(8)
    assert found.tokens == tokens[ranks.numpy()].tolist()
    assert found.confidences == pytest.approx(shares.tolist(), rel=1e-4)


def test_impossible_tokens_are_no_candidates(compute: HeadCompute) -> None:
    logits = torch.full((4, 64), -math.inf)
    logits[0, 7] = logits[1, 7] = 1.0
    wishes = [Wish(4), Wish(4, NoiseKey(1, 1)), Wish(4), Wish(4, NoiseKey(1, 1))]
    assert [found.tokens for found in compute.candidates(logits, ids(64), wishes)] == [[ids(64)[7]]] * 2 + [[]] * 2


def test_a_row_that_is_not_a_number_offers_nothing_and_harms_no_other(compute: HeadCompute) -> None:
    logits = torch.randn(3, 64)
    before = compute.candidates(logits, ids(64), [Wish(4)] * 3)
    logits[1] = math.nan
    after = compute.candidates(logits, ids(64), [Wish(4)] * 3)
    assert after == [before[0], Candidates([], []), before[2]]


@pytest.mark.parametrize("size", [16, 100, 2048])
@pytest.mark.parametrize("scale", [0.1, 1.0, 5.0])
def test_the_compiled_way_equals_the_plain_one(size: int, scale: float) -> None:
    logits, tokens = torch.randn(20, size) * scale, ids(size)
    wishes = [Wish(16 if row % 3 else 3, NoiseKey(row * 2**58, row) if row % 2 else None) for row in range(20)]
    plain, fast = (c.candidates(logits, tokens, wishes) for c in (PlainHeadCompute(), compiled()))
    for expected, found in zip(plain, fast, strict=True):
        assert found.tokens == expected.tokens
        assert found.confidences == pytest.approx(expected.confidences, rel=1e-3)


def test_only_the_largest_get_noise() -> None:
    assert NOISED < 2048, "the sizes above must lie on both sides"


@pytest.mark.parametrize("is_int8", [False, True])
def test_packed_layers_compute_what_they_did(is_int8: bool) -> None:
    layers = nn.Sequential(nn.Linear(96, 50), nn.Identity(), nn.Linear(50, 7), nn.Linear(7, 3, bias=False))
    x = torch.randn(2, 5, 96)
    expected = layers(x)
    CompiledHeadCompute(Team(library(), 2), is_int8).pack(layers)
    assert isinstance(layers[0], CompiledLinear)
    assert not isinstance(layers[2], CompiledLinear), "50 inputs are no multiple of 16"
    torch.testing.assert_close(layers(x), expected, atol=0.05 if is_int8 else 1e-5, rtol=0.0)
