"""Every Prometheus series of the server: names, help texts, labels and bucket edges, made at 0 for one model."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, product
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

# The edges of vLLM's own histograms, so that dashboards and SLO queries carry over.
TTFT_EDGES: tuple[float, ...] = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
)
TTFT_EDGES += (20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)
LATENCY_EDGES: tuple[float, ...] = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0)
LATENCY_EDGES += (120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0)
# vLLM's edges from 10 ms on; several tokens of one step make shorter intervals common here.
TOKEN_EDGES: tuple[float, ...] = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1.0,
)
TOKEN_EDGES += (2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
PHASE_EDGES = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
ROW_EDGES = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)

FINISH_REASONS = ("stop", "length", "abort", "error")
REJECT_REASONS = ("auth", "draining", "invalid", "not_found", "overloaded", "too_large")
PHASES = ("schedule", "draft", "verify", "sample", "commit")
STEP_MODES: tuple[tuple[str, str], ...] = (
    ("spec", ""),
    *(("plain", reason) for reason in ("request", "disabled", "no_draft")),
)
STEP_MODES += tuple(("plain", reason) for reason in ("low_acceptance", "load", "limit"))

Child = TypeVar("Child", bound=MetricWrapperBase)


class Children(dict[tuple[str, ...], Child], Generic[Child]):
    """Children of one family by their label values; one that was not made at the start is made on first use."""

    def __init__(self, family: Child, model: str, values: Iterable[tuple[str, ...]]) -> None:
        super().__init__()
        self._family = family
        self._model = model
        for value in values:
            self[value]

    def __missing__(self, value: tuple[str, ...]) -> Child:
        child = self[value] = self._family.labels(self._model, *value)
        return child


class WeightedHistogram(Collector):
    """A histogram that takes one value many times at the price of one: a step's tokens share their interval."""

    def __init__(self, name: str, documentation: str, model: str, edges: Sequence[float]) -> None:
        self._name, self._documentation, self._model = name, documentation, model
        self._edges = tuple(edges)
        self._counts = [0] * (len(self._edges) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int) -> None:
        """Counts ``value`` ``times`` times; event loop only."""
        self._counts[bisect_left(self._edges, value)] += times
        self._sum += value * times

    def describe(self) -> Iterator[Metric]:
        yield HistogramMetricFamily(self._name, self._documentation, labels=("model",))

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._documentation, labels=("model",))
        edges = (*self._edges, float("inf"))
        bounds = [floatToGoString(edge) for edge in edges]  # type: ignore[no-untyped-call]
        buckets = list(zip(bounds, accumulate(self._counts), strict=True))
        family.add_metric((self._model,), buckets=buckets, sum_value=self._sum)
        yield family


class SeriesFactory:
    """Makes families labelled with one model, registers them, and remembers them by name for the aliases."""

    def __init__(self, registry: CollectorRegistry, model: str) -> None:
        self.families: dict[str, Collector] = {}
        self._registry = registry
        self._model = model

    def counter(self, name: str, documentation: str) -> Counter:
        return self.counters(name, documentation, {})[()]

    def counters(self, name: str, documentation: str, labels: dict[str, Sequence[str]]) -> Children[Counter]:
        return self.labelled(name, documentation, tuple(labels), product(*labels.values()))

    def labelled(
        self, name: str, documentation: str, labels: tuple[str, ...], values: Iterable[tuple[str, ...]]
    ) -> Children[Counter]:
        """Counters for the given label tuples, where these are not the product of their parts."""
        family = Counter(f"headlong_{name}", documentation, ("model", *labels), registry=self._registry)
        self.families[name] = family
        return Children(family, self._model, values)

    def gauge(self, name: str, documentation: str, source: Callable[[], float] | None = None) -> Gauge:
        family = Gauge(f"headlong_{name}", documentation, ("model",), registry=self._registry)
        self.families[name] = family
        child = family.labels(self._model)
        if source is not None:
            child.set_function(source)
        return child

    def histogram(self, name: str, documentation: str, edges: Sequence[float]) -> Histogram:
        return self.histograms(name, documentation, edges, {})[()]

    def histograms(
        self, name: str, documentation: str, edges: Sequence[float], labels: dict[str, Sequence[str]]
    ) -> Children[Histogram]:
        family = Histogram(
            f"headlong_{name}", documentation, ("model", *labels), buckets=edges, registry=self._registry
        )
        self.families[name] = family
        return Children(family, self._model, product(*labels.values()))

    def weighted(self, name: str, documentation: str, edges: Sequence[float]) -> WeightedHistogram:
        family = WeightedHistogram(f"headlong_{name}", documentation, self._model, edges)
        self._registry.register(family)
        self.families[name] = family
        return family

    def info(self, name: str, documentation: str, values: dict[str, str]) -> None:
        family = Info(f"headlong_{name}", documentation, ("model",), registry=self._registry)
        family.labels(self._model).info(values)


class RequestSeries:
    """What clients feel: latencies, tokens, endings."""

    def __init__(self, make: SeriesFactory) -> None:
        self.ttft = make.histogram("time_to_first_token_seconds", "Arrival to first token", TTFT_EDGES)
        self.e2e = make.histogram("e2e_request_latency_seconds", "Arrival to last token", LATENCY_EDGES)
        self.queue = make.histogram("request_queue_time_seconds", "Arrival to first scheduling", LATENCY_EDGES)
        self.prefill = make.histogram("request_prefill_time_seconds", "First scheduling to first token", LATENCY_EDGES)
        self.decode = make.histogram("request_decode_time_seconds", "First to last token", LATENCY_EDGES)
        self.per_token = make.histogram(
            "request_time_per_output_token_seconds",
            "A request's decode time over its tokens after the first",
            TOKEN_EDGES,
        )
        self.inter_token = make.weighted(
            "inter_token_latency_seconds",
            "Time since the step before over this step's tokens, once a token",
            TOKEN_EDGES,
        )
        self.inter_chunk = make.histogram(
            "inter_chunk_latency_seconds", "Time between two streamed chunks of an answer", TOKEN_EDGES
        )
        self.prompt_tokens = make.counter("prompt_tokens", "Prompt tokens of ended requests, cached ones included")
        self.generation_tokens = make.counter("generation_tokens", "Output tokens, after the cut at a stop")
        self.success = make.counters("request_success", "Ended requests", {"finished_reason": FINISH_REASONS})
        self.rejected = make.counters("requests_rejected", "Requests refused before work", {"reason": REJECT_REASONS})


class EngineSeries:
    """What the engine is doing: queue, cache, steps."""

    def __init__(self, make: SeriesFactory, heartbeat_age: Callable[[], float]) -> None:
        self.running = make.gauge("requests_running", "Requests with KV blocks")
        self.waiting = make.gauge("requests_waiting", "Requests in the queue")
        self.kv_usage = make.gauge(
            "kv_cache_usage_ratio", "Referenced KV blocks over all (cached unreferenced are free)"
        )
        self.preemptions = make.counter("preemptions", "Requests put back into the queue for want of KV blocks")
        self.prefix_queries = make.counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache")
        self.prefix_hits = make.counter("prefix_cache_hits", "Prompt tokens found in the prefix cache")
        self.phase_seconds = make.histograms("step_seconds", "Time of a step's phases", PHASE_EDGES, {"phase": PHASES})
        self.rows = make.histogram("step_rows", "Rows of a step's forward pass", ROW_EDGES)
        self.heartbeat = make.gauge("engine_heartbeat_seconds", "Since the engine's last sign of life", heartbeat_age)


class DraftSeries:
    """What speculation does. ``position`` counts from 0, the first drafted token."""

    def __init__(self, make: SeriesFactory, methods: Sequence[str], max_draft_tokens: int) -> None:
        by_method = {"method": methods}
        by_position = {"method": methods, "position": [str(position) for position in range(max_draft_tokens)]}
        self.drafts = make.counters("spec_decode_num_drafts", "Steps of requests with a draft", by_method)
        self.draft_tokens = make.counters("spec_decode_num_draft_tokens", "Drafted nodes verified", by_method)
        self.accepted = make.counters("spec_decode_num_accepted_tokens", "Drafted tokens kept", by_method)
        self.accepted_at = make.counters(
            "spec_decode_num_accepted_tokens_per_pos", "Drafted tokens kept, by position", by_position
        )
        self.drafted_at = make.counters(
            "spec_decode_num_drafted_tokens_per_pos", "Drafted nodes verified, by position", by_position
        )
        self.wasted = make.counters("spec_decode_wasted_tokens", "Drafted nodes verified and thrown away", by_method)
        self.acceptance_length = make.histograms(
            "spec_decode_acceptance_length",
            "Tokens a decode step of a request delivered; method none: a step without a draft",
            range(1, max_draft_tokens + 2),
            {"method": ("none", *methods)},
        )
        self.speedup = make.gauge(
            "spec_decode_speedup_estimate",
            "Tokens a step x plain step time / measured step time, of the last decode step",
        )
        self.steps = make.labelled(
            "spec_decode_steps", "Steps of requests, with or without a draft, and why", ("mode", "reason"), STEP_MODES
        )
