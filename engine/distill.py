"""What needs both the engine and the heads: the answers that heads are trained on, written by the served model itself.

The engine's own batched decoding is the generator; the state behind each emitted token is kept on the way, so that
training never runs the model again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from engine.backend import Backend
from engine.batch import Batch
from engine.core import EngineCore
from engine.errors import RequestFailedError
from engine.model_runner import ForwardResult, ModelRunner
from engine.outputs import RequestOutput
from engine.sampling_params import MASK64, EngineRequest, SamplingParams, splitmix64
from engine.spec_decode.candidates import HeadCompute
from engine.spec_decode.draft_block import DraftBlock
from engine.spec_decode.own_kv import OwnKvBlock
from engine.spec_decode.streaming import StreamPass
from heads.data import LOOP_REPEATS, LOOP_SIZE, Answer, Ask, LoopDetector
from heads.lm_head import DraftLmHead
from heads.mtp import MtpModule
from heads.recursive import OwnKvModule
from heads.settings import AnswerSettings
from heads.streaming import StreamingHeads


class StateRecorder:
    """A ModelRunner that keeps, for each request, the final state of every row that emits a token.

    It stands between an engine core that drafts nothing and its real runner, so each completing step of a request
    emits exactly one token, chosen from the last row.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.states: dict[str, list[torch.Tensor]] = {}

    def forward(self, batch: Batch) -> ForwardResult:
        result = self._runner.forward(batch)
        assert result.hidden is not None, "the runner was built without hidden states"
        emitting = [span for span in batch.spans if span.item.completes]
        if emitting:
            rows = result.hidden.final[[span.root_row for span in emitting]].to("cpu", torch.float16)
            for span, row in zip(emitting, rows, strict=True):
                self.states.setdefault(span.item.request.request_id, []).append(row)
        return result

    def move_kv(self, source: Sequence[int], target: Sequence[int]) -> None:
        self._runner.move_kv(source, target)

    def read_kv(self, layer: int, slots: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        return self._runner.read_kv(layer, slots)

    def make_block(self, module: MtpModule, lm_head: DraftLmHead) -> DraftBlock:
        return self._runner.make_block(module, lm_head)

    def make_own_block(self, module: OwnKvModule, lm_head: DraftLmHead, compute: HeadCompute) -> OwnKvBlock:
        return self._runner.make_own_block(module, lm_head, compute)

    def make_streams(self, heads: StreamingHeads, lm_head: DraftLmHead) -> StreamPass:
        return self._runner.make_streams(heads, lm_head)


@dataclass(slots=True)
class _Writing:
    """An answer under way. length: where it ends if it has begun to loop."""

    ask: Ask
    tokens: list[int] = field(default_factory=list)
    detector: LoopDetector = field(default_factory=LoopDetector)
    length: int | None = None

    def take(self, output: RequestOutput) -> bool:
        """Adds a step's tokens; True once the answer repeats itself and is still being written."""
        for token in output.tokens:
            self.tokens.append(token.token_id)
            if self.detector.add(token.token_id) and self.length is None:
                self.length = len(self.tokens) - self.detector.size
        if output.finish_reason == "error":
            raise RequestFailedError(output.error or "the engine failed on a training answer")
        return self.length is not None and output.finish_reason is None


@dataclass(slots=True)
class AnswerGenerator:
    """Writes answers with an idle engine core; ``heads.data.Generate``.

    max_tokens: of an answer. on_tokens: told of every step's new tokens, for a progress bar.
    """

    core: EngineCore
    recorder: StateRecorder
    max_tokens: int
    on_tokens: Callable[[int], None] = lambda _: None

    def __call__(self, asks: Sequence[Ask]) -> list[Answer]:
        """One answer an ask, in order. An answer that repeats itself ends before its loop.

        Raises RequestFailedError if the engine fails on one.
        """
        writing = {f"answer-{index}": _Writing(ask) for index, ask in enumerate(asks)}
        for name, one in writing.items():
            sampling = SamplingParams(temperature=one.ask.temperature, seed=one.ask.seed, max_tokens=self.max_tokens)
            self.core.add(EngineRequest(name, one.ask.prompt, sampling))
        self.recorder.states.clear()
        while self.core.has_work:
            outputs = self.core.step().outputs
            for output in outputs:
                if writing[output.request_id].take(output):
                    self.core.abort(output.request_id)
            self.on_tokens(sum(len(output.tokens) for output in outputs))
        return [self._answer(name, one) for name, one in writing.items()]

    def _answer(self, name: str, one: _Writing) -> Answer:
        tokens = tuple(one.tokens[: one.length])
        states = torch.stack(self.recorder.states[name][: len(tokens)])
        return Answer(one.ask, tokens, states, was_cut=one.length is not None)


def make_asks(prompts: Sequence[Sequence[int]], settings: AnswerSettings, seed: int) -> list[Ask]:
    """One ask a prompt, in order: every other one greedy, the rest at the settings' temperatures in turn."""
    asks = []
    for index, prompt in enumerate(prompts):
        temperature = 0.0 if index % 2 == 0 else settings.temperatures[index // 2 % len(settings.temperatures)]
        asks.append(Ask(tuple(prompt), temperature, splitmix64(seed & MASK64, index + 1) >> 1))
    return asks


def answer_plan(backend: Backend, asks: Sequence[Ask], settings: AnswerSettings) -> dict[str, Any]:
    """What a folder of answers depends on; a run with another plan must not mix with it."""
    digest = hashlib.sha256()
    for ask in asks:
        digest.update(f"{ask.prompt}{ask.temperature}{ask.seed}\n".encode())
    return {
        "model": backend.loaded.digest,
        "quantization": backend.quantization,
        "asks": digest.hexdigest(),
        "max_tokens": settings.max_tokens,
        "shard_size": settings.shard_size,
        "loops_left_out": f"{LOOP_REPEATS} times {LOOP_SIZE} tokens",
    }
