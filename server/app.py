"""The API's ASGI application."""

from __future__ import annotations

from fastapi import Depends, FastAPI

from server import chat, completions, health, models
from server.admission import refuse_while_draining
from server.auth import ApiKeys, require_api_key
from server.context import ServerContext
from server.operation import about_router, bare_app, metrics_router


def create_app(context: ServerContext) -> FastAPI:
    """The API. Raises ConfigError when ``server.api_keys_file`` cannot be used.

    Keys are asked for by a dependency of the routers; a check of paths in front of them can be walked around.
    """
    settings = context.config.server
    app = bare_app(context)
    app.state.api_keys = ApiKeys.load(settings.api_keys_file) if settings.api_keys_file else None
    keyed, admitted = [Depends(require_api_key)], [Depends(require_api_key), Depends(refuse_while_draining)]
    app.include_router(health.router)
    app.include_router(chat.router, dependencies=admitted)
    app.include_router(completions.router, dependencies=admitted)
    app.include_router(models.router, dependencies=keyed)
    app.include_router(about_router, dependencies=keyed)
    if settings.admin_port is None:
        app.include_router(metrics_router, dependencies=keyed)
    return app
