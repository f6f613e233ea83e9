"""The body of ``POST /v1/completions``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from server.errors import invalid
from server.protocol.base import GenerationRequest, parse_wire
from server.protocol.unsupported import COMPLETIONS, refuse_unsupported

PromptInput = str | tuple[int, ...]


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


def _parse_prompt(value: Any) -> tuple[PromptInput, ...]:
    """string | [string] | [int] | [[int]] -> one entry a prompt."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        raise PydanticCustomError("invalid_type", "must be a string, token ids, or an array of either")
    if not value or any(item == [] for item in value):
        raise PydanticCustomError("empty_array", "must not be empty")
    if _is_ids(value):
        return (tuple(value),)
    if all(isinstance(item, str) for item in value):
        return tuple(value)
    if all(_is_ids(item) for item in value):
        return tuple(tuple(item) for item in value)
    raise PydanticCustomError("invalid_type", "must be a string, token ids, or an array of either, not mixed")


class CompletionRequest(GenerationRequest):
    """``prompt`` may be absent: the model then starts a new document."""

    prompt: Annotated[tuple[PromptInput, ...], BeforeValidator(_parse_prompt)] = ()
    max_tokens: int = Field(16, ge=0)
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=5)
    best_of: int | None = Field(None, ge=0, le=20)

    @property
    def token_limit(self) -> int:
        return self.max_tokens


def parse_completion(body: Mapping[str, Any]) -> CompletionRequest:
    """Raises ApiError 400 naming the first field that is unsupported, broken or contradicts another."""
    refuse_unsupported(body, COMPLETIONS)
    wire = parse_wire(CompletionRequest, body)
    if wire.best_of is not None and wire.best_of != wire.n:
        raise invalid("'best_of' must be equal to 'n' or absent.", "best_of", "unsupported_value")
    if wire.max_tokens == 0 and not wire.echo:
        raise invalid("'max_tokens' may be 0 only with 'echo'.", "max_tokens", "integer_below_min_value")
    return wire
