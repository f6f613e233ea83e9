"""What both endpoints' answers share: head, usage, figures, and the order of a stream's chunks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

from engine.outputs import TokenOutput
from server.choice import Choice, ChoiceDelta
from server.context import ServerContext
from server.generation import Generation

Json = dict[str, object]


class Answer(ABC):
    """Turns a generation's deltas into stream chunks, or into one body; both see the same deltas."""

    object_name: str
    chunk_name: str

    def __init__(self, context: ServerContext, generation: Generation) -> None:
        self.tokenizer = context.tokenizer
        self.generation = generation
        self.prepared = generation.prepared
        self.wire = generation.prepared.wire
        self._started: set[int] = set()
        self._has_sent_prompt_ids = False
        self._head: Json = {
            "id": self.prepared.id,
            "object": "",
            "created": self.prepared.created,
            "model": context.served_model_name,
            "system_fingerprint": context.fingerprint,
        }
        if self.wire.service_tier is not None:
            self._head["service_tier"] = "default"

    @abstractmethod
    def first_chunks(self, index: int) -> Iterator[Json]:
        """Choices of the chunks that open choice ``index``."""

    @abstractmethod
    def content(self, delta: ChoiceDelta) -> Json:
        """The choice of a chunk with text or tokens."""

    @abstractmethod
    def final(self, delta: ChoiceDelta) -> Json:
        """The choice of the chunk that carries the finish reason."""

    @abstractmethod
    def whole(self, choice: Choice, deltas: Sequence[ChoiceDelta]) -> Json:
        """A choice of a body that is not streamed."""

    def chunks(self, delta: ChoiceDelta) -> Iterator[Json]:
        """The chunks of one delta: opening ones at a choice's first, exactly one with a finish reason at its last."""
        if delta.index not in self._started:
            self._started.add(delta.index)
            for choice in self.first_chunks(delta.index):
                yield self._chunk(choice)
        if delta.text or (delta.tokens and self._reports_tokens):
            yield self._chunk(self.content(delta))
        if delta.finish_reason is not None:
            chunk = self._chunk(self.final(delta))
            if self._is_complete and not self.wire.stream_options.include_usage:
                chunk |= self._metrics()
            yield chunk

    def closing_chunks(self) -> Iterator[Json]:
        """The usage chunk, where it is asked for."""
        if self.wire.stream_options.include_usage:
            yield self._top(self.chunk_name) | {"choices": [], "usage": self.usage()} | self._metrics()

    def body(self, deltas: Sequence[ChoiceDelta]) -> Json:
        """The whole answer of a generation whose deltas these are, all of them."""
        by_choice: list[list[ChoiceDelta]] = [[] for _ in self.generation.choices]
        for delta in deltas:
            by_choice[delta.index].append(delta)
        choices = [self.whole(choice, by_choice[choice.index]) for choice in self.generation.choices]
        head = self._top(self.object_name) | {"choices": choices, "usage": self.usage()}
        return head | self._prompt_ids() | self._metrics()

    def usage(self) -> Json:
        """A prompt counts once, however many choices continue it; a cached prefix likewise."""
        prompts = self.prepared.prompts
        prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        completion_tokens = sum(choice.num_tokens for choice in self.generation.choices)
        cached = sum(self.generation.choices[p * self.wire.n].num_cached_tokens for p in range(len(prompts)))
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached, "audio_tokens": 0},
            "completion_tokens_details": {
                "reasoning_tokens": 0,
                "audio_tokens": 0,
                "accepted_prediction_tokens": 0,
                "rejected_prediction_tokens": 0,
            },
        }

    def token_extras(self, tokens: Sequence[TokenOutput]) -> Json:
        """The fields of a choice that go with its tokens, one entry a token, where they are asked for."""
        extras: Json = {}
        if self.wire.return_token_ids:
            extras["token_ids"] = [token.token_id for token in tokens]
        if self.wire.return_margins:
            extras["margins"] = [token.margin for token in tokens]
        if self.wire.speculation.detail:
            extras["accepted_by"] = [{"depth": token.depth, "method": token.method} for token in tokens]
        return extras

    @property
    def _reports_tokens(self) -> bool:
        wire = self.wire
        wants_extras = wire.return_token_ids or wire.return_margins or wire.speculation.detail
        return wants_extras or self.prepared.num_logprobs is not None

    @property
    def _is_complete(self) -> bool:
        return all(choice.finish_reason is not None for choice in self.generation.choices)

    def _top(self, object_name: str) -> Json:
        return {**self._head, "object": object_name}

    def _chunk(self, choice: Json) -> Json:
        chunk = self._top(self.chunk_name) | {"choices": [choice]}
        options = self.wire.stream_options
        if options.continuous_usage_stats:
            chunk["usage"] = self.usage()
        elif options.include_usage:
            chunk["usage"] = None
        chunk |= self._prompt_ids()
        self._has_sent_prompt_ids = True
        return chunk

    def _prompt_ids(self) -> Json:
        """Once an answer, at its top: a list of ids, or a list of lists for several prompts."""
        if not self.wire.return_token_ids or self._has_sent_prompt_ids:
            return {}
        ids = [list(prompt.token_ids) for prompt in self.prepared.prompts]
        return {"prompt_token_ids": ids[0] if len(ids) == 1 else ids}

    def _metrics(self) -> Json:
        """Figures of one sequence would mean nothing summed over several, so these have none."""
        if not self.wire.speculation.stats:
            return {}
        choices = self.generation.choices
        return {"metrics": {"speculative_decoding": choices[0].stats.report() if len(choices) == 1 else None}}
