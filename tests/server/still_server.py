"""A server process without a model, for the tests of its life: run as a script with KEY=VALUE configuration arguments.

Its engine makes nothing. ``/slow?events=N`` streams N events 0.1 s apart, and ends with an error event when the engine
is shut down before. Environment: STILL_LOAD_SECONDS, how long loading takes; STILL_LOAD_FAULT, what it fails with.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from fastapi import Depends, FastAPI, Request
from starlette.responses import StreamingResponse

from engine.errors import ModelLoadError
from engine.outputs import ModelInfo
from server import health
from server.admission import refuse_while_draining
from server.config import load_config
from server.context import ServerContext
from server.lifecycle import Launch, run
from server.listener import listen, url_of
from server.operation import about_router, bare_app, create_admin_app
from server.startup import LoadedModel

INFO = ModelInfo("tiny", "/nowhere", "d1", 100, 64, (2,), "float32", "cpu", 8, 16, methods=("suffix",))


class StillEngine:
    info = INFO
    is_alive = True

    def __init__(self) -> None:
        self.stopped = asyncio.Event()

    def start(self, on_step: Callable[[Any], None] | None = None) -> None:
        asyncio.get_running_loop()

    def heartbeat_age(self) -> float:
        return 0.0

    async def shutdown(self) -> None:
        self.stopped.set()
        print("engine stopped", flush=True)


def load() -> LoadedModel:
    time.sleep(float(os.environ.get("STILL_LOAD_SECONDS", "0")))
    if fault := os.environ.get("STILL_LOAD_FAULT"):
        raise ModelLoadError(fault)
    return LoadedModel(StillEngine(), object())  # type: ignore[arg-type]


def build_app(context: ServerContext) -> FastAPI:
    app = bare_app(context)
    app.include_router(health.router)
    app.include_router(about_router)
    stopped = context.engine.stopped  # type: ignore[attr-defined]

    async def events(count: int) -> AsyncIterator[bytes]:
        name = f"slow-{id(asyncio.current_task())}"
        context.live_streams.add(name)
        try:
            for number in range(count):
                yield f"data: {number}\n\n".encode()
                try:
                    await asyncio.wait_for(stopped.wait(), 0.1)
                except TimeoutError:
                    continue
                yield b'data: {"error": {}}\n\n'
                return
            yield b"data: [DONE]\n\n"
        finally:
            context.live_streams.discard(name)

    @app.get("/slow", dependencies=[Depends(refuse_while_draining)])
    async def slow(request: Request, count: int) -> StreamingResponse:
        return StreamingResponse(events(count), media_type="text/event-stream")

    return app


def main() -> None:
    config = load_config(None, sys.argv[1:], {"server.port": 0})
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    listener = listen(config.server.host, config.server.port)
    print(url_of(listener), flush=True)
    admin_listener = None
    if config.server.admin_port is not None:
        admin_listener = listen(config.server.host, config.server.admin_port)
        print(url_of(admin_listener), flush=True)
    launch = Launch(
        config=config,
        listener=listener,
        load=load,
        build_app=build_app,
        announce=lambda context: print(f"serving {context.served_model_name}", flush=True),
        admin_listener=admin_listener,
        build_admin_app=None if admin_listener is None else create_admin_app,
    )
    try:
        run(launch)
    except ModelLoadError as error:
        print(f"fault: {error}", flush=True)
        sys.exit(3)
    print("ended", flush=True)


if __name__ == "__main__":
    main()
