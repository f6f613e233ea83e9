"""What draft heads are worth before they are served: answers are written with them, one way of drafting after another.

Every answer is written by the engine itself, with every proposed node verified, so the figures are of the real drafter
and verifier; the controller, which spares nodes that do not pay, is left out. Every cell starts from the heads as they
lie in the folder: nothing is learned from one cell to the next. All cells of one temperature have the same seeds, so
they write the same text.
"""

from __future__ import annotations

import copy
import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from engine.assembly import assemble, make_drafters
from engine.backend import Backend, choose_backend
from engine.config import EngineConfig, EngineSettings, ModelConfig, SpeculationConfig
from engine.core import EngineCore
from engine.device import resolve_device, resolve_dtype
from engine.draft_test import answer_index, unsparing_steps
from engine.errors import HeadTrainingError, RequestFailedError
from engine.loading import load_model
from engine.loading.heads import require_heads_folder
from engine.sampling_params import SamplingParams
from engine.spec_decode.controller import StepCosts
from engine.spec_decode.drafter import Drafter
from engine.spec_decode.watched import Bucket, WatchedDrafter
from engine.train_job import Watch
from heads.checkpoint import RUN_FILE
from heads.config import HELD_OUT, HeadsConfig

_TIMED_PROMPTS = 2
_STAGE = "answers"


@dataclass(frozen=True, slots=True)
class Shape:
    """How much is drafted. nodes: verified in a step at most, beside the root. is_chain: without branches."""

    name: str
    nodes: int
    is_chain: bool = False


SHAPES = (Shape("chain-4", 4, is_chain=True), *(Shape(f"tree-{nodes}", nodes) for nodes in (8, 16, 32, 64)))


@dataclass(frozen=True, slots=True)
class EvaluationJob:
    """folder: of the heads. prompts: makes the prompts of each dataset from the model's folder, where its tokenizer
    lies."""

    model: ModelConfig
    folder: Path
    prompts: Callable[[Path], Mapping[str, Sequence[tuple[int, ...]]]]
    max_tokens: int = 64
    temperatures: Sequence[float] = (0.0, 0.8, 1.0)
    shapes: Sequence[Shape] = SHAPES
    seed: int = 0
    engine: EngineConfig = field(
        default_factory=lambda: EngineConfig(max_num_seqs=8, max_num_batched_tokens=512, kv_cache_memory=1 << 30)
    )


@dataclass(slots=True)
class Written:
    """One answer. depths[i]: at which depth token i was drafted, 0 where it was not. nodes: drafted nodes verified in
    each of its decode forwards."""

    tokens: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class DraftTimes:
    """Seconds of a step of one request alone, medians: ``draft`` of it for drafting."""

    draft: float
    step: float


@dataclass(frozen=True, slots=True)
class Cell:
    """A dataset answered one way. is_coupled: None where there is no noise to couple to. verify_seconds: T of the
    rows that a forward had, in the mean. times: None where no step drafted."""

    dataset: str
    temperature: float
    is_coupled: bool | None
    shape: Shape
    answers: Sequence[Written]
    buckets: Sequence[Bucket]
    verify_seconds: float
    times: DraftTimes | None


@dataclass(frozen=True, slots=True)
class HeadsReport:
    """heads: what the folder says of itself. model: name, digest, runner and quantization. step_seconds: T(rows)."""

    heads: Mapping[str, Any]
    model: Mapping[str, Any]
    step_seconds: Mapping[int, float]
    cells: Sequence[Cell]


def evaluate_heads(job: EvaluationJob, watch: Watch) -> HeadsReport:
    """Blocking, minutes. Raises ModelLoadError for a folder or model that cannot be used, HeadTrainingError for prompts
    that cannot be answered."""
    require_heads_folder(SpeculationConfig(heads=str(job.folder)))
    config = HeadsConfig.read(job.folder.expanduser())
    device = resolve_device(job.engine.device)
    loaded = load_model(job.model, device, resolve_dtype(job.model.dtype), watch.line)
    drafters = {
        is_coupled: make_drafters(
            SpeculationConfig(drafters=(config.method,), heads=str(job.folder), coupling=is_coupled), loaded
        ).drafters[0]
        for is_coupled in (True, False)
    }
    backend = choose_backend(loaded, job.model.quantization, job.engine, watch.line)
    bench = _Bench(job, backend, drafters, watch)
    datasets = {name: bench.fitting(name, prompts) for name, prompts in job.prompts(loaded.path).items()}
    plan = [
        (name, temperature, is_coupled, shape)
        for name in datasets
        for temperature in job.temperatures
        for is_coupled in ((True, False) if temperature else (None,))
        for shape in job.shapes
    ]
    cells = []
    watch.advance(_STAGE, 0, len(plan), "")
    for name, temperature, is_coupled, shape in plan:
        try:
            cells.append(bench.cell(name, datasets[name], (temperature, is_coupled, shape)))
        except RequestFailedError as error:
            raise HeadTrainingError(f"an answer of {name} failed: {error}") from error
        watch.advance(_STAGE, len(cells), len(plan), f"{name}, temperature {temperature:g}, {shape.name}")
    model = {"name": loaded.name, "digest": loaded.digest, "runner": backend.name, "quantization": backend.quantization}
    return HeadsReport(_facts(job.folder.expanduser(), config), model, bench.costs.as_dict(), cells)


Way = tuple[float, bool | None, Shape]  # temperature, is_coupled, shape


class _Bench:
    """The packed model and unpacked heads, from which each cell gets an engine of its own."""

    def __init__(self, job: EvaluationJob, backend: Backend, drafters: Mapping[bool, Drafter], watch: Watch) -> None:
        self._job = job
        self._backend = backend
        self._drafters = drafters
        widest = max(job.shapes, key=lambda shape: shape.nodes)
        core = self._core(self._drafter((0.0, None, widest)), widest, watch.line, measures_steps=True)
        costs = core.scheduler.controller.costs
        assert costs is not None
        self.costs: StepCosts = costs
        self._longest = core.scheduler.limits.max_model_len

    def fitting(self, name: str, prompts: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """The prompts that leave room for an answer."""
        room = self._longest - self._job.max_tokens
        kept = [prompt for prompt in prompts if 0 < len(prompt) <= room]
        if not kept:
            raise HeadTrainingError(f"no prompt of {name} leaves room for {self._job.max_tokens} tokens in the context")
        return kept

    def cell(self, name: str, prompts: Sequence[tuple[int, ...]], way: Way) -> Cell:
        """Answers ``prompts`` side by side, then the first of them again one by one, to see what drafting costs."""
        temperature, is_coupled, shape = way
        sampling = SamplingParams(temperature=temperature, seed=self._job.seed, max_tokens=self._job.max_tokens)
        drafter = self._drafter(way)
        core = self._core(drafter, shape, lambda _: None, measures_steps=False)
        answers = [Written() for _ in prompts]
        for step in unsparing_steps(core, prompts, sampling):
            for output in step.outputs:
                answer = answers[answer_index(output)]
                answer.tokens += [token.token_id for token in output.tokens]
                answer.depths += [token.depth for token in output.tokens]
                if output.is_decode_step:
                    answer.nodes.append(sum(map(sum, output.drafted.values())))
        buckets = copy.deepcopy(drafter.reliability.buckets)  # before the timed answers repeat some
        rows = [1 + nodes for answer in answers for nodes in answer.nodes]
        return Cell(
            dataset=name,
            temperature=temperature,
            is_coupled=is_coupled,
            shape=shape,
            answers=answers,
            buckets=buckets,
            verify_seconds=statistics.fmean(map(self.costs, rows)) if rows else self.costs(1),
            times=_timed(core, prompts[:_TIMED_PROMPTS], sampling),
        )

    def _drafter(self, way: Way) -> WatchedDrafter:
        _, is_coupled, shape = way
        # A copy: serving packs heads, and drafters learn.
        return WatchedDrafter(copy.deepcopy(self._drafters[is_coupled is not False]), is_chain=shape.is_chain)

    def _core(
        self, drafter: Drafter, shape: Shape, progress: Callable[[str], None], *, measures_steps: bool
    ) -> EngineCore:
        job = self._job
        settings = EngineSettings(job.model, job.engine, SpeculationConfig(max_draft_tokens=shape.nodes))
        return assemble(self._backend, settings, progress, [drafter], measures_steps=measures_steps).core


def _timed(core: EngineCore, prompts: Sequence[tuple[int, ...]], sampling: SamplingParams) -> DraftTimes | None:
    """Of the steps in the middle of an answer: they verify a draft and make the next one."""
    drafts, steps = [], []
    for prompt in prompts:
        for step in unsparing_steps(core, [prompt], sampling):
            if any(output.drafted and output.finish_reason is None for output in step.outputs):
                drafts.append(step.stats.phase_seconds["draft"])
                steps.append(step.stats.step_seconds)
    return DraftTimes(statistics.median(drafts), statistics.median(steps)) if drafts else None


def _facts(folder: Path, config: HeadsConfig) -> dict[str, Any]:
    calibration = config.calibration
    return {
        "method": config.method,
        "num_heads": config.num_heads,
        "num_layers": config.num_layers,
        "base_model": config.base_model.name,
        "trained": dict(config.trained),
        "held_out_length": config.baseline.get(HELD_OUT),
        "held_out_accuracy": _held_out_accuracy(folder),
        "calibration": None if calibration is None else dataclasses.asdict(calibration),
    }


def _held_out_accuracy(folder: Path) -> list[dict[str, float]]:
    """By depth, as run.yaml has it; none where it has none, since heads are whole without that file."""
    try:
        accuracy = yaml.safe_load((folder / RUN_FILE).read_text(encoding="utf-8"))["result"]["accuracy"]
        return [{str(name): float(share) for name, share in depth.items()} for depth in accuracy]
    except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError, AttributeError):
        return []
