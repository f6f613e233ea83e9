"""What every room's tests share: an engine without a model, and a server context around it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.outputs import ModelInfo, RequestOutput, StepStats
from engine.sampling_params import EngineRequest
from server.config import Config, load_config
from server.context import ServerContext
from server.startup import LoadedModel, make_context

INFO = ModelInfo(
    name="tiny",
    path="/nowhere",
    digest="d1",
    vocab_size=100,
    max_model_len=64,
    eos_token_ids=(2,),
    dtype="float32",
    device="cpu",
    num_kv_blocks=8,
    block_size=16,
    methods=("suffix",),
    max_draft_tokens=4,
    created=1_700_000_000,
    torch_version="2.13.0",
    margin_bound=0.0,
    runner="compiled",
    quantization="int8",
    deterministic=True,
)


@dataclass
class StillEngine:
    """An engine that is never asked to generate: what probes, models and metrics look at."""

    info: ModelInfo = INFO
    is_alive: bool = True
    age: float = 0.0
    on_step: Callable[[StepStats], None] | None = None
    stopped: asyncio.Event = field(default_factory=asyncio.Event)

    def start(self, on_step: Callable[[StepStats], None] | None = None) -> None:
        self.on_step = on_step

    def heartbeat_age(self) -> float:
        return self.age

    def check(self, request: EngineRequest) -> None:
        raise AssertionError("no test of the frame generates")

    def add(self, request: EngineRequest) -> AsyncIterator[RequestOutput]:
        raise AssertionError("no test of the frame generates")

    def abort(self, request_id: str) -> None:
        raise AssertionError("no test of the frame generates")

    async def shutdown(self) -> None:
        self.stopped.set()


ContextFactory = Callable[..., ServerContext]


@pytest.fixture
def still_context() -> ContextFactory:
    """Makes a server context around a StillEngine; keyword arguments are ``KEY=VALUE`` overrides with __ for dots."""

    def make(**overrides: Any) -> ServerContext:
        flags = {key.replace("__", "."): value for key, value in overrides.items()}
        config: Config = load_config(None, (), flags)
        loaded = LoadedModel(StillEngine(), SimpleNamespace(has_chat_template=True))  # type: ignore[arg-type]
        return make_context(config, loaded)

    return make


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """A file of three prompts."""
    path = tmp_path / "prompts.txt"
    path.write_text("one\ntwo\n\nthree\n")
    return path


@pytest.fixture
def no_drafter_fails() -> Iterator[None]:
    """The engine goes on without a drafter that raises, and a test of what it drafts would then show nothing."""
    failures: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno >= logging.ERROR and "drafter" in record.getMessage():
                failures.append(record.getMessage())

    listener, log = Listener(), logging.getLogger("headlong.engine")
    log.addHandler(listener)
    yield
    log.removeHandler(listener)
    assert not failures
