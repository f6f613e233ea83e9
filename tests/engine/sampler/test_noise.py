"""The bits are Philox's, the noise is Gumbel's, and neither depends on who else asks."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_sampler import gumbel, philox4x32
from scipy import stats

from engine.sampler import noise
from engine.sampler.noise import GUMBEL_MAX, GUMBEL_MIN, NoiseKey, gumbel_at, gumbel_rows, uniforms

CPU = torch.device("cpu")
WORD = st.integers(0, 2**32 - 1)
# The known answers published with Random123 (kat_vectors, philox4x32, 10 rounds): counter, key, output.
KNOWN = [
    ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def numpy_words(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    c, k = (tuple(np.array([word], dtype=np.int64) for word in words) for words in (counter, key))
    return tuple(int(word[0]) for word in noise.philox4x32(c, k))  # type: ignore[arg-type]


def torch_words(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    c, k = (tuple(torch.tensor([word]) for word in words) for words in (counter, key))
    return tuple(int(word) for word in noise.philox4x32(c, k))  # type: ignore[arg-type]


@pytest.mark.parametrize(("counter", "key", "output"), KNOWN)
def test_philox_gives_the_published_known_answers(
    counter: tuple[int, ...], key: tuple[int, ...], output: tuple[int, ...]
) -> None:
    assert numpy_words(counter, key) == output
    assert torch_words(counter, key) == output
    assert philox4x32(counter, key) == output


@settings(deadline=None)
@given(st.tuples(WORD, WORD, WORD, WORD), st.tuples(WORD, WORD))
def test_philox_equals_the_slow_reference(counter: tuple[int, ...], key: tuple[int, ...]) -> None:
    expected = philox4x32(counter, key)
    assert numpy_words(counter, key) == expected
    assert torch_words(counter, key) == expected


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**63 + 12345, 2**64 - 1])
def test_rows_follow_the_contract(seed: int) -> None:
    positions = (0, 1, 77, 131_071)
    rows = gumbel_rows([NoiseKey(seed, position) for position in positions], 11, CPU)
    expected = [[gumbel(seed, position, token) for token in range(11)] for position in positions]
    assert rows.dtype == torch.float64
    torch.testing.assert_close(rows, torch.tensor(expected, dtype=torch.float64), rtol=1e-14, atol=1e-15)


def test_single_tokens_and_single_rows_have_the_bits_of_whole_batches() -> None:
    """Also shows that the logarithms do not depend on where in an array a value lies."""
    keys = [NoiseKey(seed * 0x9E3779B97F4A7C15 % 2**64, 3 + seed) for seed in range(7)]
    vocab = 49_157  # no multiple of a lane or of a vector register
    batch = gumbel_rows(keys, vocab, CPU)
    for index, key in enumerate(keys):
        assert torch.equal(gumbel_rows([key], vocab, CPU)[0], batch[index])
    generator = np.random.default_rng(5)
    for size in (1, 2, 3, 5, 8, 13, 997):
        rows, tokens = generator.integers(0, len(keys), size), generator.integers(0, vocab, size)
        assert np.array_equal(gumbel_at(keys, rows, tokens), batch.numpy()[rows, tokens])
    assert torch.equal(gumbel_rows(keys, 1000, CPU), batch[:, :1000])


def test_a_row_is_the_same_when_made_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [NoiseKey(seed, 9) for seed in range(10)]
    whole = gumbel_rows(keys, 13, CPU)
    monkeypatch.setattr(noise, "_CHUNK_CPU", 30)
    assert noise.chunk_rows(13, CPU) == 2
    assert torch.equal(gumbel_rows(keys, 13, CPU), whole)


def test_the_accelerator_path_makes_the_same_bits_and_noise() -> None:
    keys = [NoiseKey(2**64 - 1 - seed, seed, stream=seed % 3) for seed in range(5)]
    words = noise._key_words(keys)
    bits = noise._row_bits_torch(torch.from_numpy(words), 103)
    assert np.array_equal(bits.numpy(), noise._row_bits_numpy(words, 103))
    torch.testing.assert_close(noise._gumbel_torch(bits), gumbel_rows(keys, 103, CPU), rtol=1e-14, atol=1e-15)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_makes_the_same_noise() -> None:
    keys = [NoiseKey(seed, 5) for seed in range(3)]
    on_cuda = gumbel_rows(keys, 1001, torch.device("cuda")).cpu()
    torch.testing.assert_close(on_cuda, gumbel_rows(keys, 1001, CPU), rtol=1e-13, atol=1e-14)


def test_the_tails_are_right() -> None:
    least, largest = noise._gumbel_numpy(np.array([0, 2**32 - 1]))
    assert least == pytest.approx(GUMBEL_MIN, rel=1e-14)
    assert largest == pytest.approx(GUMBEL_MAX, rel=1e-14)
    assert abs(GUMBEL_MAX - (33 * math.log(2) - 2**-34)) < 1e-14  # to first order: u = 1 - 2^-33
    assert abs(GUMBEL_MIN + math.log(33 * math.log(2))) < 1e-14


def test_the_noise_is_gumbel_distributed_along_every_axis() -> None:
    over_tokens = gumbel_rows([NoiseKey(3, 4)], 20_000, CPU).flatten().numpy()
    over_seeds = gumbel_rows([NoiseKey(seed, 4) for seed in range(20_000)], 1, CPU).flatten().numpy()
    over_positions = gumbel_rows([NoiseKey(3, position) for position in range(20_000)], 1, CPU).flatten().numpy()
    for values in (over_tokens, over_seeds, over_positions):
        assert stats.kstest(values, "gumbel_r").pvalue > 1e-3
        assert abs(stats.pearsonr(values[1:], values[:-1]).statistic) < 0.03
    assert stats.kstest(over_tokens + 0.05, "gumbel_r").pvalue < 1e-6  # the test can fail


def test_streams_and_uniforms() -> None:
    keys = [NoiseKey(seed, 4, stream) for seed in range(200) for stream in (0, 2, 3)]
    draws = uniforms(keys)
    assert len(set(draws)) == len(draws)
    assert all(0.0 < draw < 1.0 for draw in draws)
    expected = [-math.log(-math.log(draw)) for draw in draws]
    assert gumbel_rows(keys, 1, CPU).flatten().tolist() == pytest.approx(expected, rel=1e-12)
    assert uniforms([]) == []


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**64 - 1), st.integers(0, 2**20), st.integers(0, 200_000))
def test_any_token_of_any_key(seed: int, position: int, token: int) -> None:
    value = gumbel_at([NoiseKey(seed, position)], np.array([0]), np.array([token]))[0]
    assert value == pytest.approx(gumbel(seed, position, token), rel=1e-13, abs=1e-14)
