"""A server process from its first accepted connection to its exit: load, serve, drain, stop.

uvicorn stops listening at once at SIGTERM, and then neither ``/ready`` nor a new client gets an answer. So the signals
are handled here: the socket stays open while live answers finish, and uvicorn is told to stop when they have.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import uvicorn
from starlette.types import ASGIApp

from server.config import Config
from server.connection import Deadlines, connection_class
from server.context import ServerContext
from server.health import engine_fault
from server.startup import LoadedModel, StartupGate, make_context

logger = logging.getLogger("headlong.server")

KEEP_ALIVE_SECONDS = 75  # above the idle timeout of the usual load balancers
FAREWELL_SECONDS = 3.0  # for the error events of answers that the drain cut
ENGINE_STOP_SECONDS = 20.0  # a step under way is finished first
POLL_SECONDS = 0.05
WATCH_SECONDS = 1.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Launch:
    """What a server process starts from.

    load: makes the model (blocking), run in a thread of its own. build_app, build_admin_app: from the context to the
    ASGI apps. announce: called once requests are answered. admin_listener: the socket of ``server.admin_port``.
    """

    config: Config
    listener: socket.socket
    load: Callable[[], LoadedModel]
    build_app: Callable[[ServerContext], ASGIApp]
    announce: Callable[[ServerContext], None]
    admin_listener: socket.socket | None = None
    build_admin_app: Callable[[ServerContext], ASGIApp] | None = None


def run(launch: Launch) -> None:
    """Serves until SIGTERM or SIGINT and returns after the drain. Raises what ``launch.load`` raises."""
    loop_factory = _uvicorn_config(StartupGate(), launch.config).get_loop_factory()
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(_Process(launch).serve())


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handlers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Process:
    """One launch on its event loop."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._gate, self._admin_gate = StartupGate(), StartupGate()
        self._stopping = asyncio.Event()
        self._context: ServerContext | None = None

    async def serve(self) -> None:
        self._handle_signals()
        servers = self._make_servers()
        serving = [asyncio.create_task(server.serve([sock])) for server, sock in servers]
        watching: asyncio.Task[None] | None = None
        try:
            context = await self._start()
            watching = asyncio.create_task(_watch(context))
            await _first(asyncio.create_task(self._stopping.wait()), *serving)
            await self._drain(context)
        finally:
            if watching is not None:
                watching.cancel()
            for server, _ in servers:
                server.should_exit = True
            await asyncio.gather(*serving)

    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: int) -> None:
        if self._context is None:
            _exit_now(0)  # the loading thread cannot be interrupted, and nobody has been promised an answer
        if self._stopping.is_set():
            _exit_now(128 + number)
        self._context.draining = True
        self._stopping.set()

    def _make_servers(self) -> list[tuple[_Server, socket.socket]]:
        servers = [(_Server(_uvicorn_config(self._gate, self._launch.config)), self._launch.listener)]
        if self._launch.admin_listener is not None:
            admin = _Server(_uvicorn_config(self._admin_gate, self._launch.config))
            servers.append((admin, self._launch.admin_listener))
        return servers

    async def _start(self) -> ServerContext:
        loaded = await _in_thread(self._launch.load)
        context = make_context(self._launch.config, loaded)
        app = self._launch.build_app(context)
        context.engine.start(context.metrics.step)
        self._gate.open(app)
        if self._launch.build_admin_app is not None:
            self._admin_gate.open(self._launch.build_admin_app(context))
        self._context = context
        self._launch.announce(context)
        return context

    async def _drain(self, context: ServerContext) -> None:
        """Lets live answers finish within the budget, then has the engine end what is left."""
        seconds = context.config.server.drain_seconds
        logger.info("draining: %d live requests, up to %.0f s", self._gate.active, seconds)
        await self._wait_for_answers(context, seconds)
        try:
            async with asyncio.timeout(ENGINE_STOP_SECONDS):
                await context.engine.shutdown()
        except TimeoutError:
            logger.error("the engine did not stop within %.0f s", ENGINE_STOP_SECONDS)
            _exit_now(1)  # its thread would hold the interpreter back for ever
        await self._wait_for_answers(context, FAREWELL_SECONDS)

    async def _wait_for_answers(self, context: ServerContext, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while (self._gate.active or context.live_streams) and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(POLL_SECONDS)


def _uvicorn_config(app: ASGIApp, config: Config) -> uvicorn.Config:
    deadlines = Deadlines(KEEP_ALIVE_SECONDS, config.server.header_seconds, config.server.body_seconds)
    return uvicorn.Config(
        app=app,
        http=connection_class(deadlines),
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=1,
    )


async def _watch(context: ServerContext) -> None:
    """Logs when the engine falls silent or dies, and when it is back; the probes tell the orchestrator."""
    known: str | None = None
    while True:
        fault = engine_fault(context)
        if (fault is None) != (known is None):
            logger.error("unhealthy: %s", fault) if fault else logger.warning("healthy again")
        known = fault
        await asyncio.sleep(WATCH_SECONDS)


async def _first(*tasks: asyncio.Task[Any]) -> None:
    """Until one of them ends; its exception is raised."""
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()


async def _in_thread(work: Callable[[], T]) -> T:
    """``work`` in a daemon thread: the interpreter does not wait for it when the process is told to stop."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def target() -> None:
        try:
            result = work()
        except BaseException as error:
            loop.call_soon_threadsafe(future.set_exception, error)
        else:
            loop.call_soon_threadsafe(future.set_result, result)

    threading.Thread(target=target, name="headlong-load", daemon=True).start()
    return await future


def _exit_now(status: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
