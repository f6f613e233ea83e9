"""The answers of a training run: written by the engine, timed on the way, and read again with what the heads need."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.assembly import assemble
from engine.backend import Backend
from engine.config import EngineSettings, SpeculationConfig
from engine.contexts import ContextReader, TopLayersReader, add_contexts
from engine.distill import AnswerGenerator, StateRecorder, answer_plan, make_asks
from engine.errors import HeadTrainingError
from engine.first_heads import drafted_tokens
from engine.loading import LoadedModel
from engine.model_runner import ModelRunner
from engine.train_estimate import Estimator, Parts
from engine.train_job import CONTEXT_METHODS, WORK, Material, TrainJob, Watch
from heads.checkpoint import Heads, LoadedHeads
from heads.config import HELD_OUT
from heads.data import Answer, AnswerStore, Ask, Collected, collect
from heads.lm_head import DraftLmHead, OutputHead
from heads.streaming import StreamingHeads
from heads.top_layers import TopLayersStore


@dataclass(frozen=True, slots=True)
class Run:
    """A run before its first answer. job: with the method and sizes of the heads it starts from."""

    job: TrainJob
    start: LoadedHeads | None
    backend: Backend
    head: OutputHead
    heads: Heads
    material: Material
    asks: Sequence[Ask]
    store: AnswerStore


def read_answers(run: Run, watch: Watch) -> list[Answer]:
    """All answers, with their contexts where the method's heads attend to them."""
    job, store = run.job, run.store
    shards = range(len(store))
    if job.method not in CONTEXT_METHODS:
        return store.read_all()

    def longest() -> int:
        return max(len(answer.ask.prompt) + len(answer.tokens) for index in shards for answer in store.read(index))

    def progress(done: int) -> None:
        watch.advance("contexts", done, len(shards), "")

    backend, block_size, layers = run.backend, job.engine.block_size, job.settings.training.stream_layers
    if job.method != StreamingHeads.method:
        add_contexts(store, len(shards), lambda: ContextReader(backend, longest(), block_size), progress)
        return [answer for index in shards for answer in store.read_with_contexts(index)]
    tops = TopLayersStore(store, layers)
    add_contexts(tops, len(shards), lambda: TopLayersReader(backend, longest(), block_size, layers), progress)
    return [answer for index in shards for answer in tops.read_with_contexts(index)]


def asks_of(job: TrainJob, loaded: LoadedModel, material: Material) -> list[Ask]:
    """One a prompt; prompts that leave no room for an answer are left out."""
    longest = job.engine.max_model_len or loaded.max_position_embeddings
    room = None if longest is None else longest - job.settings.answers.max_tokens
    prompts = [prompt for prompt in material.prompts if prompt and (room is None or len(prompt) <= room)]
    if not prompts:
        raise HeadTrainingError("no prompt leaves room for an answer in the model's context")
    return make_asks(prompts, job.settings.answers, job.settings.training.seed)


def collect_answers(run: Run, watch: Watch, stops: bool = False) -> None:
    """Answers, and on the way the estimate of what the run costs. Raises Estimated after it, if it ``stops`` then."""
    parts = Parts(run.backend, run.head, run.heads, run.store, run.asks)
    drafted = drafted_tokens(run.job, run.start, (), run.material, len(run.head.weight))
    estimator = Estimator(run.job, parts, watch, stops)
    estimator.measure(DraftLmHead(run.head, drafted))
    _collect(run, watch, estimator)
    estimator.finish()


def written_anew(run: Run, backend: Backend, kept: Sequence[Answer], watch: Watch) -> list[Answer]:
    """Answers to the prompts of ``kept`` by a changed model, which heads for it are tested on."""
    wanted = dataclasses.replace(run.job.settings.answers, tokens=sum(len(answer.tokens) for answer in kept))
    job = dataclasses.replace(run.job, settings=dataclasses.replace(run.job.settings, answers=wanted))
    asks = [answer.ask for answer in kept]
    # A folder for each changed model: a run made again with another result finds no answers of the last.
    folder = job.folder / WORK / f"{HELD_OUT}-{backend.loaded.digest[:12]}"
    store = AnswerStore(folder, answer_plan(backend, asks, wanted))
    run = dataclasses.replace(run, job=job, backend=backend, asks=asks, store=store)
    watch = _Renamed(watch, {"answers": "held-out answers", "contexts": "their contexts"})
    _collect(run, watch, _NoMeter())
    answers = [answer for answer in read_answers(run, watch) if len(answer.tokens) > 1]
    if not answers:
        raise HeadTrainingError("the changed model answers the held-out prompts with nothing to test on")
    return answers


@dataclass(frozen=True, slots=True)
class _Renamed:
    """A ``Watch`` that is told of stages under other names."""

    watch: Watch
    names: Mapping[str, str]

    def line(self, text: str) -> None:
        self.watch.line(text)

    def advance(self, stage: str, done: int, total: int, note: str) -> None:
        self.watch.advance(self.names[stage], done, total, note)


class _Meter(Protocol):
    """Who times the writing: an ``Estimator``, or nobody."""

    def begin_shard(self) -> None: ...

    def count(self, tokens: int) -> None: ...


class _NoMeter:
    def begin_shard(self) -> None:
        pass

    def count(self, tokens: int) -> None:
        pass


def _collect(run: Run, watch: Watch, meter: _Meter) -> None:
    settings = run.job.settings.answers
    generator = _Generator(run.job, run.backend, watch, meter)

    def progress(done: Collected) -> None:
        generator.stored, total = done.tokens, settings.tokens
        watch.advance("answers", min(done.tokens, total), total, f"{done.answers} answers")

    collect(
        run.store,
        run.asks,
        generator,
        shard_size=settings.shard_size,
        target_tokens=settings.tokens,
        progress=progress,
    )


class _Generator:
    """Builds the engine when the first answer is wanted: a resumed run may need none."""

    def __init__(self, job: TrainJob, backend: Backend, watch: Watch, meter: _Meter) -> None:
        self.stored = 0
        self._meter = meter
        self._job = job
        self._backend = backend
        self._watch = watch
        self._generator: AnswerGenerator | None = None
        self._shard_tokens = 0

    def __call__(self, asks: Sequence[Ask]) -> list[Answer]:
        if self._generator is None:
            self._generator = self._build()
        self._shard_tokens = 0
        self._meter.begin_shard()
        return self._generator(asks)

    def _build(self) -> AnswerGenerator:
        settings = self._job.settings.answers
        recorders: list[StateRecorder] = []

        def recorder(runner: ModelRunner) -> ModelRunner:
            recorders.append(StateRecorder(runner))
            return recorders[0]

        engine = dataclasses.replace(
            self._job.engine,
            max_num_seqs=settings.concurrency,
            max_num_batched_tokens=2 * settings.concurrency,
            prefix_caching=False,
        )
        plain = EngineSettings(self._job.model, engine, SpeculationConfig(enabled=False))
        core = assemble(self._backend, plain, self._watch.line, [], recorder=recorder).core
        return AnswerGenerator(core, recorders[0], settings.max_tokens, self._count)

    def _count(self, tokens: int) -> None:
        self._shard_tokens += tokens
        done, total = self.stored + self._shard_tokens, self._job.settings.answers.tokens
        self._watch.advance("answers", min(done, total), total, "")
        self._meter.count(tokens)
