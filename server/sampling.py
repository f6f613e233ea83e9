"""A request's sampling fields -> ``SamplingParams``: the model's defaults, the server's limits, known token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine.outputs import ModelInfo
from engine.sampling_params import GREEDY_TEMPERATURE, SamplingParams, SpeculationParams
from server.errors import invalid
from server.protocol.base import GenerationRequest, SpeculationOptions
from server.tokenizer import Tokenizer

if TYPE_CHECKING:
    from server.config import LimitsSection

# No smaller nucleus exists: the likeliest token of a vocabulary under a million always has more mass than this.
SMALLEST_TOP_P = 1e-6


def check_limits(wire: GenerationRequest, limits: LimitsSection) -> None:
    """Raises ApiError 400 for the first list that is longer than the server allows."""
    if wire.n > limits.max_n:
        raise invalid(f"Invalid 'n': at most {limits.max_n}.", "n", "integer_above_max_value")
    sizes = (
        ("stop", len(wire.stop), limits.max_stop),
        ("stop_token_ids", len(wire.stop_token_ids), limits.max_stop),
        ("logit_bias", len(wire.logit_bias), limits.max_logit_bias),
        ("bad_words", len(wire.bad_words), limits.max_bad_words),
    )
    for name, size, limit in sizes:
        if size > limit:
            raise invalid(f"Invalid '{name}': at most {limit} entries.", name, "array_above_max_length")


def sampling_params(wire: GenerationRequest, tokenizer: Tokenizer, info: ModelInfo) -> SamplingParams:
    """Everything but seed, token limit and log-probabilities. Raises ApiError 400 naming the field at fault."""
    defaults = info.default_sampling

    def chosen(name: str, neutral: float) -> float:
        value = getattr(wire, name)
        return float(defaults.get(name, neutral) if value is None else value)

    temperature = chosen("temperature", 1.0)
    check_token_ids(wire.stop_token_ids, info.vocab_size, "stop_token_ids")
    check_token_ids(list(wire.logit_bias), info.vocab_size, "logit_bias")
    return SamplingParams(
        temperature=0.0 if temperature < GREEDY_TEMPERATURE else temperature,
        top_k=max(0, int(chosen("top_k", 0))),
        top_p=max(SMALLEST_TOP_P, chosen("top_p", 1.0)),
        min_p=chosen("min_p", 0.0),
        repetition_penalty=chosen("repetition_penalty", 1.0),
        presence_penalty=wire.presence_penalty,
        frequency_penalty=wire.frequency_penalty,
        logit_bias=tuple(wire.logit_bias.items()),
        bad_words=_bad_word_ids(wire.bad_words, tokenizer),
        min_tokens=wire.min_tokens,
        stop_token_ids=tuple(wire.stop_token_ids),
        ignore_eos=wire.ignore_eos,
        return_margins=wire.return_margins,
    )


def speculation_params(wire: SpeculationOptions, info: ModelInfo) -> SpeculationParams:
    """A draft limit above the engine's own is met by the engine's. Raises ApiError 400 for a method not loaded."""
    if wire.method != "auto" and wire.method not in info.methods:
        loaded = ", ".join(info.methods) or "none"
        message = f"The drafting method '{wire.method}' is not loaded; loaded: {loaded}."
        raise invalid(message, "speculation.method", "unsupported_value")
    limit = wire.max_draft_tokens
    return SpeculationParams(wire.enabled, wire.method, None if limit is None else min(limit, info.max_draft_tokens))


def check_token_ids(token_ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Raises ApiError 400 for an id outside the vocabulary."""
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise invalid(f"'{param}' holds {token_id}, which is not a token id below {vocab_size}.", param)


def _bad_word_ids(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Each word as it is spelled at the start of a text and behind a space, as vLLM reads the field."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip()
        if not bare:
            raise invalid("'bad_words' must not hold an empty string.", "bad_words")
        for spelling in (bare, f" {bare}"):
            found[tuple(tokenizer.encode(spelling))] = None
    return tuple(found)
