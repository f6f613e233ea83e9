"""What operators read: metrics, version, schema, and the application of ``server.admin_port``."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import Response
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from server import health
from server.context import ServerContext
from server.errors import install_error_handlers
from server.metrics import CONTENT_TYPE
from server.request_log import RequestLog
from server.request_path import RequestPath
from server.version import VERSION

EXPOSED_HEADERS = ["x-request-id", "retry-after", "openai-processing-ms"]

metrics_router = APIRouter(tags=["operation"])
about_router = APIRouter(tags=["operation"])


@metrics_router.get("/metrics", summary="Prometheus text", response_class=Response)
async def metrics(request: Request) -> Response:
    context: ServerContext = request.app.state.context
    return Response(context.metrics.render(), media_type=CONTENT_TYPE)


@about_router.get("/version")
async def version() -> dict[str, str]:
    return {"version": VERSION}


# FastAPI's own routes for the schema and its pages would stand outside the key check.
@about_router.get("/openapi.json", include_in_schema=False)
async def openapi(request: Request) -> dict[str, Any]:
    app: FastAPI = request.app
    return app.openapi()


def create_admin_app(context: ServerContext) -> FastAPI:
    """Probes and metrics for a port that clients do not reach; it asks for no key."""
    app = bare_app(context)
    app.include_router(health.router)
    app.include_router(metrics_router)
    return app


def bare_app(context: ServerContext) -> FastAPI:
    """An application without routes: error objects, request log, CORS; ``app.state.context`` for its routes."""
    app = FastAPI(
        title="headlong",
        version=VERSION,
        redirect_slashes=False,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        middleware=_middleware(context),
    )
    app.state.context = context
    install_error_handlers(app)
    return app


def _middleware(context: ServerContext) -> list[Middleware]:
    """Outermost first."""
    stack = [Middleware(RequestLog, context=context), Middleware(RequestPath)]
    origins = context.config.server.cors_origins
    if origins:
        cors = Middleware(
            CORSMiddleware,
            allow_origins=list(origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=EXPOSED_HEADERS,
        )
        stack.insert(1, cors)
    return stack
