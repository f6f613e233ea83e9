"""From a configuration to a running server's parts, and what is answered meanwhile."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from engine.errors import ModelLoadError
from server.config import Config
from server.context import ServerContext
from server.errors import SERVER_ERROR, ApiError, error_body, retry_after
from server.metrics import Metrics
from server.version import VERSION

if TYPE_CHECKING:
    from engine.async_engine import AsyncEngine
    from engine.outputs import ModelInfo
    from server.tokenizer import Tokenizer

_LOADING = "The model is still loading."


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """What loading brings: an engine that is not started yet, and its model's tokenizer."""

    engine: AsyncEngine
    tokenizer: Tokenizer


def load_model(config: Config, progress: Callable[[str], None]) -> LoadedModel:
    """Loads weights and tokenizer (blocking; seconds to minutes).

    Raises engine.errors.ModelLoadError or MemoryError.
    """
    # Imported here: torch and transformers take seconds, which no other command and no refused setting should pay.
    progress("Loading libraries")
    from engine.async_engine import AsyncEngine
    from server.tokenizer import Tokenizer, TokenizerLoadError

    engine = AsyncEngine.load(config.to_engine_settings(), progress=progress)
    progress("Reading the tokenizer")
    try:
        return LoadedModel(engine, Tokenizer.load(engine.info.path))
    except TokenizerLoadError as error:
        raise ModelLoadError(str(error)) from error


def make_context(config: Config, loaded: LoadedModel) -> ServerContext:
    """The parts of one server; the engine is still to be started."""
    info = loaded.engine.info
    served_name = config.server.served_model_name or info.name
    metrics = Metrics(info, served_name, loaded.engine.heartbeat_age, vllm_aliases=config.metrics.vllm_aliases)
    return ServerContext(
        engine=loaded.engine,
        tokenizer=loaded.tokenizer,
        config=config,
        metrics=metrics,
        served_model_name=served_name,
        fingerprint=fingerprint(info),
        created=info.created or int(time.time()),
    )


def fingerprint(info: ModelInfo) -> str:
    """OpenAI's ``system_fingerprint``: equal while build, weights and numerics are."""
    parts = (VERSION, info.digest, info.dtype, info.device, info.torch_version)
    return f"fp_{hashlib.sha256('/'.join(parts).encode()).hexdigest()[:12]}"


class StartupGate:
    """The outermost ASGI app: answers probes while the model loads, then hands every request to ``app``.

    active: requests inside the app, from their headers to the end of their answer.
    """

    def __init__(self) -> None:
        self.active = 0
        self._app: ASGIApp | None = None

    def open(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._app is None:
            await _while_loading(scope)(scope, receive, send)
            return
        self.active += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self.active -= 1


def _while_loading(scope: Scope) -> JSONResponse:
    path = scope["path"].rstrip("/")
    if path == "/health":
        return JSONResponse({"status": "ok"})
    if path == "/ready":
        return JSONResponse({"status": "unready", "reason": "the model is loading"}, status_code=503)
    error = ApiError(503, _LOADING, SERVER_ERROR, "model_loading", None, retry_after(5))
    return JSONResponse(error_body(error), error.status, dict(error.headers))
