"""Builds an engine core from a loaded model: sizes the KV pool, checks attention, measures step costs."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from engine.attention.check import CHECK_TOKENS, check_tokens, vocab_size
from engine.backend import Backend, RunnerNeeds, refusing
from engine.commit import Committer
from engine.config import EngineSettings, SpeculationConfig
from engine.core import EngineCore
from engine.errors import ModelLoadError
from engine.kv_cache import BlockPool
from engine.loading import LoadedModel
from engine.loading.heads import find_heads, output_head
from engine.loading.memory import available_bytes
from engine.loading.streaming import attach_layers
from engine.model_runner import ModelRunner
from engine.scheduler import Scheduler, SchedulerLimits
from engine.spec_decode.controller import Controller
from engine.spec_decode.drafter import Drafter, KvOwner
from engine.spec_decode.drafting import Drafting
from engine.spec_decode.head_drafters import HEAD_METHODS, KV_METHODS, head_drafter
from engine.spec_decode.suffix import SuffixDrafter
from engine.spec_decode.verifier import make_verifier
from engine.step_bench import StepBench, measured_costs
from heads.checkpoint import LoadedHeads
from heads.lm_head import DraftLmHead
from heads.streaming import StreamingHeads

log = logging.getLogger("headlong.engine")

_CPU_POOL = 2 << 30
_MEASURED_ROWS = 48  # beyond the largest measured step, its time grows as the last stretch did
# A CPU is saturated by few rows, so more of them in a step only make the others wait.
_STEP_ROWS = {"cpu": 128, "cuda": 4096}
_CPU_SHARE, _CUDA_SHARE = 0.5, 0.85


@dataclass(frozen=True, slots=True)
class Assembly:
    """A core ready to step, and the figures the server tells its users."""

    core: EngineCore
    limits: SchedulerLimits
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Drafters:
    """What drafts, in order of precedence, and the heads among it."""

    drafters: tuple[Drafter, ...] = ()
    heads: LoadedHeads | None = None

    @property
    def methods(self) -> tuple[str, ...]:
        return tuple(drafter.method for drafter in self.drafters)


def make_drafters(config: SpeculationConfig, loaded: LoadedModel) -> Drafters:
    """The configured drafters for a model whose linear layers are not packed yet.

    Raises ModelLoadError for a drafter that does not exist or has no heads, and for heads that do not fit.
    """
    if not config.enabled:
        return Drafters()
    wanted = config.drafters
    if wanted is not None and config.heads is None and not set(wanted) & set(HEAD_METHODS):
        return Drafters(tuple(_training_free(name) for name in dict.fromkeys(wanted)))
    heads = find_heads(config.heads, loaded)
    if wanted is None:
        wanted = ("suffix",) if heads is None else ("suffix", heads.config.method)
    if config.heads is not None and heads is not None and heads.config.method not in wanted:
        method = heads.config.method
        raise ModelLoadError(f"speculation.heads names {method} heads, but speculation.drafters leaves {method} out")
    made = tuple(_head_drafter(name, heads, config, loaded) or _training_free(name) for name in dict.fromkeys(wanted))
    return Drafters(made, heads)


def _head_drafter(
    name: str, heads: LoadedHeads | None, config: SpeculationConfig, loaded: LoadedModel
) -> Drafter | None:
    if name not in HEAD_METHODS:
        return None
    if heads is None or heads.config.method != name:
        raise ModelLoadError(
            f"speculation.drafters names {name}, but there are no {name} heads for {loaded.name}: "
            f"name their folder with speculation.heads, or train some: headlong train"
        )
    if heads.lm_head is None:
        lm_head = DraftLmHead(output_head(loaded.model), heads.token_ids)
    else:
        lm_head = DraftLmHead.of_module(heads.lm_head.to(loaded.model.device), heads.token_ids, heads.config.vocab_size)
    module = heads.heads
    if isinstance(module, torch.nn.Module):
        module.to(lm_head.linear.weight.device)
    if isinstance(module, StreamingHeads):
        attach_layers(module, loaded.model)
    return head_drafter(
        module,
        lm_head,
        calibration=heads.config.calibration,
        coupling=config.coupling,
        eos_token_ids=loaded.eos_token_ids,
    )


def _training_free(name: str) -> Drafter:
    if name != SuffixDrafter.method:
        available = ", ".join((SuffixDrafter.method, *HEAD_METHODS))
        raise ModelLoadError(f"unknown drafter {name!r}; available: {available}")
    return SuffixDrafter()


def assemble(
    backend: Backend,
    settings: EngineSettings,
    progress: Callable[[str], None],
    drafters: Sequence[Drafter],
    *,
    recorder: Callable[[ModelRunner], ModelRunner] | None = None,
    measures_steps: bool = True,
) -> Assembly:
    """Builds the engine.

    recorder: wraps the runner, which then computes hidden states whether or not a drafter needs them.
    measures_steps: without measured step times the controller takes every draft.

    Raises ModelLoadError if the model cannot be served on this machine with these settings.
    """
    loaded = backend.loaded
    parameter = next(loaded.model.parameters())
    block_size = settings.engine.block_size
    block_bytes = sum(shape.bytes_per_token(parameter.dtype) for shape in backend.shapes) * block_size
    block_bytes += sum(d.block_bytes(block_size, parameter.dtype) for d in drafters if isinstance(d, KvOwner))
    limits, num_blocks = _sizes(loaded, settings, block_bytes, parameter.device)
    limits = dataclasses.replace(limits, max_extra_rows=max((d.max_extra_rows for d in drafters), default=0))
    progress(f"Allocating a KV cache of {num_blocks * block_size} tokens")
    needs = RunnerNeeds(
        num_slots=num_blocks * block_size,
        block_size=block_size,
        needs_hidden=recorder is not None or any(drafter.needs_hidden for drafter in drafters),
        hidden_layers=sorted({layer for drafter in drafters for layer in drafter.hidden_layers}),
        passes=limits.max_num_seqs if any(drafter.method in KV_METHODS for drafter in drafters) else 0,
    )
    runner = backend.make_runner(needs)
    for drafter in drafters:
        drafter.prepare(backend.head_compute, runner)
    bench = StepBench(runner, block_size, num_blocks)
    with refusing(loaded):
        backend.check(bench.logits(check_tokens(vocab_size(loaded.model))))
    costs = None
    if settings.speculation.enabled and measures_steps:
        progress("Measuring step times")
        rows = min(max(1 + limits.max_draft_tokens, _MEASURED_ROWS), num_blocks * block_size)
        costs = measured_costs(bench, rows, f"{loaded.digest} {backend.fingerprint} {block_size}")
        log.info("step times in ms: %s", {rows: round(1e3 * t, 1) for rows, t in costs.as_dict().items()})
    drafting = Drafting(drafters, limits, vocab_size=vocab_size(loaded.model), block_size=block_size, costs=costs)
    pool = BlockPool(num_blocks, block_size, prefix_caching=settings.engine.prefix_caching)
    scheduler = Scheduler(pool, limits, Controller(costs, enabled=settings.speculation.enabled))
    served: ModelRunner = runner if recorder is None else recorder(runner)
    committer = Committer(
        scheduler, served, make_verifier(settings.speculation.verifier, backend.draw), loaded.eos_token_ids
    )
    core = EngineCore(scheduler, served, drafting, committer)
    return Assembly(core, limits, num_blocks)


def _sizes(
    loaded: LoadedModel,
    settings: EngineSettings,
    block_bytes: int,
    device: torch.device,
) -> tuple[SchedulerLimits, int]:
    config = settings.engine
    positions = loaded.max_position_embeddings
    if config.max_model_len is not None and positions is not None and config.max_model_len > positions:
        raise ModelLoadError(
            f"engine.max_model_len {config.max_model_len} is more than the model's {positions} positions"
        )
    budget = config.kv_cache_memory or _default_pool(device)
    num_blocks = budget // block_bytes
    draft = settings.speculation.max_draft_tokens if settings.speculation.enabled else 0
    # One whole sequence with its drafted rows must fit, or its request could never end.
    spare = -(-draft // config.block_size) + 1
    fits = max(0, num_blocks - spare) * config.block_size
    if config.max_model_len is not None and fits < config.max_model_len:
        raise ModelLoadError(
            f"a KV cache of {budget >> 20} MiB holds {fits} tokens, fewer than engine.max_model_len "
            f"{config.max_model_len}; raise engine.kv_cache_memory or lower engine.max_model_len"
        )
    if fits < config.block_size or num_blocks * config.block_size <= CHECK_TOKENS:
        raise ModelLoadError(
            f"too little memory for a KV cache: {budget >> 20} MiB hold {num_blocks} blocks of {block_bytes >> 10} KiB"
        )
    rows = config.max_num_batched_tokens or _STEP_ROWS[device.type]
    limits = SchedulerLimits(
        # More running requests than rows would leave the last ones without any.
        max_num_seqs=min(config.max_num_seqs, rows),
        max_num_batched_tokens=rows,
        max_model_len=min(fits, config.max_model_len or positions or fits),
        max_draft_tokens=draft,
    )
    return limits, num_blocks


def _default_pool(device: torch.device) -> int:
    if device.type == "cuda":
        return int(available_bytes(device) * _CUDA_SHARE)
    return min(_CPU_POOL, int(available_bytes(device) * _CPU_SHARE))
