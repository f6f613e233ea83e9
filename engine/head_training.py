"""``headlong train``'s work, from a model and prompts to a folder of heads; each stage goes on where a kill left it.

Answers are written by the engine (``engine.distill``), training runs on their stored states (``heads.train``), and the
result is measured with the engine again.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import transformers
import yaml
from filelock import FileLock, Timeout
from safetensors import SafetensorError

from engine.assembly import assemble
from engine.backend import Backend, choose_backend
from engine.config import EngineSettings, SpeculationConfig
from engine.contexts import ContextReader, TopLayersReader, add_contexts
from engine.device import resolve_device, resolve_dtype
from engine.distill import AnswerGenerator, StateRecorder, answer_plan, make_asks
from engine.draft_test import measure_acceptance
from engine.errors import HeadTrainingError, RequestFailedError
from engine.first_heads import drafted_tokens, first_heads, sized_as_start
from engine.loading import LoadedModel, load_model
from engine.loading.heads import output_head
from engine.loading.mtp import attach_base
from engine.model_runner import ModelRunner
from engine.sampling_params import SamplingParams
from engine.spec_decode.head_drafters import head_drafter
from engine.train_job import Material, TrainJob, TrainReport, Watch
from heads.checkpoint import DRAFT_VOCAB_FILE, Heads, LoadedHeads, load_heads, save_heads
from heads.config import HELD_OUT, BaseModel, HeadsConfig
from heads.data import Answer, AnswerStore, Ask, Collected, collect, dataset_digest
from heads.errors import HeadsError
from heads.evaluate import Evaluation, evaluate
from heads.lm_head import DraftLmHead, OutputHead
from heads.markov import MarkovHeads
from heads.mtp import MtpModule
from heads.streaming import StreamingHeads
from heads.top_layers import TopLayersStore
from heads.train import Progress, train

WORK = "work"  # inside the folder of heads: answers, checkpoint and log of the run
_BASELINE_PROMPTS = 24
_BASELINE_TOKENS = 64
_SELF_TEST_PROMPTS = 4
_SELF_TEST_LENGTH = 64


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
    start = None if job.start_from is None else load_heads(job.start_from)
    job = sized_as_start(job, start)
    backend, head, heads = _load(job, start, watch)
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
    lm_head = DraftLmHead(head, drafted_tokens(job, start, seen, material, len(head.weight)))
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


def _load(job: TrainJob, start: LoadedHeads | None, watch: Watch) -> tuple[Backend, OutputHead, Heads]:
    device = resolve_device(job.engine.device)
    loaded = load_model(job.model, device, resolve_dtype(job.model.dtype), watch.line)
    head = output_head(loaded.model)
    # Packing frees the plain weights of an untied lm_head; training still reads them.
    head = dataclasses.replace(head, weight=head.weight.detach().clone())
    heads = first_heads(job, start, loaded).to(device)
    backend = choose_backend(loaded, job.model.quantization, job.engine, watch.line)
    if isinstance(heads, MtpModule):
        attach_base(heads, loaded.model)
    return backend, head, heads


def _read(job: TrainJob, backend: Backend, store: AnswerStore, watch: Watch) -> list[Answer]:
    """All answers, with their contexts where the method's heads attend to them."""
    shards = range(len(store))
    if job.method not in (MtpModule.method, StreamingHeads.method):
        return store.read_all()

    def longest() -> int:
        return max(len(answer.ask.prompt) + len(answer.tokens) for index in shards for answer in store.read(index))

    def progress(done: int) -> None:
        watch.advance("contexts", done, len(shards), "")

    block_size, layers = job.engine.block_size, job.settings.training.stream_layers
    if job.method == MtpModule.method:
        add_contexts(store, len(shards), lambda: ContextReader(backend, longest(), block_size), progress)
        return [answer for index in shards for answer in store.read_with_contexts(index)]
    tops = TopLayersStore(store, layers)
    add_contexts(tops, len(shards), lambda: TopLayersReader(backend, longest(), block_size, layers), progress)
    return [answer for index in shards for answer in tops.read_with_contexts(index)]


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
        rank=heads.rank if isinstance(heads, MarkovHeads | StreamingHeads) else None,
        streaming=heads.sizes if isinstance(heads, StreamingHeads) else None,
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
