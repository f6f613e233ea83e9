"""An engine that says what it is told to, in bursts of chosen sizes, behind ``AsyncEngine``'s face."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from engine.errors import EngineError
from engine.outputs import FinishReason, ModelInfo, RequestOutput, RequestTimes, TokenLogprob, TokenOutput
from engine.sampling_params import EngineRequest

Speak = Callable[[EngineRequest], Iterable[int]]


@dataclass
class FakeEngine:
    """``speak`` gives the token ids of a request; EOS, stop ids and the token limit cut as in the engine.

    bursts: sizes of the steps, repeated. Every token of a burst but the last counts as drafted and accepted.
    hang_after: tokens after which nothing comes any more until the request is aborted.
    fail_after, shut_down_after: tokens after which the request ends with an error, or aborted by the engine itself.
    refusal: what ``check`` raises.
    """

    info: ModelInfo
    speak: Speak
    bursts: Sequence[int] = (1,)
    hang_after: int | None = None
    fail_after: int | None = None
    shut_down_after: int | None = None
    refusal: EngineError | None = None
    step_seconds: float = 0.0
    num_cached_tokens: int = 0
    requests: list[EngineRequest] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    live: dict[str, asyncio.Event] = field(default_factory=dict)
    seeds: Iterator[int] = field(default_factory=lambda: itertools.count(1000))

    def draw_seed(self) -> int:
        return next(self.seeds)

    def check(self, request: EngineRequest) -> None:
        if self.refusal is not None:
            raise self.refusal

    def add(self, request: EngineRequest) -> AsyncIterator[RequestOutput]:
        self.check(request)
        assert request.request_id not in self.live, "a request id was used twice"
        self.requests.append(request)
        self.live[request.request_id] = asyncio.Event()
        return self._run(request)

    def abort(self, request_id: str) -> None:
        event = self.live.pop(request_id, None)
        if event is not None:
            self.aborted.append(request_id)
            event.set()

    def heartbeat_age(self) -> float:
        return 0.0

    @property
    def is_alive(self) -> bool:
        return True

    async def _run(self, request: EngineRequest) -> AsyncIterator[RequestOutput]:
        aborted = self.live[request.request_id]
        sent = 0
        for output in self._outputs(request):
            await asyncio.sleep(self.step_seconds)
            if self.hang_after is not None and sent >= self.hang_after:
                await aborted.wait()
            if aborted.is_set() or (self.shut_down_after is not None and sent >= self.shut_down_after):
                self.live.pop(request.request_id, None)
                yield RequestOutput(request.request_id, finish_reason="abort", times=_times(ended=True))
                return
            if self.fail_after is not None and sent >= self.fail_after:
                del self.live[request.request_id]
                yield RequestOutput(
                    request.request_id, finish_reason="error", error="secret detail", times=_times(ended=True)
                )
                return
            sent += len(output.tokens)
            if output.finish_reason is not None:
                self.live.pop(request.request_id, None)
            yield output

    def _outputs(self, request: EngineRequest) -> list[RequestOutput]:
        ids, reason, stop_id = self._cut(request)
        outputs = [RequestOutput(request.request_id, prompt_logprobs=self._prompt_logprobs(request))]
        sizes = itertools.cycle(self.bursts)
        while ids:
            size = next(sizes)
            burst, ids = ids[:size], ids[size:]
            tokens = tuple(self._token(request, token, i, len(burst)) for i, token in enumerate(burst))
            drafted = {"suffix": (1,) * (len(burst) - 1)} if len(burst) > 1 else {}
            outputs.append(RequestOutput(request.request_id, tokens, drafted, is_decode_step=True))
        outputs[0] = replace(outputs[0], max_draft_depth=max(self.bursts) - 1)
        outputs[-1] = replace(outputs[-1], finish_reason=reason, stop_token_id=stop_id)
        return [
            replace(output, num_cached_tokens=self.num_cached_tokens, times=_times(output.finish_reason is not None))
            for output in outputs
        ]

    def _cut(self, request: EngineRequest) -> tuple[list[int], FinishReason, int | None]:
        sampling = request.sampling
        ends = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(self.info.eos_token_ids))
        ids: list[int] = []
        for token in itertools.islice(self.speak(request), sampling.max_tokens):
            ids.append(token)
            if token in ends and len(ids) > sampling.min_tokens:
                return ids, "stop", token
        return ids, "length", None

    def _token(self, request: EngineRequest, token: int, i: int, size: int) -> TokenOutput:
        logprobs = request.sampling.logprobs
        drafted = i < size - 1
        return TokenOutput(
            token_id=token,
            logprob=None if logprobs is None else logprob_of(token, logprobs),
            margin=0.25 if request.sampling.return_margins else None,
            depth=i + 1 if drafted else 0,
            method="suffix" if drafted else None,
        )

    def _prompt_logprobs(self, request: EngineRequest) -> tuple[TokenLogprob | None, ...] | None:
        wanted = request.sampling.prompt_logprobs
        if wanted is None:
            return None
        return (None, *(logprob_of(token, wanted) for token in request.prompt_token_ids[1:]))


def logprob_of(token: int, count: int) -> TokenLogprob:
    """The made-up log-probability of a token; one in eight is silent."""
    value = -math.inf if token % 8 == 7 else -(token % 8) / 8
    return TokenLogprob(value, tuple(((token + k) % 256, value - k) for k in range(count)))


def _times(ended: bool) -> RequestTimes:
    now = time.monotonic()
    return RequestTimes(now, now, now, now if ended else None)
