"""The same series under vLLM's metric names, for its benchmark, endpoint pickers and existing dashboards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

# Ours (without "headlong_") to theirs (without "vllm:"); counters without their "_total".
VLLM_NAMES = {
    "requests_running": "num_requests_running",
    "requests_waiting": "num_requests_waiting",
    "kv_cache_usage_ratio": "kv_cache_usage_perc",
    "preemptions": "num_preemptions",
    "prefix_cache_queries": "prefix_cache_queries",
    "prefix_cache_hits": "prefix_cache_hits",
    "prompt_tokens": "prompt_tokens",
    "generation_tokens": "generation_tokens",
    "request_success": "request_success",
    "time_to_first_token_seconds": "time_to_first_token_seconds",
    "inter_token_latency_seconds": "inter_token_latency_seconds",
    "request_time_per_output_token_seconds": "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds": "e2e_request_latency_seconds",
    "request_queue_time_seconds": "request_queue_time_seconds",
    "request_prefill_time_seconds": "request_prefill_time_seconds",
    "request_decode_time_seconds": "request_decode_time_seconds",
    "step_rows": "iteration_tokens_total",
    "spec_decode_num_drafts": "spec_decode_num_drafts",
    "spec_decode_num_draft_tokens": "spec_decode_num_draft_tokens",
    "spec_decode_num_accepted_tokens": "spec_decode_num_accepted_tokens",
    "spec_decode_num_accepted_tokens_per_pos": "spec_decode_num_accepted_tokens_per_pos",
}


class VllmAliases(Collector):
    """Re-emits families with vLLM's names and its labels ``model_name`` and ``engine``; other labels are kept."""

    def __init__(self, families: Mapping[str, Collector]) -> None:
        self._sources = [(families[ours], f"headlong_{ours}", f"vllm:{theirs}") for ours, theirs in VLLM_NAMES.items()]

    def describe(self) -> list[Metric]:
        return []  # the names are known to be new; asking each source would collect it

    def collect(self) -> Iterator[Metric]:
        for source, ours, theirs in self._sources:
            for family in source.collect():
                alias = Metric(theirs, family.documentation, family.type)
                alias.samples = [_renamed(sample, ours, theirs) for sample in family.samples]
                yield alias


def _renamed(sample: Sample, ours: str, theirs: str) -> Sample:
    labels = {("model_name" if key == "model" else key): value for key, value in sample.labels.items()}
    return Sample(theirs + sample.name.removeprefix(ours), labels | {"engine": "0"}, sample.value)
