"""Probes: is the process sound (``/health``), and should it get requests (``/ready``)? Never behind a key."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from server.context import ServerContext

router = APIRouter(tags=["probes"])


def engine_fault(context: ServerContext) -> str | None:
    """Why the engine cannot answer, or None. That the caller runs at all shows that the event loop does."""
    if not context.engine.is_alive:
        return "the engine thread has stopped"
    age = context.engine.heartbeat_age()
    if age > context.config.server.watchdog_seconds:
        return f"the engine has given no sign of life for {age:.0f} s"
    return None


@router.get("/health", summary="Liveness: event loop and engine thread")
async def health(request: Request) -> JSONResponse:
    fault = engine_fault(request.app.state.context)
    if fault is not None:
        return JSONResponse({"status": "unhealthy", "reason": fault}, status_code=503)
    return JSONResponse({"status": "ok"})


@router.get("/ready", summary="Readiness: model loaded, not draining, engine sound")
async def ready(request: Request) -> JSONResponse:
    context: ServerContext = request.app.state.context
    fault = "the server is draining" if context.draining else engine_fault(context)
    if fault is not None:
        return JSONResponse({"status": "unready", "reason": fault}, status_code=503)
    return JSONResponse({"status": "ready"})
