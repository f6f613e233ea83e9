"""``headlong train``'s work, from a model and prompts to a folder of heads; each stage goes on where a kill left it.

Answers are written by the engine (``engine.distill``), training runs on their stored states (``heads.train``), and the
result is measured with the engine again.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import platform
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import transformers
import yaml
from filelock import FileLock, Timeout
from safetensors import SafetensorError

from engine.assembly import assemble
from engine.backend import Backend, choose_backend
from engine.config import EngineConfig, EngineSettings, ModelConfig, SpeculationConfig, TrainingConfig
from engine.contexts import ContextReader, add_contexts
from engine.device import resolve_device, resolve_dtype
from engine.distill import AnswerGenerator, StateRecorder, answer_plan, make_asks
from engine.draft_test import measure_acceptance
from engine.errors import HeadTrainingError, RequestFailedError
from engine.loading import LoadedModel, load_model
from engine.loading.heads import output_head, require_fitting
from engine.loading.mtp import attach_base, new_mtp
from engine.model_runner import ModelRunner
from engine.sampling_params import SamplingParams
from engine.spec_decode.head_drafters import head_drafter
from heads.checkpoint import DRAFT_VOCAB_FILE, Heads, load_heads, read_draft_vocab, save_heads
from heads.config import HELD_OUT, BaseModel, HeadsConfig
from heads.data import Answer, AnswerStore, Ask, Collected, collect, dataset_digest
from heads.errors import HeadsError
from heads.evaluate import Evaluation, evaluate
from heads.lm_head import DraftLmHead, OutputHead
from heads.markov import MarkovHeads, MarkovSizes
from heads.markov import start as start_markov
from heads.medusa import MedusaHeads
from heads.mtp import MtpModule
from heads.train import Progress, train

WORK = "work"  # inside the folder of heads: answers, checkpoint and log of the run
_BASELINE_PROMPTS = 24
_BASELINE_TOKENS = 64
_SELF_TEST_PROMPTS = 4
_SELF_TEST_LENGTH = 64


@dataclass(frozen=True, slots=True)
class Material:
    """prompts: token ids, chat template included. always_drafted: ids that a reduced draft vocabulary must hold."""

    prompts: Sequence[tuple[int, ...]]
    always_drafted: Sequence[int]


class Watch(Protocol):
    """Who is told how far a run is."""

    def line(self, text: str) -> None:
        """Something that takes seconds begins."""
        ...

    def advance(self, stage: str, done: int, total: int, note: str) -> None:
        """``done`` of ``total`` units of a stage."""
        ...


@dataclass(frozen=True, slots=True)
class TrainJob:
    """material: makes the prompts from the model's folder, where its tokenizer lies. run: facts for run.yaml. method:
    "medusa", "markov" or "mtp"; None: that of start_from, or "medusa". start_from: a folder of heads to train further,
    whose sizes go before those of the settings."""

    model: ModelConfig
    folder: Path
    material: Callable[[Path], Material]
    engine: EngineConfig = field(default_factory=EngineConfig)
    settings: TrainingConfig = field(default_factory=TrainingConfig)
    run: Mapping[str, Any] = field(default_factory=dict)
    method: str | None = None
    start_from: Path | None = None


@dataclass(frozen=True, slots=True)
class TrainReport:
    """positions, accuracy: on held-out answers (``heads.evaluate``). acceptance_length: of these heads alone, greedy,
    on held-out prompts."""

    positions: int
    accuracy: Sequence[Mapping[int, float]]
    acceptance_length: float


def train_heads(job: TrainJob, watch: Watch) -> TrainReport:
    """Trains heads and writes them to ``job.folder``; blocking, minutes to hours.

    Raises ModelLoadError for the model, HeadTrainingError for settings, prompts or files that cannot be used.
    """
    try:
        (job.folder / WORK).mkdir(parents=True, exist_ok=True)
        with FileLock(job.folder / WORK / "lock", timeout=0):
            return _train_heads(job, watch)
    except Timeout as error:
        raise HeadTrainingError(f"another run is at work in {job.folder}") from error
    except (HeadsError, RequestFailedError) as error:
        raise HeadTrainingError(str(error)) from error
    except (OSError, SafetensorError) as error:  # a full disk, a folder that cannot be written
        raise HeadTrainingError(f"{job.folder} cannot be written or read: {error}") from error


def _train_heads(job: TrainJob, watch: Watch) -> TrainReport:
    job = _sized_as_start(job)
    backend, head, heads = _load(job, watch)
    loaded = backend.loaded
    material = job.material(loaded.path)
    asks = _asks(job, loaded, material)
    store = AnswerStore(job.folder / WORK / "answers", answer_plan(backend, asks, job.settings.answers))
    _collect(job, backend, store, asks, watch)
    answers = [answer for answer in _read(job, backend, store, watch) if len(answer.tokens) > 1]
    seen = [answer for answer in answers if not answer.is_held_out]
    kept = [answer for answer in answers if answer.is_held_out]
    if not seen or not kept:
        raise HeadTrainingError(
            f"{len(answers)} answers are too few to train on some and test on others; give more prompts"
        )
    lm_head = DraftLmHead(head, _drafted(job, seen, material, len(head.weight)))
    train(heads, lm_head, seen, job.settings.training, job.folder / WORK, _reporting(watch))
    watch.line("Testing on held-out answers")
    greedy = [answer for answer in kept if answer.ask.temperature == 0.0] or kept
    result = _Result(backend, heads.eval(), lm_head, evaluate(heads, lm_head, greedy), seen, kept)
    tau = _baseline(job, result, [answer.ask.prompt for answer in greedy])
    token_ids = lm_head.token_ids if lm_head.is_reduced else None
    save_heads(job.folder, heads, _config(job, result, tau), token_ids, _run_yaml(job, result, tau))
    return TrainReport(result.evaluation.positions, result.evaluation.accuracy, tau)


@dataclass(frozen=True, slots=True)
class _Result:
    """What training gave. seen, kept: the answers trained on and held out."""

    backend: Backend
    heads: Heads
    lm_head: DraftLmHead
    evaluation: Evaluation
    seen: Sequence[Answer]
    kept: Sequence[Answer]


def _load(job: TrainJob, watch: Watch) -> tuple[Backend, OutputHead, Heads]:
    device = resolve_device(job.engine.device)
    loaded = load_model(job.model, device, resolve_dtype(job.model.dtype), watch.line)
    head = output_head(loaded.model)
    # Packing frees the plain weights of an untied lm_head; training still reads them.
    head = dataclasses.replace(head, weight=head.weight.detach().clone())
    heads = _first_heads(job, loaded).to(device)
    backend = choose_backend(loaded, job.model.quantization, job.engine, watch.line)
    if isinstance(heads, MtpModule):
        attach_base(heads, loaded.model)
    return backend, head, heads


def _sized_as_start(job: TrainJob) -> TrainJob:
    """The job with the method and the sizes of the heads it starts from."""
    if job.start_from is None:
        return dataclasses.replace(job, method=job.method or MedusaHeads.method)
    found = HeadsConfig.read(job.start_from)
    if job.method not in (None, found.method):
        raise HeadTrainingError(f"{job.start_from} holds heads of the method {found.method}, not {job.method}")
    sizes = dataclasses.replace(job.settings.training, num_heads=found.num_heads, num_layers=found.num_layers)
    if found.method == MarkovHeads.method:
        token_ids = read_draft_vocab(job.start_from, found)  # has a row of the bias each, so it stays
        drafted = 0 if token_ids is None else len(token_ids)
        sizes = dataclasses.replace(sizes, rank=found.rank or sizes.rank, draft_vocab=drafted)
    settings = dataclasses.replace(job.settings, training=sizes)
    return dataclasses.replace(job, method=found.method, settings=settings)


def _first_heads(job: TrainJob, loaded: LoadedModel) -> Heads:
    """What training starts with."""
    if job.start_from is not None:
        found = load_heads(job.start_from)
        require_fitting(found, loaded)
        return found.heads.train().requires_grad_(True)
    settings = job.settings.training
    if job.method == MtpModule.method:
        return new_mtp(loaded.model, settings)
    vocab, hidden = output_head(loaded.model).weight.shape
    medusa = MedusaHeads(hidden, settings.num_heads, settings.num_layers)
    if job.method == MedusaHeads.method:
        return medusa
    markov = MarkovHeads(medusa, MarkovSizes(settings.rank, vocab, min(settings.draft_vocab or vocab, vocab)))
    start_markov(markov, settings.seed)
    return markov


def _read(job: TrainJob, backend: Backend, store: AnswerStore, watch: Watch) -> list[Answer]:
    """All answers, with their contexts where the method's heads attend to them."""
    shards = range(len(store))
    if job.method != MtpModule.method:
        return store.read_all()

    def make_reader() -> ContextReader:
        longest = max(len(answer.ask.prompt) + len(answer.tokens) for index in shards for answer in store.read(index))
        return ContextReader(backend, longest, job.engine.block_size)

    add_contexts(store, len(shards), make_reader, lambda done: watch.advance("contexts", done, len(shards), ""))
    return [answer for index in shards for answer in store.read_with_contexts(index)]


def _asks(job: TrainJob, loaded: LoadedModel, material: Material) -> list[Ask]:
    """One a prompt; prompts that leave no room for an answer are left out."""
    longest = job.engine.max_model_len or loaded.max_position_embeddings
    room = None if longest is None else longest - job.settings.answers.max_tokens
    prompts = [prompt for prompt in material.prompts if prompt and (room is None or len(prompt) <= room)]
    if not prompts:
        raise HeadTrainingError("no prompt leaves room for an answer in the model's context")
    return make_asks(prompts, job.settings.answers, job.settings.training.seed)


def _collect(job: TrainJob, backend: Backend, store: AnswerStore, asks: Sequence[Ask], watch: Watch) -> None:
    generator = _Generator(job, backend, watch)

    def progress(done: Collected) -> None:
        generator.stored, total = done.tokens, job.settings.answers.tokens
        watch.advance("answers", min(done.tokens, total), total, f"{done.answers} answers")

    collect(
        store,
        asks,
        generator,
        shard_size=job.settings.answers.shard_size,
        target_tokens=job.settings.answers.tokens,
        progress=progress,
    )


class _Generator:
    """Builds the engine when the first answer is wanted: a resumed run may need none."""

    def __init__(self, job: TrainJob, backend: Backend, watch: Watch) -> None:
        self.stored = 0
        self._job = job
        self._backend = backend
        self._watch = watch
        self._generator: AnswerGenerator | None = None
        self._shard_tokens = 0

    def __call__(self, asks: Sequence[Ask]) -> list[Answer]:
        if self._generator is None:
            self._generator = self._build()
        self._shard_tokens = 0
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


def _drafted(job: TrainJob, seen: Sequence[Answer], material: Material, vocab_size: int) -> torch.Tensor | None:
    """The draft vocabulary of this run; None: the whole."""
    if job.start_from is not None and job.method == MarkovHeads.method:
        return read_draft_vocab(job.start_from, HeadsConfig.read(job.start_from))
    return draft_vocab(seen, material.always_drafted, job.settings.training.draft_vocab, vocab_size)


def draft_vocab(answers: Sequence[Answer], always: Sequence[int], size: int, vocab_size: int) -> torch.Tensor | None:
    """The draft vocabulary, ascending: ``always``, then the tokens most frequent in the answers, then the lowest ids
    (the oldest merges of a BPE vocabulary). None for the whole vocabulary (size 0, or at least the model's own)."""
    if size == 0 or size >= vocab_size:
        return None
    counts = Counter(token for answer in answers for token in answer.tokens)
    frequent = (token for token, _ in counts.most_common())
    chosen = dict.fromkeys([*always][:size])
    for token in (*frequent, *range(vocab_size)):
        if len(chosen) >= size:
            break
        chosen[token] = None
    return torch.tensor(sorted(chosen))


def _reporting(watch: Watch) -> Callable[[Progress], None]:
    def report(done: Progress) -> None:
        losses = " ".join(f"{loss:.2f}" for loss in done.head_losses)
        watch.advance("training", done.step, done.steps, f"loss by head {losses}")

    return report


def _config(job: TrainJob, result: _Result, tau: float) -> HeadsConfig:
    loaded, heads = result.backend.loaded, result.heads
    short = [answer.ask.prompt for answer in result.kept if len(answer.ask.prompt) <= _SELF_TEST_LENGTH]
    return HeadsConfig(
        method=heads.method,
        mtp=heads.shape if isinstance(heads, MtpModule) else None,
        rank=heads.rank if isinstance(heads, MarkovHeads) else None,
        num_heads=heads.num_heads,
        num_layers=job.settings.training.num_layers,
        hidden_size=heads.hidden_size,
        vocab_size=result.lm_head.vocab_size,
        base_model=BaseModel(loaded.name, loaded.digest),
        draft_vocab=DRAFT_VOCAB_FILE if result.lm_head.is_reduced else None,
        trained={
            "tokens": sum(len(answer.tokens) for answer in result.seen),
            "dataset_digest": dataset_digest(result.seen),
        },
        baseline={HELD_OUT: round(tau, 3)},
        calibration=result.evaluation.calibration,
        self_test=tuple(sorted(set(short), key=lambda prompt: (-len(prompt), prompt))[:_SELF_TEST_PROMPTS]),
    )


def _baseline(job: TrainJob, result: _Result, prompts: Sequence[tuple[int, ...]]) -> float:
    """Acceptance length of the heads alone on held-out prompts, greedy, every proposed node verified."""
    heads, lm_head = copy.deepcopy((result.heads, result.lm_head))  # serving packs them
    drafter = head_drafter(heads, lm_head, calibration=result.evaluation.calibration)
    settings = EngineSettings(job.model, job.engine)
    core = assemble(result.backend, settings, lambda _: None, [drafter], measures_steps=False).core
    sampling = SamplingParams(temperature=0.0, max_tokens=min(_BASELINE_TOKENS, job.settings.answers.max_tokens))
    return measure_acceptance(core, prompts[:_BASELINE_PROMPTS], sampling).length


def _run_yaml(job: TrainJob, result: _Result, tau: float) -> str:
    """How these heads were made, for whoever wants to make them again."""
    facts = {
        **job.run,
        "method": job.method,
        "model": {"path": job.model.path, "name": result.backend.loaded.name, "digest": result.backend.loaded.digest},
        "computed": {"runner": result.backend.name, "quantization": result.backend.quantization},
        "answers": dataclasses.asdict(job.settings.answers),
        "training": dataclasses.asdict(job.settings.training),
        "data": {
            "answers": len(result.seen) + len(result.kept),
            "training_tokens": sum(len(answer.tokens) for answer in result.seen),
            "held_out_tokens": sum(len(answer.tokens) for answer in result.kept),
            "dataset_digest": dataset_digest(result.seen),
        },
        "result": {
            "held_out_positions": result.evaluation.positions,
            "accuracy": [
                {f"top_{count}": round(share, 4) for count, share in depth.items()}
                for depth in result.evaluation.accuracy
            ],
            "acceptance_length": {HELD_OUT: round(tau, 3)},
        },
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }
    text: str = yaml.safe_dump(json.loads(json.dumps(facts)), sort_keys=False)
    return text
