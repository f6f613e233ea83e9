"""Admission: what is refused before any work is done for it."""

from __future__ import annotations

from fastapi import Request

from server.context import ServerContext
from server.errors import SERVER_ERROR, ApiError, retry_after


async def refuse_while_draining(request: Request) -> None:
    """A router dependency. Raises ApiError 503 once the server has been told to stop."""
    context: ServerContext = request.app.state.context
    if context.draining:
        context.metrics.rejected("draining")
        raise ApiError(
            503,
            "The server is shutting down.",
            type=SERVER_ERROR,
            code="service_unavailable",
            headers=retry_after(context.config.server.drain_seconds),
        )
