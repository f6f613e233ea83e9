"""``POST /v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.answer import Answer, Json
from server.choice import Choice, ChoiceDelta
from server.context import ServerContext
from server.logprobs import chat_logprobs
from server.prepare import PreparedRequest, prepare_chat
from server.protocol.chat import parse_chat
from server.respond import respond

router = APIRouter()


class ChatAnswer(Answer):
    """``chat.completion`` and its chunks."""

    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def first_chunks(self, index: int) -> Iterator[Json]:
        yield _choice(index, {"role": "assistant", "content": "", "refusal": None}, None, None)

    def content(self, delta: ChoiceDelta) -> Json:
        return _choice(delta.index, {"content": delta.text}, self._logprobs([delta]), None) | self.token_extras(
            delta.tokens
        )

    def final(self, delta: ChoiceDelta) -> Json:
        return _choice(delta.index, {}, None, delta.finish_reason)

    def whole(self, choice: Choice, deltas: Sequence[ChoiceDelta]) -> Json:
        text = "".join(delta.text for delta in deltas)
        return {
            "index": choice.index,
            "message": {"role": "assistant", "content": text, "refusal": None, "annotations": []},
            "logprobs": self._logprobs(deltas),
            "finish_reason": choice.finish_reason,
        } | self.token_extras([token for delta in deltas for token in delta.tokens])

    def _logprobs(self, deltas: Sequence[ChoiceDelta]) -> Json | None:
        if self.prepared.num_logprobs is None:
            return None
        return chat_logprobs(self.tokenizer, [token for delta in deltas for token in delta.tokens])


def _choice(index: int, delta: Json, logprobs: Json | None, finish_reason: str | None) -> Json:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


async def _prepare(context: ServerContext, body: Mapping[str, Any]) -> PreparedRequest:
    return await prepare_chat(context, parse_chat(body))


@router.post("/v1/chat/completions")
async def create_chat_completion(request: Request) -> Response:
    """Answers a chat, streamed (SSE) or whole."""
    return await respond(request, _prepare, ChatAnswer)
