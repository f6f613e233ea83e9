"""What travels back from the engine thread: small frozen messages, one ``StepOutput`` a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]
SILENT_LOGPROB = -9999.0  # stands for minus infinity on the wire


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's log-softmax of the raw model logits, and the likeliest alternatives as (id, logprob), best first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """One emitted token.

    depth: 0 for a recovered or bonus token (or plain decoding), d >= 1 for a drafted token accepted at depth d.
    method: the drafter whose node was accepted; None at depth 0.
    margin: how far the winner was from losing, in units of temperature-scaled logits; None unless asked for.
    """

    token_id: int
    logprob: TokenLogprob | None = None
    margin: float | None = None
    depth: int = 0
    method: str | None = None


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """Monotonic clock (``time.monotonic``) instants of a request inside the engine; None while not reached."""

    arrived: float
    scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What one engine step made of one request.

    tokens: emitted in this step, in order; may be empty (prompt log-probabilities alone, an abort, an error).
    drafted: for each method the number of drafted nodes verified in this step at each position (0 = first drafted).
    is_decode_step: the step was a decode forward of this request (plain or drafted), so it counts towards the
        acceptance length; the step that computes the last prompt rows and emits the first token counts too.
    finish_reason: set on the terminal output alone. stop_token_id: the EOS or stop id that ended it.
    error: set with finish_reason "error"; a sentence for the log, not for the client.
    num_cached_tokens: prompt tokens served from the prefix cache, on every output.
    prompt_logprobs: on the first output, when asked for: one entry a prompt token, None for the first.
    max_draft_depth: the deepest draft the engine may make: a chain of all its nodes.
    """

    request_id: str
    tokens: tuple[TokenOutput, ...] = ()
    drafted: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    is_decode_step: bool = False
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    error: str | None = None
    num_cached_tokens: int = 0
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    max_draft_depth: int = 0
    times: RequestTimes = field(default_factory=lambda: RequestTimes(0.0))


@dataclass(frozen=True, slots=True)
class StepStats:
    """Engine-wide figures of one step, for metrics. Counts are of this step; gauges are after it.

    phase_seconds: wall time of "schedule", "draft", "verify" (the forward), "sample", "commit".
    rows: rows of the forward pass (prompt rows and decode rows together).
    wasted: drafted nodes verified and thrown away, by method.
    modes: steps of requests by (mode, reason): mode "spec" or "plain"; reason "" for spec, and for plain one of
        "request", "disabled", "no_draft", "low_acceptance", "load", "limit".
    speedup_estimate: emitted tokens x T(plain rows) / (decoding requests x measured step), None for a step without
        decoding requests.
    """

    running: int
    waiting: int
    kv_usage: float
    rows: int = 0
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    step_seconds: float = 0.0
    phase_seconds: Mapping[str, float] = field(default_factory=dict)
    wasted: Mapping[str, int] = field(default_factory=dict)
    modes: Mapping[tuple[str, str], int] = field(default_factory=dict)
    speedup_estimate: float | None = None


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Everything one step sends back over the one thread hop."""

    outputs: tuple[RequestOutput, ...]
    stats: StepStats


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the server must know of the loaded model.

    path: folder with the tokenizer files. digest: hex digest of the weights' source.
    default_sampling: sampling fields of the model's generation_config (temperature, top_p, top_k, min_p,
        repetition_penalty), present only where the checkpoint sets them.
    max_draft_tokens: nodes of a draft tree at most; 0 when speculation is off. methods: loaded drafters.
    margin_bound: tokens with a smaller margin may differ between batches of rows; 0 where none may. runner,
        quantization, deterministic: how steps are computed (``engine.backend``).
    """

    name: str
    path: str
    digest: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    device: str
    num_kv_blocks: int
    block_size: int
    architecture: str = ""
    default_sampling: Mapping[str, float] = field(default_factory=dict)
    methods: tuple[str, ...] = ()
    max_draft_tokens: int = 0
    created: int = 0
    torch_version: str = ""
    margin_bound: float = 0.0
    runner: str = ""
    quantization: str = "none"
    deterministic: bool = False
