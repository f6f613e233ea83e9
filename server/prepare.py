"""A checked wire request -> engine requests: prompts as ids, one ``EngineRequest`` a choice, all within bounds."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from engine.outputs import ModelInfo
from engine.sampling_params import EngineRequest, SamplingParams, choice_seed
from server.context import ServerContext
from server.detokenizer import new_detokenizer
from server.errors import ApiError, invalid
from server.protocol.base import GenerationRequest
from server.protocol.chat import ChatCompletionRequest
from server.protocol.completions import CompletionRequest, PromptInput
from server.protocol.messages import TemplateMessage, template_messages
from server.sampling import check_limits, check_token_ids, sampling_params, speculation_params

T = TypeVar("T")
INLINE_CHARACTERS = 4096  # text up to here is tokenised on the event loop: about a millisecond


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt. For ``echo``: its text, and the character at which each of its tokens begins."""

    token_ids: tuple[int, ...]
    text: str = ""
    offsets: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """What an answer is made from. Choice ``i`` belongs to prompt ``i // wire.n``.

    num_logprobs: alternatives reported with each token, None for no log-probabilities.
    """

    id: str
    created: int
    wire: GenerationRequest
    prompts: tuple[Prompt, ...]
    choices: tuple[EngineRequest, ...]
    num_logprobs: int | None
    echo: bool = False

    def for_tenant(self, tenant: str) -> PreparedRequest:
        """The same with prefix-cache salts that no other key's requests share: hits tell time, and so contents."""
        if not tenant:
            return self
        choices = (replace(choice, cache_salt=f"{tenant}/{choice.cache_salt}") for choice in self.choices)
        return replace(self, choices=tuple(choices))

    def prompt_of(self, index: int) -> Prompt:
        return self.prompts[index // self.wire.n]


async def prepare_chat(context: ServerContext, wire: ChatCompletionRequest) -> PreparedRequest:
    """Raises ApiError 400 or 404 for everything that cannot be answered."""
    _check_common(context, wire)
    limit = context.config.server.limits.max_messages
    if len(wire.messages) > limit:
        raise invalid(f"Invalid 'messages': at most {limit} entries.", "messages", "array_above_max_length")
    messages = template_messages(wire.messages)
    size = sum(len(message["content"]) for message in messages)
    token_ids = await _off_loop(size, lambda: _render(context, wire, messages))
    sampling = replace(
        sampling_params(wire, context.tokenizer, context.engine.info),
        logprobs=wire.num_logprobs,
        max_tokens=_token_limit(wire, len(token_ids), context.engine.info, "messages"),
    )
    _check_min_tokens(sampling)
    prompts = (Prompt(tuple(token_ids)),)
    return _assemble(context, wire, f"chatcmpl-{secrets.token_hex(16)}", prompts, [sampling])


async def prepare_completion(context: ServerContext, wire: CompletionRequest) -> PreparedRequest:
    """Raises ApiError 400 or 404 for everything that cannot be answered."""
    _check_common(context, wire)
    limit = context.config.server.limits.max_prompts
    if len(wire.prompt) > limit:
        raise invalid(f"Invalid 'prompt': at most {limit} prompts.", "prompt", "array_above_max_length")
    size = sum(len(prompt) for prompt in wire.prompt)
    prompts = await _off_loop(size, lambda: tuple(_read_prompt(context, wire, p) for p in wire.prompt or ("",)))
    base = sampling_params(wire, context.tokenizer, context.engine.info)
    samplings = []
    for prompt in prompts:
        length = len(prompt.token_ids)
        max_tokens = _token_limit(wire, length, context.engine.info, "prompt")
        scored = wire.logprobs if wire.echo else None
        if max_tokens == 0:
            scored = scored or 0  # the engine's only reason to look at a prompt that is not continued
        samplings.append(replace(base, max_tokens=max_tokens, logprobs=wire.logprobs, prompt_logprobs=scored))
        _check_min_tokens(samplings[-1])
    return _assemble(context, wire, f"cmpl-{secrets.token_hex(16)}", prompts, samplings)


def _check_common(context: ServerContext, wire: GenerationRequest) -> None:
    if wire.model is not None and wire.model != context.served_model_name:
        message = f"The model '{wire.model}' does not exist; this server has '{context.served_model_name}'."
        raise ApiError(404, message, code="model_not_found", param="model")
    check_limits(wire, context.config.server.limits)


def _render(context: ServerContext, wire: ChatCompletionRequest, messages: list[TemplateMessage]) -> list[int]:
    tokenizer = context.tokenizer
    if not tokenizer.mentions("developer"):
        messages = [{**m, "role": "system"} if m["role"] == "developer" else m for m in messages]
    extra = dict(wire.chat_template_kwargs)
    if wire.reasoning_effort is not None:
        extra.setdefault("reasoning_effort", wire.reasoning_effort)
    generate = not wire.continue_final_message if wire.add_generation_prompt is None else wire.add_generation_prompt
    return tokenizer.render_chat(messages, generate, wire.continue_final_message, extra)


def _read_prompt(context: ServerContext, wire: CompletionRequest, prompt: PromptInput) -> Prompt:
    tokenizer = context.tokenizer
    if isinstance(prompt, str):
        if not wire.echo:
            return Prompt(tuple(tokenizer.encode(prompt, add_special_tokens=True) or [_document_start(context)]))
        ids, offsets = tokenizer.encode_with_offsets(prompt)
        if not ids:
            ids, offsets = [_document_start(context)], [0]
        return Prompt(tuple(ids), prompt, tuple(offsets))
    check_token_ids(prompt, context.engine.info.vocab_size, "prompt")
    if not wire.echo:
        return Prompt(prompt)
    return Prompt(prompt, *_echo_of_ids(context, prompt))


def _echo_of_ids(context: ServerContext, token_ids: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    detokenizer = new_detokenizer(context.tokenizer)
    text, offsets = "", []
    for token_id in token_ids:
        offsets.append(len(text))
        text += detokenizer.push(token_id)
    return text + detokenizer.flush(), tuple(offsets)


def _document_start(context: ServerContext) -> int:
    """The token that an empty prompt stands for."""
    tokenizer = context.tokenizer
    start = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    if start is None:
        raise invalid("The prompt is empty, and this model has no token to start from.", "prompt", "empty_array")
    return start


def _token_limit(wire: GenerationRequest, prompt_length: int, info: ModelInfo, param: str) -> int:
    """Output tokens allowed; what is left of the context where the request is silent."""
    wanted = wire.token_limit
    room = info.max_model_len - prompt_length
    smallest = 1 if wanted is None else wanted
    if room < min(1, smallest):
        message = (
            f"This model's maximum context length is {info.max_model_len} tokens. However, your {param} resulted in "
            f"{prompt_length} tokens. Please reduce the length of the {param}."
        )
        raise invalid(message, param, "context_length_exceeded")
    if smallest > room:
        message = (
            f"This model's maximum context length is {info.max_model_len} tokens. However, you requested "
            f"{prompt_length + smallest} tokens ({prompt_length} in the {param}, {smallest} in the completion)."
        )
        raise invalid(message, wire.token_limit_field, "context_length_exceeded")
    return room if wanted is None else wanted


def _check_min_tokens(sampling: SamplingParams) -> None:
    if sampling.min_tokens > sampling.max_tokens:
        message = f"'min_tokens' is {sampling.min_tokens}, above the {sampling.max_tokens} tokens allowed."
        raise invalid(message, "min_tokens", "integer_above_max_value")


def _assemble(
    context: ServerContext,
    wire: GenerationRequest,
    request_id: str,
    prompts: tuple[Prompt, ...],
    samplings: list[SamplingParams],
) -> PreparedRequest:
    speculation = speculation_params(wire.speculation, context.engine.info)
    # Prompts that share a drawn seed would be answered alike where they are alike, so each draws its own.
    seeds = [context.engine.draw_seed() if wire.seed is None else wire.seed for _ in prompts]
    choices = [
        EngineRequest(
            request_id=f"{request_id}-{p * wire.n + i}",
            prompt_token_ids=prompt.token_ids,
            sampling=replace(samplings[p], seed=choice_seed(seeds[p], i)),
            speculation=speculation,
            cache_salt=wire.cache_salt,
        )
        for p, prompt in enumerate(prompts)
        for i in range(wire.n)
    ]
    return PreparedRequest(
        id=request_id,
        created=int(time.time()),
        wire=wire,
        prompts=prompts,
        choices=tuple(choices),
        num_logprobs=samplings[0].logprobs,
        echo=isinstance(wire, CompletionRequest) and wire.echo,
    )


async def _off_loop(characters: int, work: Callable[[], T]) -> T:
    """Runs ``work`` in a thread when there is so much text that other streams would feel it."""
    return work() if characters <= INLINE_CHARACTERS else await asyncio.to_thread(work)
