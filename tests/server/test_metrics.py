"""The figures: every name of the operations page, made at 0, booked by the contract's rules."""

from __future__ import annotations

import time

import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.outputs import ModelInfo, RequestTimes, StepStats, TokenOutput
from server.metric_aliases import VLLM_NAMES
from server.metrics import SNAPSHOT_SECONDS, Metrics

INFO = ModelInfo(
    name="base",
    path="/nowhere",
    digest="abc",
    vocab_size=10,
    max_model_len=10,
    eos_token_ids=(),
    dtype="float32",
    device="cpu",
    num_kv_blocks=1,
    block_size=16,
    methods=("suffix", "medusa"),
    max_draft_tokens=3,
    torch_version="2.13.0",
)
TABLE = """
time_to_first_token_seconds e2e_request_latency_seconds request_queue_time_seconds request_prefill_time_seconds
request_decode_time_seconds inter_token_latency_seconds inter_chunk_latency_seconds
request_time_per_output_token_seconds requests_running requests_waiting kv_cache_usage_ratio prompt_tokens
generation_tokens request_success requests_rejected preemptions prefix_cache_queries prefix_cache_hits
spec_decode_num_drafts spec_decode_num_draft_tokens spec_decode_num_accepted_tokens
spec_decode_num_accepted_tokens_per_pos spec_decode_num_drafted_tokens_per_pos spec_decode_acceptance_length
spec_decode_wasted_tokens step_seconds step_rows spec_decode_speedup_estimate spec_decode_steps
engine_heartbeat_seconds build_info
""".split()


def new_metrics(*, vllm_aliases: bool = False) -> Metrics:
    return Metrics(INFO, "tiny", lambda: 0.25, vllm_aliases=vllm_aliases)


def samples(metrics: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every sample by name and labels; the constant ``model`` label is checked and left out."""
    metrics._snapshot_at = -SNAPSHOT_SECONDS
    found = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model", labels.pop("model_name", None)) == "tiny"
            key = (sample.name, tuple(sorted(labels.items())))
            assert key not in found
            found[key] = sample.value
    return found


def value(metrics: Metrics, name: str, **labels: str) -> float:
    return samples(metrics)[f"headlong_{name}", tuple(sorted(labels.items()))]


def token(depth: int = 0, method: str | None = None) -> TokenOutput:
    return TokenOutput(1, depth=depth, method=method)


def test_every_name_of_the_table_is_there_and_parses() -> None:
    names = {family.name for family in text_string_to_metric_families(new_metrics().render().decode())}
    assert names == {f"headlong_{name}" for name in TABLE}


def test_all_start_at_zero_with_every_label() -> None:
    found = samples(new_metrics())
    for (name, _), at in found.items():
        assert at == {"headlong_build_info": 1.0, "headlong_engine_heartbeat_seconds": 0.25}.get(name, 0.0)
    for reason in ("stop", "length", "abort", "error"):
        assert ("headlong_request_success_total", (("finished_reason", reason),)) in found
    for method in ("suffix", "medusa"):
        for position in "012":
            labels = (("method", method), ("position", position))
            assert ("headlong_spec_decode_num_accepted_tokens_per_pos_total", labels) in found
    edges = {dict(labels)["le"] for name, labels in found if name.endswith("acceptance_length_bucket")}
    assert edges == {"1.0", "2.0", "3.0", "4.0", "+Inf"}
    build = dict(next(labels for name, labels in found if name == "headlong_build_info"))
    assert (build["model_digest"], build["torch"]) == ("abc", "2.13.0")


def test_a_drafted_step() -> None:
    metrics = new_metrics()
    kept = (token(1, "suffix"), token(2, "suffix"), token())
    metrics.tokens(kept, {"suffix": (2, 1, 1)}, is_decode_step=True, interval=0.03)
    assert value(metrics, "generation_tokens_total") == 3
    assert value(metrics, "spec_decode_num_drafts_total", method="suffix") == 1
    assert value(metrics, "spec_decode_num_drafts_total", method="medusa") == 0
    assert value(metrics, "spec_decode_num_draft_tokens_total", method="suffix") == 4
    assert value(metrics, "spec_decode_num_accepted_tokens_total", method="suffix") == 2
    drafted = [
        value(metrics, "spec_decode_num_drafted_tokens_per_pos_total", method="suffix", position=str(position))
        for position in range(3)
    ]
    accepted = [
        value(metrics, "spec_decode_num_accepted_tokens_per_pos_total", method="suffix", position=str(position))
        for position in range(3)
    ]
    assert drafted == [2, 1, 1]
    assert accepted == [1, 1, 0]


def test_tokens_of_a_step_share_their_interval() -> None:
    metrics = new_metrics()
    metrics.tokens((token(),), {}, is_decode_step=True, interval=None)
    metrics.tokens((token(1, "suffix"), token()), {"suffix": (1,)}, is_decode_step=True, interval=0.04)
    metrics.tokens((token(),), {}, is_decode_step=True, interval=0.02)
    assert value(metrics, "inter_token_latency_seconds_count") == 3
    assert value(metrics, "inter_token_latency_seconds_sum") == pytest.approx(0.06)
    assert value(metrics, "inter_token_latency_seconds_bucket", le="0.01") == 0
    assert value(metrics, "inter_token_latency_seconds_bucket", le="0.025") == 3
    assert value(metrics, "inter_token_latency_seconds_bucket", le="+Inf") == 3


def test_an_interval_on_an_edge_belongs_to_it() -> None:
    metrics = new_metrics()
    metrics.tokens((token(),), {}, is_decode_step=True, interval=0.01)
    assert value(metrics, "inter_token_latency_seconds_bucket", le="0.005") == 0
    assert value(metrics, "inter_token_latency_seconds_bucket", le="0.01") == 1


@pytest.mark.parametrize(
    ("kept", "drafted", "method"),
    [
        ((token(),), {}, "none"),
        ((token(),), {"suffix": (0, 0)}, "none"),
        ((token(),), {"suffix": (1,), "medusa": (1,)}, "suffix"),
        ((token(1, "medusa"), token()), {"suffix": (1,), "medusa": (1,)}, "medusa"),
        ((token(1, "suffix"), token(2, "medusa"), token()), {"suffix": (1,), "medusa": (0, 1)}, "medusa"),
        ((), {"suffix": (1,)}, "suffix"),
    ],
)
def test_each_decode_step_is_booked_once(
    kept: tuple[TokenOutput, ...], drafted: dict[str, tuple[int, ...]], method: str
) -> None:
    metrics = new_metrics()
    metrics.tokens(kept, drafted, is_decode_step=True, interval=None)
    counts = {
        name: value(metrics, "spec_decode_acceptance_length_count", method=name)
        for name in ("none", "suffix", "medusa")
    }
    assert counts == {name: float(name == method) for name in counts}
    assert value(metrics, "spec_decode_acceptance_length_sum", method=method) == len(kept)


def test_a_prefill_chunk_is_no_decode_step() -> None:
    metrics = new_metrics()
    metrics.tokens((), {}, is_decode_step=False, interval=None)
    assert value(metrics, "spec_decode_acceptance_length_count", method="none") == 0


def test_finished() -> None:
    metrics = new_metrics()
    metrics.finished("length", RequestTimes(arrived=10.0, scheduled=11.0, first_token=13.0, finished=19.0), 7, 4)
    for name, seconds in {
        "request_queue_time_seconds": 1,
        "request_prefill_time_seconds": 2,
        "time_to_first_token_seconds": 3,
        "request_decode_time_seconds": 6,
        "e2e_request_latency_seconds": 9,
        "request_time_per_output_token_seconds": 2,
    }.items():
        assert value(metrics, f"{name}_sum") == seconds
        assert value(metrics, f"{name}_count") == 1
    assert value(metrics, "prompt_tokens_total") == 7
    assert value(metrics, "request_success_total", finished_reason="length") == 1


def test_a_request_that_was_never_scheduled_has_no_times() -> None:
    metrics = new_metrics()
    metrics.finished("abort", RequestTimes(arrived=10.0), 7, 0)
    assert value(metrics, "e2e_request_latency_seconds_count") == 0
    assert value(metrics, "request_queue_time_seconds_count") == 0
    assert value(metrics, "request_success_total", finished_reason="abort") == 1


def test_one_token_has_no_time_per_token() -> None:
    metrics = new_metrics()
    metrics.finished("stop", RequestTimes(1.0, 2.0, 3.0, 3.0), 1, 1)
    assert value(metrics, "request_time_per_output_token_seconds_count") == 0


def test_step() -> None:
    metrics = new_metrics()
    stats = StepStats(
        running=3,
        waiting=2,
        kv_usage=0.5,
        rows=20,
        preemptions=1,
        prefix_queries=32,
        prefix_hits=16,
        phase_seconds={"draft": 0.1, "verify": 0.2, "sample": 0.3, "commit": 0.4},
        wasted={"suffix": 5},
        modes={("spec", ""): 2, ("plain", "load"): 1},
        speedup_estimate=1.5,
    )
    metrics.step(stats)
    metrics.step(StepStats(running=0, waiting=0, kv_usage=0.0, preemptions=1))
    assert value(metrics, "requests_running") == 0
    assert value(metrics, "preemptions_total") == 2
    assert value(metrics, "prefix_cache_queries_total") == 32
    assert value(metrics, "prefix_cache_hits_total") == 16
    assert value(metrics, "step_seconds_sum", phase="sample") == 0.3
    assert value(metrics, "step_rows_count") == 1  # a step without rows ran no forward
    assert value(metrics, "spec_decode_wasted_tokens_total", method="suffix") == 5
    assert value(metrics, "spec_decode_steps_total", mode="spec", reason="") == 2
    assert value(metrics, "spec_decode_steps_total", mode="plain", reason="load") == 1
    assert value(metrics, "spec_decode_speedup_estimate") == 1.5


def test_rejected_and_chunk() -> None:
    metrics = new_metrics()
    metrics.rejected("overloaded")
    metrics.chunk(0.5)
    assert value(metrics, "requests_rejected_total", reason="overloaded") == 1
    assert value(metrics, "inter_chunk_latency_seconds_sum") == 0.5


def test_the_snapshot_is_kept_for_its_time_and_no_longer() -> None:
    metrics = new_metrics()
    first = metrics.render()
    metrics.rejected("draining")
    assert metrics.render() is first
    time.sleep(SNAPSHOT_SECONDS * 1.1)
    assert b'reason="draining"} 1.0' in metrics.render()


def test_two_servers_do_not_share_figures() -> None:
    one, other = new_metrics(), new_metrics()
    one.rejected("draining")
    assert value(other, "requests_rejected_total", reason="draining") == 0


def test_vllm_names_carry_the_same_values() -> None:
    metrics = new_metrics(vllm_aliases=True)
    metrics.tokens((token(1, "suffix"), token()), {"suffix": (1,)}, is_decode_step=True, interval=0.1)
    metrics.finished("stop", RequestTimes(1.0, 2.0, 3.0, 4.0), 5, 2)
    metrics.step(StepStats(running=3, waiting=2, kv_usage=0.5, rows=4))
    found = samples(metrics)
    ours = {key: at for key, at in found.items() if key[0].startswith("headlong_")}
    theirs = {key: at for key, at in found.items() if key[0].startswith("vllm:")}
    for our_name, their_name in VLLM_NAMES.items():
        mine = {
            (name.removeprefix(f"headlong_{our_name}"), tuple(sorted((*labels, ("engine", "0"))))): at
            for (name, labels), at in ours.items()
            if name.removeprefix(f"headlong_{our_name}") in ("", "_total", "_sum", "_count", "_bucket")
            and name.startswith(f"headlong_{our_name}")
        }
        alias = {
            (name.removeprefix(f"vllm:{their_name}"), labels): at
            for (name, labels), at in theirs.items()
            if name.removeprefix(f"vllm:{their_name}") in ("", "_total", "_sum", "_count", "_bucket")
            and name.startswith(f"vllm:{their_name}")
        }
        assert mine
        assert alias == mine, our_name
    assert theirs["vllm:num_requests_running", (("engine", "0"),)] == 3
    assert theirs["vllm:kv_cache_usage_perc", (("engine", "0"),)] == 0.5
    assert theirs["vllm:prompt_tokens_total", (("engine", "0"),)] == 5


def test_without_aliases_there_is_no_vllm_name() -> None:
    assert b"vllm:" not in new_metrics().render()
