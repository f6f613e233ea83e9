"""``/v1/models``: the one model of this server."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from server.context import ServerContext
from server.errors import ApiError

router = APIRouter(tags=["models"])


def model_object(context: ServerContext) -> dict[str, Any]:
    """The OpenAI model object, with vLLM's ``root``, ``parent`` and ``max_model_len`` beside it.

    margin_bound: below it a token's margin (``return_margins``) marks a near-tie, not a fault. runner, quantization,
    deterministic: how steps are computed (``engine.backend``). methods: the loaded drafters. verifier: how their drafts
    are verified; "match" alone keeps the tokens of a seed. chat: there is a chat template.
    """
    return {
        "id": context.served_model_name,
        "object": "model",
        "created": context.created,
        "owned_by": "headlong",
        "root": context.engine.info.name,
        "parent": None,
        "max_model_len": context.engine.info.max_model_len,
        "margin_bound": context.engine.info.margin_bound,
        "runner": context.engine.info.runner,
        "quantization": context.engine.info.quantization,
        "deterministic": context.engine.info.deterministic,
        "methods": list(context.engine.info.methods),
        "verifier": context.config.speculation.verifier,
        "chat": context.tokenizer.has_chat_template,
    }


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    return {"object": "list", "data": [model_object(request.app.state.context)]}


# ``path``: clients send an id with a slash raw or as %2F; both arrive here as one.
@router.get("/v1/models/{model_id:path}")
async def get_model(request: Request, model_id: str) -> dict[str, Any]:
    context: ServerContext = request.app.state.context
    if model_id != context.served_model_name:
        raise ApiError(
            404,
            f"The model {model_id!r} does not exist; this server has {context.served_model_name!r}.",
            code="model_not_found",
            param="model",
        )
    return model_object(context)
