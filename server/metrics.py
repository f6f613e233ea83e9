"""The server's figures: fed by routes and engine steps on the event loop, read as Prometheus text."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from prometheus_client import CollectorRegistry, disable_created_metrics, generate_latest

from engine.outputs import ModelInfo, RequestTimes, StepStats, TokenOutput
from server.metric_aliases import VllmAliases
from server.metric_series import DraftSeries, EngineSeries, RequestSeries, SeriesFactory
from server.version import VERSION

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SNAPSHOT_SECONDS = 0.1
NO_DRAFT = "none"


class Metrics:
    """One server's series in a registry of their own. Every method runs on the event loop's thread.

    heartbeat_age: seconds since the engine's last sign of life (``AsyncEngine.heartbeat_age``).
    """

    def __init__(
        self, info: ModelInfo, served_model_name: str, heartbeat_age: Callable[[], float], *, vllm_aliases: bool = False
    ) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a line a series that no reader of this format uses
        self._registry = CollectorRegistry()
        make = SeriesFactory(self._registry, served_model_name)
        self._requests = RequestSeries(make)
        self._engine = EngineSeries(make, heartbeat_age)
        self._drafts = DraftSeries(make, info.methods, info.max_draft_tokens)
        build = {"version": VERSION, "model_digest": info.digest, "heads_digest": "", "torch": info.torch_version}
        make.info("build", "What is running", build)
        if vllm_aliases:
            self._registry.register(VllmAliases(make.families))
        self._snapshot = b""
        self._snapshot_at = -SNAPSHOT_SECONDS

    def tokens(
        self,
        kept: Sequence[TokenOutput],
        drafted: Mapping[str, tuple[int, ...]],
        is_decode_step: bool,
        interval: float | None,
    ) -> None:
        """What one engine step brought one request.

        kept: its tokens after the cut at a stop string. drafted: ``RequestOutput.drafted``. interval: seconds since
        the request's tokens before, None for its first.
        """
        if kept:
            self._requests.generation_tokens.inc(len(kept))
            if interval is not None:
                self._requests.inter_token.observe(interval / len(kept), len(kept))
        for method, counts in drafted.items():
            self._count_draft(method, counts)
        for token in kept:
            if token.method is not None:
                self._drafts.accepted[token.method,].inc()
                self._drafts.accepted_at[token.method, str(token.depth - 1)].inc()
        if is_decode_step:
            self._drafts.acceptance_length[_step_method(kept, drafted),].observe(len(kept))

    def _count_draft(self, method: str, counts: tuple[int, ...]) -> None:
        total = sum(counts)
        if not total:
            return
        self._drafts.drafts[method,].inc()
        self._drafts.draft_tokens[method,].inc(total)
        for position, count in enumerate(counts):
            self._drafts.drafted_at[method, str(position)].inc(count)

    def chunk(self, interval: float) -> None:
        """A streamed chunk left ``interval`` seconds after the one before."""
        self._requests.inter_chunk.observe(interval)

    def finished(self, reason: str, times: RequestTimes, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """A request ended; ``reason`` is its finish reason, ``abort`` and ``error`` included."""
        series = self._requests
        series.success[reason,].inc()
        series.prompt_tokens.inc(num_prompt_tokens)
        spans = (
            (series.ttft, times.arrived, times.first_token),
            (series.queue, times.arrived, times.scheduled),
            (series.prefill, times.scheduled, times.first_token),
            (series.decode, times.first_token, times.finished),
            (series.e2e, times.arrived, times.finished),
        )
        for histogram, start, end in spans:
            if start is not None and end is not None:
                histogram.observe(end - start)
        if times.first_token is not None and times.finished is not None and num_output_tokens > 1:
            series.per_token.observe((times.finished - times.first_token) / (num_output_tokens - 1))

    def rejected(self, reason: str) -> None:
        """A request was refused before any work; ``reason`` is the server's own word, never the client's."""
        self._requests.rejected[reason,].inc()

    def step(self, stats: StepStats) -> None:
        """An engine step's own figures."""
        engine, drafts = self._engine, self._drafts
        engine.running.set(stats.running)
        engine.waiting.set(stats.waiting)
        engine.kv_usage.set(stats.kv_usage)
        engine.preemptions.inc(stats.preemptions)
        engine.prefix_queries.inc(stats.prefix_queries)
        engine.prefix_hits.inc(stats.prefix_hits)
        for phase, seconds in stats.phase_seconds.items():
            engine.phase_seconds[phase,].observe(seconds)
        if stats.rows:
            engine.rows.observe(stats.rows)
        for method, count in stats.wasted.items():
            drafts.wasted[method,].inc(count)
        for mode, count in stats.modes.items():
            drafts.steps[mode].inc(count)
        if stats.speedup_estimate is not None:
            drafts.speedup.set(stats.speedup_estimate)

    def render(self) -> bytes:
        """The series in Prometheus text format, at most ``SNAPSHOT_SECONDS`` old.

        A picker that scrapes every 50 ms would otherwise hold the interpreter for milliseconds each time.
        """
        now = time.monotonic()
        if now - self._snapshot_at >= SNAPSHOT_SECONDS:
            self._snapshot = generate_latest(self._registry)
            self._snapshot_at = now
        return self._snapshot


def _step_method(kept: Sequence[TokenOutput], drafted: Mapping[str, tuple[int, ...]]) -> str:
    """The one method a decode step is booked to, so that the sum over methods counts every step once.

    The owner of the deepest token kept; without one the first that drafted; ``none`` for a step without a draft.
    """
    owners = [token.method for token in kept if token.method is not None]
    if owners:
        return owners[-1]
    return next((method for method, counts in drafted.items() if any(counts)), NO_DRAFT)
