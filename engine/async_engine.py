"""The asyncio face of the engine: owns the engine thread, hands requests in and outputs back.

Two hops cross the threads: a request into the core's inbox, and once a step everything that step made, with one
``call_soon_threadsafe``. All public methods but ``load`` are for the event loop's thread.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable

import torch

from engine.assembly import assemble, make_drafters
from engine.attention.check import vocab_size
from engine.backend import choose_backend
from engine.config import EngineSettings
from engine.core import EngineCore
from engine.device import resolve_device, resolve_dtype
from engine.draft_test import self_test
from engine.errors import EngineBusyError, EngineDeadError, InvalidRequestError
from engine.loading import load_model
from engine.loading.heads import require_heads_folder
from engine.loading.memory import return_free_memory
from engine.outputs import ModelInfo, RequestOutput, StepOutput, StepStats
from engine.sampling_params import EngineRequest

log = logging.getLogger("headlong.engine")

_IDLE_SECONDS = 0.5
# The engine thread runs thousands of short operations a second; with the default of 5 ms it would wait that long for
# the interpreter each time the event loop is in the middle of Python code.
_SWITCH_SECONDS = 0.0005
_MAX_RETRY_AFTER = 30.0


class AsyncEngine:
    """One model, one thread. ``info`` says what is being served."""

    def __init__(self, core: EngineCore, info: ModelInfo, settings: EngineSettings) -> None:
        self.info = info
        self._core = core
        self._max_waiting_tokens = settings.engine.max_waiting_tokens
        seed = settings.engine.seed
        self._random: random.Random | None = None if seed is None else random.Random(seed)
        self._streams: dict[str, asyncio.Queue[RequestOutput]] = {}
        self._wake = threading.Event()
        self._stopping = False
        self._emptied: asyncio.Event | None = None
        self._failure: str | None = None
        self._heartbeat = time.monotonic()
        self._rows_per_second = 0.0
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_step: Callable[[StepStats], None] | None = None

    @classmethod
    def load(cls, settings: EngineSettings, *, progress: Callable[[str], None] | None = None) -> AsyncEngine:
        """Loads the model, checks that it can be served and measures its step times; blocking, seconds.

        Raises ModelLoadError with one sentence for the user.
        """
        tell = progress or (lambda _: None)
        require_heads_folder(settings.speculation)
        device = resolve_device(settings.engine.device)
        loaded = load_model(settings.model, device, resolve_dtype(settings.model.dtype), tell)
        drafting = make_drafters(settings.speculation, loaded)
        backend = choose_backend(loaded, settings.model.quantization, settings.engine, tell)
        assembly = assemble(backend, settings, tell, drafting.drafters)
        if drafting.heads is not None:
            tell("Trying the draft heads")
            self_test(assembly.core, drafting.heads.config)
        return_free_memory()
        info = ModelInfo(
            name=loaded.name,
            path=str(loaded.path),
            digest=loaded.digest,
            vocab_size=vocab_size(loaded.model),
            max_model_len=assembly.limits.max_model_len,
            eos_token_ids=loaded.eos_token_ids,
            dtype=str(loaded.model.dtype).removeprefix("torch."),
            device=device.type,
            num_kv_blocks=assembly.num_blocks,
            block_size=settings.engine.block_size,
            architecture=loaded.architecture,
            default_sampling=loaded.default_sampling,
            methods=drafting.methods,
            max_draft_tokens=assembly.limits.max_draft_tokens,
            created=int(time.time()),
            torch_version=torch.__version__,
            margin_bound=backend.margin_bound,
            runner=backend.name,
            quantization=backend.quantization,
            deterministic=backend.deterministic,
        )
        return cls(assembly.core, info, settings)

    def start(self, on_step: Callable[[StepStats], None] | None = None) -> None:
        """Starts the engine thread; ``on_step`` is called on the running event loop once a step."""
        self._loop = asyncio.get_running_loop()
        self._on_step = on_step
        sys.setswitchinterval(_SWITCH_SECONDS)
        self._thread = threading.Thread(target=self._run, name="headlong-engine", daemon=True)
        self._thread.start()

    def draw_seed(self) -> int:
        """A fresh 64-bit noise key for a request that brought none; reproducible when ``engine.seed`` is set."""
        return secrets.randbits(64) if self._random is None else self._random.getrandbits(64)

    def check(self, request: EngineRequest) -> None:
        """Raises InvalidRequestError, EngineBusyError or EngineDeadError for what cannot be taken; queues nothing."""
        self._check_alive()
        self._check_prompt(request)
        self._check_speculation(request)
        if request.request_id in self._streams:
            raise InvalidRequestError(f"request id {request.request_id} is in use", param="request_id")
        waiting = self._core.scheduler.waiting_tokens + self._core.inbox_tokens
        if waiting and waiting + len(request.prompt_token_ids) > self._max_waiting_tokens:
            seconds = waiting / max(self._rows_per_second, 1.0)
            raise EngineBusyError(
                f"{waiting} prompt tokens are already waiting", retry_after=min(_MAX_RETRY_AFTER, max(1.0, seconds))
            )

    def _check_alive(self) -> None:
        if not self.is_alive:
            raise EngineDeadError(self._failure or "the engine is not running")

    def _check_prompt(self, request: EngineRequest) -> None:
        prompt, info = request.prompt_token_ids, self.info
        if not prompt:
            raise InvalidRequestError("the prompt is empty", param="prompt", code="empty_array")
        if min(prompt) < 0 or max(prompt) >= info.vocab_size:
            raise InvalidRequestError(
                f"the prompt has a token id outside 0..{info.vocab_size - 1}", param="prompt", code="invalid_value"
            )
        if len(prompt) + min(1, request.sampling.max_tokens) > info.max_model_len:
            raise InvalidRequestError(
                f"this model's context is {info.max_model_len} tokens, the prompt alone has {len(prompt)}",
                param="prompt",
                code="context_length_exceeded",
            )

    def _check_speculation(self, request: EngineRequest) -> None:
        method = request.speculation.method
        if method != "auto" and method not in self.info.methods:
            loaded = ", ".join(self.info.methods) or "none"
            raise InvalidRequestError(
                f"the drafter {method!r} is not loaded (loaded: {loaded})",
                param="speculation.method",
                code="unsupported_value",
            )

    def add(self, request: EngineRequest) -> AsyncIterator[RequestOutput]:
        """Queues a request that ``check`` has passed; the iterator ends after the one output with a finish_reason.

        The queue's bound is ``check``'s alone: the choices of one answer are checked first and then added together,
        and must not find each other in the way. Raises EngineDeadError. A caller that stops early calls ``abort``.
        """
        self._check_alive()
        stream: asyncio.Queue[RequestOutput] = asyncio.Queue()
        self._streams[request.request_id] = stream
        self._core.add(request)
        self._wake.set()
        return self._read(stream)

    @staticmethod
    async def _read(stream: asyncio.Queue[RequestOutput]) -> AsyncIterator[RequestOutput]:
        while True:
            output = await stream.get()
            yield output
            if output.finish_reason is not None:
                return

    def abort(self, request_id: str) -> None:
        """Frees the request within one step; its iterator then ends with finish_reason "abort".

        Unknown and finished ids are ignored: an abort may come late.
        """
        if request_id in self._streams:
            self._core.abort(request_id)
            self._wake.set()

    def heartbeat_age(self) -> float:
        """Seconds since the engine thread last began a step or an idle wait."""
        return time.monotonic() - self._heartbeat

    @property
    def is_alive(self) -> bool:
        return self._failure is None and self._thread is not None and self._thread.is_alive()

    async def shutdown(self) -> None:
        """Aborts what is left and joins the engine thread."""
        for request_id in list(self._streams):
            self.abort(request_id)
        if self._streams and self.is_alive:
            self._emptied = asyncio.Event()
            await self._emptied.wait()
        self._stopping = True
        self._wake.set()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        """The engine thread. A fault that no request can be blamed for ends them all with an error, and is logged."""
        while not self._stopping:
            self._heartbeat = time.monotonic()
            if not self._core.has_work:
                self._wake.wait(_IDLE_SECONDS)
                self._wake.clear()
                continue
            try:
                output = self._core.step()
            except Exception as error:
                log.exception("the engine stopped")
                self._failure = f"the engine stopped: {type(error).__name__}"
                self._post(self._fail_all)
                return
            self._post(self._deliver, output)

    def _post(self, call: Callable[..., None], *arguments: StepOutput) -> None:
        loop = self._loop
        assert loop is not None
        try:
            loop.call_soon_threadsafe(call, *arguments)
        except RuntimeError:
            log.warning("the event loop has closed; an engine step had nobody to report to")
            self._stopping = True

    def _deliver(self, step: StepOutput) -> None:
        if step.stats.step_seconds > 0:
            rate = step.stats.rows / step.stats.step_seconds
            self._rows_per_second += 0.1 * (rate - self._rows_per_second)
        for output in step.outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue
            if output.finish_reason is not None:
                del self._streams[output.request_id]
            stream.put_nowait(output)
        self._note_empty()
        if self._on_step is not None:
            self._on_step(step.stats)

    def _fail_all(self) -> None:
        for request_id, stream in self._streams.items():
            failed = RequestOutput(request_id, finish_reason="error", error=self._failure)
            stream.put_nowait(failed)
        self._streams.clear()
        self._note_empty()

    def _note_empty(self) -> None:
        if self._emptied is not None and not self._streams:
            self._emptied.set()
