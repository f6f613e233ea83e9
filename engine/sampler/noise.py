"""Gumbel noise that is a function of (seed, position, token) alone, so that drafting and batching cannot change it.

The bits are Philox4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
The key is the 64-bit seed as two 32-bit words, low word first; the counter is (token // 4, position, stream, 0), and
the token takes lane token % 4. With x the 32 bits, u = (x + 0.5) / 2^32 and the noise is g = -log(-log u), in float64,
where u is exact, so that both tails are right. ``position`` is the token's index in the whole sequence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
# One algorithm for both: numpy starts an operation several times faster on the CPU, torch runs anywhere.
Words = TypeVar("Words", IntArray, torch.Tensor)

_LANES = 4
_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW_WORD = 0xFFFFFFFF
_UNIT = 2.0**-32

GUMBEL_MIN = -math.log(-math.log(0.5 * _UNIT))  # the noise of x = 0
GUMBEL_MAX = -math.log(-math.log1p(-0.5 * _UNIT))  # the noise of x = 2^32 - 1

# Noise values made at once: on a CPU what fits the cache, elsewhere what bounds the memory.
_CHUNK_CPU = 1 << 16
_CHUNK_ACCELERATOR = 1 << 24


@dataclass(frozen=True, slots=True)
class NoiseKey:
    """Which noise: a 64-bit unsigned seed, a position in the sequence, and a stream (0 is the sampling noise)."""

    seed: int
    position: int
    stream: int = 0


def philox4x32(counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]) -> tuple[Words, ...]:
    """The four output words of Philox4x32-10. Every word is an int64 holding 32 bits; shapes broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # A product fills 64 bits and may wrap to a negative int64; the mask drops the sign that >> drags in, and
        # with it the high half of c1 and c3, which are therefore left unmasked until the end.
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0 = ((product1 >> 32) ^ c1 ^ k0) & _LOW_WORD
        c2 = ((product0 >> 32) ^ c3 ^ k1) & _LOW_WORD
        c1, c3 = product1, product0
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW_WORD, (k1 + _KEY_STEPS[1]) & _LOW_WORD
    return c0, c1 & _LOW_WORD, c2, c3 & _LOW_WORD


def chunk_rows(vocab_size: int, device: torch.device) -> int:
    """How many rows of noise to make at once."""
    return max(1, (_CHUNK_CPU if device.type == "cpu" else _CHUNK_ACCELERATOR) // vocab_size)


def gumbel_rows(keys: Sequence[NoiseKey], vocab_size: int, device: torch.device) -> torch.Tensor:
    """Noise of whole rows: float64 [len(keys), vocab_size] on ``device``."""
    words = _key_words(keys)
    noise = torch.empty((len(keys), vocab_size), dtype=torch.float64, device=device)
    step = chunk_rows(vocab_size, device)
    for start in range(0, len(keys), step):
        part = words[start : start + step]
        if device.type == "cpu":
            noise[start : start + step] = torch.from_numpy(_gumbel_numpy(_row_bits_numpy(part, vocab_size)))
        else:
            noise[start : start + step] = _gumbel_torch(_row_bits_torch(torch.from_numpy(part).to(device), vocab_size))
    return noise


def gumbel_at(keys: Sequence[NoiseKey], rows: IntArray, tokens: IntArray) -> FloatArray:
    """Noise of single tokens, on the CPU: out[i] belongs to token ``tokens[i]`` under ``keys[rows[i]]``."""
    words = _key_words(keys)[rows, :, None]
    lanes = _philox(tokens[:, None] // _LANES, words)
    bits = np.concatenate(lanes, axis=1)
    return _gumbel_numpy(bits[np.arange(len(tokens)), tokens % _LANES])


def uniforms(keys: Sequence[NoiseKey]) -> list[float]:
    """One uniform variate in (0, 1) per key: the one under token 0's noise."""
    bits = _philox(np.zeros((len(keys), 1), dtype=np.int64), _key_words(keys)[:, :, None])[0]
    return [(int(x) + 0.5) * _UNIT for x in bits[:, 0]]


def _key_words(keys: Sequence[NoiseKey]) -> IntArray:
    """[len(keys), 4]: seed low, seed high, position, stream."""
    words = [(key.seed & _LOW_WORD, key.seed >> 32, key.position, key.stream) for key in keys]
    return np.array(words, dtype=np.int64).reshape(-1, 4)


def _philox(blocks: Words, words: Words) -> tuple[Words, ...]:
    """blocks: broadcasts with [R, n]. words: [R, 4, 1]. Returns four lanes of [R, n]."""
    low, high, position, stream = words[:, 0], words[:, 1], words[:, 2], words[:, 3]
    return philox4x32((blocks, position, stream, stream * 0), (low, high))


def _row_bits_numpy(words: IntArray, vocab_size: int) -> IntArray:
    blocks = np.arange(-(-vocab_size // _LANES), dtype=np.int64)[None]
    lanes = _philox(blocks, words[:, :, None])
    return np.stack(lanes, axis=-1).reshape(len(words), -1)[:, :vocab_size]


def _row_bits_torch(words: torch.Tensor, vocab_size: int) -> torch.Tensor:
    blocks = torch.arange(-(-vocab_size // _LANES), dtype=torch.int64, device=words.device)[None]
    lanes = _philox(blocks, words[:, :, None])
    return torch.stack(lanes, dim=-1).flatten(1)[:, :vocab_size]


def _gumbel_numpy(bits: IntArray) -> FloatArray:
    noise = bits.astype(np.float64)
    noise += 0.5
    noise *= _UNIT
    np.log(noise, out=noise)
    np.negative(noise, out=noise)
    np.log(noise, out=noise)
    np.negative(noise, out=noise)
    return noise


def _gumbel_torch(bits: torch.Tensor) -> torch.Tensor:
    uniform = (bits.to(torch.float64) + 0.5) * _UNIT
    return uniform.log_().neg_().log_().neg_()
