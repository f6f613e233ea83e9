"""The sampler once more, slowly: pure Python, one token at a time, straight from the definitions."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from engine.sampling_params import SamplingParams


def philox4x32(counter: Sequence[int], key: Sequence[int]) -> tuple[int, ...]:
    """Philox4x32-10, one block."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        product0, product1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (
            (product1 >> 32) ^ c1 ^ k0,
            product1 & 0xFFFFFFFF,
            (product0 >> 32) ^ c3 ^ k1,
            product0 & 0xFFFFFFFF,
        )
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


def gumbel(seed: int, position: int, token: int) -> float:
    bits = philox4x32((token // 4, position, 0, 0), (seed & 0xFFFFFFFF, seed >> 32))[token % 4]
    return -math.log(-math.log((bits + 0.5) / 2**32))


def edited_logits(
    logits: Sequence[float], sampling: SamplingParams, prompt: Sequence[int], output: Sequence[int], eos: Sequence[int]
) -> list[float]:
    """Bias, penalties and bans; ``output`` holds every token after the prompt."""
    row = list(logits)
    for token, bias in sampling.logit_bias:
        row[token] += bias
    for token in {*prompt, *output}:
        penalty = sampling.repetition_penalty
        row[token] = row[token] / penalty if row[token] > 0 else row[token] * penalty
    for token, count in Counter(output).items():
        row[token] = row[token] - sampling.frequency_penalty * count - sampling.presence_penalty
    if len(output) < sampling.min_tokens:
        for token in (*eos, *sampling.stop_token_ids):
            row[token] = -math.inf
    for word in sampling.bad_words:
        if list(output)[len(output) - len(word) + 1 :] == list(word[:-1]) and len(output) >= len(word) - 1:
            row[word[-1]] = -math.inf
    return row


def filtered_logits(row: Sequence[float], sampling: SamplingParams) -> list[float]:
    """Temperature, top-k, top-p, min-p of an edited row."""
    scaled = [value / sampling.temperature for value in row]
    order = sorted((token for token in range(len(row)) if scaled[token] > -math.inf), key=lambda v: (-scaled[v], v))
    if sampling.top_k > 0:
        order = order[: sampling.top_k]
    weights = {token: math.exp(scaled[token] - scaled[order[0]]) for token in order}
    total = math.fsum(weights.values())
    kept: list[int] = []
    for token in order:
        if kept and sampling.top_p < 1.0 and math.fsum(weights[v] for v in kept) >= sampling.top_p * total:
            break
        kept.append(token)
    kept = [token for token in kept if weights[token] >= sampling.min_p]
    return [scaled[token] if token in kept else -math.inf for token in range(len(row))]


def distribution(
    logits: Sequence[float],
    sampling: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    eos: Sequence[int] = (),
) -> list[float]:
    """The probabilities of the next token; at temperature 0 one of them is 1."""
    row = edited_logits(logits, sampling, prompt, output, eos)
    if sampling.temperature == 0:
        winner = row.index(max(row))
        return [float(token == winner) for token in range(len(row))]
    row = filtered_logits(row, sampling)
    weights = [math.exp(value - max(row)) for value in row]
    return [weight / math.fsum(weights) for weight in weights]


def next_token(
    logits: Sequence[float],
    sampling: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    eos: Sequence[int] = (),
) -> int:
    """argmax(log p + g), the lowest id in a tie."""
    probabilities = distribution(logits, sampling, prompt, output, eos)
    position = len(prompt) + len(output)
    noise = [gumbel(sampling.seed, position, v) if sampling.temperature else 0.0 for v in range(len(logits))]
    scores = [math.log(p) + g if p else -math.inf for p, g in zip(probabilities, noise, strict=True)]
    return scores.index(max(scores))
