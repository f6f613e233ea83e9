"""The estimate that ``headlong train`` gives before it is long at work: measured slices, then ``engine.train_cost``."""

from __future__ import annotations

import dataclasses
import functools
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import psutil

from engine.backend import Backend
from engine.contexts import ContextReader, TopLayersReader
from engine.train_cost import Done, Machine, Rates, Workload, cost, tell
from engine.train_job import CONTEXT_METHODS, TrainJob, Watch
from engine.train_slice import AnswerPace, Clock, made_up_answers, with_contexts
from heads.checkpoint import Heads
from heads.data import Answer, AnswerStore, Ask, TopLayers
from heads.lm_head import DraftLmHead, OutputHead
from heads.streaming import StreamingHeads
from heads.top_layers import TopLayersStore
from heads.train import share_trained, training_rate


class Estimated(Exception):
    """The estimate was told, and nothing more was wanted."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What slices of the work are done with."""

    backend: Backend
    head: OutputHead
    heads: Heads
    store: AnswerStore
    asks: Sequence[Ask]


class Estimator:
    """Measures slices of a run's work and tells the watch, once, what is still to come."""

    def __init__(self, job: TrainJob, parts: Parts, watch: Watch, stops: bool, clock: Clock = time.monotonic) -> None:
        """stops: whether Estimated is raised after that."""
        self._job = job
        self._parts = parts
        self._watch = watch
        self._stops = stops
        self._clock = clock
        self._writing = 0
        self._training = self._contexts = 0.0
        self._pace = AnswerPace(job.settings.answers.concurrency, self._tell, clock)

    @property
    def _needs_contexts(self) -> bool:
        return self._job.method in CONTEXT_METHODS

    @property
    def _is_streaming(self) -> bool:
        return self._job.method == StreamingHeads.method

    def measure(self, lm_head: DraftLmHead) -> None:
        """Times contexts and training steps. lm_head: with a draft vocabulary as large as the run's."""
        settings, head = self._job.settings, self._parts.head.weight
        self._watch.line("Measuring a few training steps")
        sizes = (settings.answers.max_tokens, head.shape[1], head.shape[0])
        answers = made_up_answers(self._parts.asks, sizes, settings.training.batch_tokens)
        if self._needs_contexts:
            longest = max(len(answer.ask.prompt) + len(answer.tokens) for answer in answers)
            answers, self._contexts = with_contexts(answers, self._context_adder(longest), self._clock)
        self._training = training_rate(self._parts.heads, lm_head, answers, settings.training, self._clock)

    def _context_adder(self, longest: int) -> Callable[[Answer], Answer]:
        backend, block_size = self._parts.backend, self._job.engine.block_size
        if self._is_streaming:
            tops = TopLayersReader(backend, longest, block_size, self._job.settings.training.stream_layers)
            return lambda answer: dataclasses.replace(answer, read_top=functools.partial(_same, tops(answer)))
        reader = ContextReader(backend, longest, block_size)
        return lambda answer: dataclasses.replace(answer, context=reader(answer))

    def begin_shard(self) -> None:
        """Answers of another shard are about to be written."""
        self._writing = 0
        self._pace.begin()

    def count(self, tokens: int) -> None:
        """Answer tokens that were written. Raises Estimated."""
        self._writing += tokens
        self._pace.count(tokens)

    def finish(self) -> None:
        """All answers are there. Raises Estimated."""
        self._writing = 0
        self._pace.finish()

    def _tell(self, rate: float) -> None:
        work = self._workload()
        found = cost(work, self._done(), Rates(rate, self._contexts, self._training))
        is_cpu = self._parts.backend.loaded.model.device.type == "cpu"
        machine = Machine(psutil.Process().memory_info().rss, shutil.disk_usage(self._job.folder).free, is_cpu)
        for line in tell(found, work, machine):
            self._watch.line(line)
        if self._job.settings.lora is not None:
            self._watch.line("Training the base model too takes several times what is named for training")
        if self._stops:
            raise Estimated

    def _workload(self) -> Workload:
        settings, shapes = self._job.settings, self._parts.backend.shapes
        read = shapes[-settings.training.stream_layers :] if self._is_streaming else shapes[-1:]
        entry = sum(shape.num_kv_heads * (shape.key_dim + shape.value_dim) for shape in read)
        return Workload(
            target=settings.answers.tokens,
            asks=len(self._parts.asks),
            max_tokens=settings.answers.max_tokens,
            prompt_tokens=sum(len(ask.prompt) for ask in self._parts.asks),
            epochs=settings.training.epochs,
            hidden=self._parts.head.weight.shape[1],
            context=entry if self._needs_contexts else 0,
            parameters=sum(parameter.numel() for parameter in self._parts.heads.parameters()),
            reads_disk=self._is_streaming,
        )

    def _done(self) -> Done:
        store, size = self._parts.store, self._job.settings.answers.shard_size
        counts = [store.count_tokens(index) for index in range(len(store))]
        entries = 0
        contexts = TopLayersStore(store, self._job.settings.training.stream_layers) if self._is_streaming else store
        for index, count in enumerate(counts):
            if contexts.has_contexts(index):
                shard = self._parts.asks[index * size : (index + 1) * size]
                entries += count + sum(len(ask.prompt) for ask in shard)
        answers = min(len(counts) * size, len(self._parts.asks))
        return Done(answers, sum(counts), self._writing, entries, share_trained(store.folder.parent))


def _same(layers: TopLayers) -> TopLayers:
    return layers
