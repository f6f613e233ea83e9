"""``POST /v1/completions``, the older endpoint: text in, text out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.answer import Answer, Json
from server.choice import Choice, ChoiceDelta
from server.context import ServerContext
from server.logprobs import LegacyLogprobs
from server.prepare import PreparedRequest, prepare_completion
from server.protocol.completions import parse_completion
from server.respond import respond

router = APIRouter()


class CompletionAnswer(Answer):
    """``text_completion``; a chunk has the same shape as the whole."""

    object_name = "text_completion"
    chunk_name = "text_completion"

    def first_chunks(self, index: int) -> Iterator[Json]:
        if self.prepared.echo:
            yield _choice(index, self.prepared.prompt_of(index).text, self._logprobs(index, [], with_prompt=True), None)

    def content(self, delta: ChoiceDelta) -> Json:
        logprobs = self._logprobs(delta.index, [delta], with_prompt=False)
        return _choice(delta.index, delta.text, logprobs, None) | self.token_extras(delta.tokens)

    def final(self, delta: ChoiceDelta) -> Json:
        return _choice(delta.index, "", None, delta.finish_reason)

    def whole(self, choice: Choice, deltas: Sequence[ChoiceDelta]) -> Json:
        text = "".join(delta.text for delta in deltas)
        if self.prepared.echo:
            text = self.prepared.prompt_of(choice.index).text + text
        logprobs = self._logprobs(choice.index, deltas, with_prompt=self.prepared.echo)
        tokens = [token for delta in deltas for token in delta.tokens]
        return _choice(choice.index, text, logprobs, choice.finish_reason) | self.token_extras(tokens)

    def _logprobs(self, index: int, deltas: Sequence[ChoiceDelta], *, with_prompt: bool) -> Json | None:
        if self.prepared.num_logprobs is None:
            return None
        prompt = self.prepared.prompt_of(index)
        result = LegacyLogprobs(self.tokenizer, self.prepared.num_logprobs)
        if with_prompt:
            known = self.generation.choices[index].prompt_logprobs
            if known is None:
                raise RuntimeError("the engine returned no log-probabilities for the echoed prompt")
            result.add_prompt(prompt.token_ids, prompt.offsets, known)
        start = len(prompt.text) if self.prepared.echo else 0
        for delta in deltas:
            result.add_output(delta.tokens, [start + offset for offset in delta.offsets])
        return result.body()


def _choice(index: int, text: str, logprobs: Json | None, finish_reason: str | None) -> Json:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}


async def _prepare(context: ServerContext, body: Mapping[str, Any]) -> PreparedRequest:
    return await prepare_completion(context, parse_completion(body))


@router.post("/v1/completions")
async def create_completion(request: Request) -> Response:
    """Continues a text, streamed (SSE) or whole."""
    return await respond(request, _prepare, CompletionAnswer)
