"""The body of ``POST /v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from server.errors import invalid
from server.protocol.base import GenerationRequest, parse_wire
from server.protocol.unsupported import CHAT, refuse_unsupported


class ChatCompletionRequest(GenerationRequest):
    """Only ``messages`` is required; ``max_completion_tokens`` wins over ``max_tokens``."""

    messages: list[Any] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    max_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    reasoning_effort: str | None = None

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives wanted with each token; None: no log-probabilities at all."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def token_limit_field(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"


def parse_chat(body: Mapping[str, Any]) -> ChatCompletionRequest:
    """Raises ApiError 400 naming the first field that is unsupported, broken or contradicts another."""
    refuse_unsupported(body, CHAT)
    wire = parse_wire(ChatCompletionRequest, body)
    if wire.top_logprobs is not None and not wire.logprobs:
        raise invalid("'top_logprobs' needs 'logprobs' to be true.", "top_logprobs")
    if wire.continue_final_message and wire.add_generation_prompt:
        message = "'continue_final_message' and 'add_generation_prompt' exclude each other."
        raise invalid(message, "continue_final_message")
    return wire
