"""How one sequence is sampled and drafted: token ids and numbers only, checked by the server before it gets here."""

from __future__ import annotations

from dataclasses import dataclass, field

MASK64 = (1 << 64) - 1
# Below it logits / T overflows what fp32 can hold apart, and the sample is the maximum anyway.
GREEDY_TEMPERATURE = 1e-5


def splitmix64(seed: int, index: int) -> int:
    """The ``index``-th output (from 1) of splitmix64 seeded with ``seed``; 64-bit unsigned.

    Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (OOPSLA 2014).
    """
    z = (seed + index * 0x9E3779B97F4A7C15) & MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK64
    return z ^ (z >> 31)


def choice_seed(seed: int, choice: int) -> int:
    """The 64-bit noise key of choice ``choice`` (0-based) of a request.

    A signed seed is taken modulo 2^64; choice 0 uses the seed itself, choice i > 0 the i-th splitmix64 output.
    A request without a seed draws one first (``AsyncEngine.draw_seed``).
    """
    base = seed & MASK64
    return base if choice == 0 else splitmix64(base, choice)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """One sequence's sampling parameters, in the order they act.

    logit_bias, repetition_penalty (prompt and output), presence_penalty and frequency_penalty (output), bans
    (``min_tokens`` forbids EOS and stop ids, ``bad_words``), temperature, top_k, top_p, min_p.

    temperature: 0 is greedy; a tie goes to the lowest token id.
    top_k: 0 is off. top_p: 1.0 is off. min_p: 0.0 is off.
    seed: 64-bit unsigned noise key (``choice_seed``).
    max_tokens: output tokens allowed, at least 1 unless only prompt log-probabilities are wanted (then 0).
    stop_token_ids: ids that end the answer beside the model's EOS ids. The stop id is part of the output tokens.
    bad_words: token sequences that must not appear; the last id of each is banned after its prefix.
    logprobs: how many top log-probabilities go with each token; 0 is the chosen one alone, None is none at all.
    prompt_logprobs: the same for the prompt's tokens (the first has none).
    return_margins: each token carries its margin (``engine.sampler``).
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    seed: int = 0
    max_tokens: int = 16
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    return_margins: bool = False


@dataclass(frozen=True, slots=True)
class SpeculationParams:
    """One request's wishes about drafting; ``method`` "auto" means every loaded drafter.

    max_draft_tokens: tree nodes beside the root, at most the engine's own limit; None is that limit.
    """

    enabled: bool = True
    method: str = "auto"
    max_draft_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One sequence to generate: what travels from the server to the engine thread.

    request_id: unique among live requests. cache_salt: prefix-cache entries are shared only among equal salts.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    speculation: SpeculationParams = field(default_factory=SpeculationParams)
    cache_salt: str = ""
