"""The path of a generation request through the server: body, checks, engine, answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from engine.errors import EngineError, InvalidRequestError
from server.answer import Answer
from server.body import read_json
from server.choice import ChoiceDelta
from server.context import ServerContext
from server.errors import ApiError, as_api_error, rejection_reason
from server.generation import Generation
from server.prepare import PreparedRequest
from server.request_log import CLIENT_GONE
from server.stream import AnswerStream, frames

Prepare = Callable[[ServerContext, Mapping[str, Any]], Awaitable[PreparedRequest]]
NewAnswer = Callable[[ServerContext, Generation], Answer]


async def respond(request: Request, prepare: Prepare, new_answer: NewAnswer) -> Response:
    """Everything that can be refused is refused before the first header is sent. Raises ApiError."""
    context: ServerContext = request.app.state.context
    try:
        generation = await _start(context, request, prepare)
    except (ApiError, EngineError) as error:
        context.metrics.rejected(rejection_reason(as_api_error(error)))
        raise
    answer = new_answer(context, generation)
    headers = {"openai-version": "2020-10-01"}
    if generation.prepared.wire.stream:
        return AnswerStream(frames(context, generation, answer), generation, headers)
    try:
        deltas = await _collect(request, generation)
        if deltas is None:
            generation.close()
            return Response(status_code=CLIENT_GONE)
        return WholeAnswer(orjson.dumps(answer.body(deltas)), generation, headers)
    except BaseException:
        generation.close()
        raise


class WholeAnswer(Response):
    """The answer in one body; its generation is live until the body is written."""

    def __init__(self, content: bytes, generation: Generation, headers: Mapping[str, str]) -> None:
        super().__init__(content, 200, headers, "application/json")
        self._generation = generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._generation.close()


async def _start(context: ServerContext, request: Request, prepare: Prepare) -> Generation:
    body = await read_json(request, context.config.server.max_body_bytes)
    prepared = await prepare(context, body)
    generation = Generation(context, prepared.for_tenant(request.state.tenant))
    try:
        generation.start()
    except InvalidRequestError as error:
        if error.param == "prompt" and "messages" in body:
            raise InvalidRequestError(str(error), param="messages", code=error.code) from error
        raise
    return generation


async def _collect(request: Request, generation: Generation) -> list[ChoiceDelta] | None:
    """All deltas of the answer; None when the client left first."""

    async def gather() -> list[ChoiceDelta]:
        return [delta async for delta in generation.deltas() if isinstance(delta, ChoiceDelta)]

    work = asyncio.create_task(gather())
    gone = asyncio.create_task(_disconnect(request))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        return work.result() if work.done() else None
    finally:
        for task in (work, gone):
            task.cancel()
        await asyncio.gather(work, gone, return_exceptions=True)


async def _disconnect(request: Request) -> None:
    """Returns when the client has left. The body has been read, so nothing else can come."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
