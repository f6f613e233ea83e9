"""``headlong train``'s work, from a model and prompts to a folder of heads; each stage goes on where a kill left it.

Answers are written by the engine (``engine.distill``), training runs on their stored states (``heads.train``), and the
result is measured with the engine again.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import yaml
from filelock import FileLock, Timeout
from safetensors import SafetensorError

from engine.assembly import assemble
from engine.backend import Backend, choose_backend
from engine.changed_model import Change, require_writable
from engine.config import EngineSettings
from engine.data_card import DATA_CARD, data_card
from engine.device import resolve_device, resolve_dtype
from engine.distill import answer_plan
from engine.draft_test import measure_acceptance
from engine.errors import HeadTrainingError, RequestFailedError
from engine.first_heads import drafted_tokens, first_heads, sized_as_start
from engine.joint_training import BaseTraining
from engine.loading import load_model
from engine.loading.heads import output_head
from engine.loading.mtp import attach_base
from engine.lora_base import require_peft
from engine.sampling_params import SamplingParams
from engine.spec_decode.head_drafters import head_drafter
from engine.train_answers import Run, asks_of, collect_answers, read_answers, written_anew
from engine.train_estimate import Estimated
from engine.train_job import MODEL, WORK, TrainJob, TrainReport, Watch
from engine.train_record import Result, run_facts
from engine.training_data import split
from heads.checkpoint import DRAFT_VOCAB_FILE, Heads, LoadedHeads, load_heads, save_heads
from heads.config import HELD_OUT, BaseModel, HeadsConfig
from heads.data import AnswerStore
from heads.errors import HeadsError
from heads.evaluate import evaluate
from heads.files import replace_file
from heads.lm_head import DraftLmHead, OutputHead
from heads.markov import MarkovHeads
from heads.mtp import MtpModule
from heads.streaming import StreamingHeads
from heads.train import Progress, train

_BASELINE_PROMPTS = 24
_BASELINE_TOKENS = 64
_SELF_TEST_PROMPTS = 4
_SELF_TEST_LENGTH = 64


def train_heads(job: TrainJob, watch: Watch) -> TrainReport:
    """Trains heads and writes them to ``job.folder``; blocking, minutes to hours.

    Raises ModelLoadError for the model, HeadTrainingError for settings, prompts or files that cannot be used.
    """
    with _at_work(job):
        run = _prepare(job, watch)
        collect_answers(run, watch)
        return _train(run, watch)


def estimate(job: TrainJob, watch: Watch) -> None:
    """Tells ``watch`` what ``train_heads`` would cost from where it stands, and stops. Whole shards of answers written
    on the way stay. Raises as ``train_heads`` does."""
    with _at_work(job):
        run = _prepare(job, watch)
        try:
            collect_answers(run, watch, stops=True)
        except Estimated:
            return


@contextmanager
def _at_work(job: TrainJob) -> Iterator[None]:
    """Alone in the folder, and with every failure as one of the two that are announced."""
    try:
        (job.folder / WORK).mkdir(parents=True, exist_ok=True)
        with FileLock(job.folder / WORK / "lock", timeout=0):
            yield
    except Timeout as error:
        raise HeadTrainingError(f"another run is at work in {job.folder}") from error
    except (HeadsError, RequestFailedError) as error:
        raise HeadTrainingError(str(error)) from error
    except (OSError, SafetensorError) as error:  # a full disk, a folder that cannot be written
        raise HeadTrainingError(f"{job.folder} cannot be written or read: {error}") from error


def _prepare(job: TrainJob, watch: Watch) -> Run:
    start = None if job.start_from is None else load_heads(job.start_from)
    job = sized_as_start(job, start)
    if job.settings.lora is not None:
        if job.method == StreamingHeads.method:
            raise HeadTrainingError("streams read stored layers of the base model, so it cannot be trained with them")
        require_peft()
    backend, head, heads = _load(job, start, watch)
    if job.settings.lora is not None:
        require_writable(job.folder / MODEL, backend.loaded)
    material = job.material(backend.loaded.path)
    asks = asks_of(job, backend.loaded, material)
    store = AnswerStore(job.folder / WORK / "answers", answer_plan(backend, asks, job.settings.answers))
    return Run(job, start, backend, head, heads, material, asks, store)


def _train(run: Run, watch: Watch) -> TrainReport:
    job, heads, backend = run.job, run.heads, run.backend
    data = split(read_answers(run, watch), run.asks, run.material)
    drafted = drafted_tokens(job, run.start, data.seen, run.material, len(run.head.weight))
    lm_head = DraftLmHead(run.head, drafted)
    lora = job.settings.lora
    base = None if lora is None else BaseTraining(job, lora, run.head, watch)
    joint = None if base is None else base.joint
    train(heads, lm_head, data.seen, job.settings.training, job.folder / WORK, _reporting(watch), joint)
    change: Change | None = None
    greedy = [answer for answer in data.kept if answer.ask.temperature == 0.0] or data.kept
    if base is not None:
        change = base.finish(data.kept, backend)
        backend = base.reload(heads, backend)
        greedy = written_anew(run, backend, greedy, watch)
    watch.line("Testing on held-out answers")
    result = Result(backend, heads.eval(), lm_head, evaluate(heads, lm_head, greedy), data, change)
    tau = _baseline(job, result, [answer.ask.prompt for answer in greedy])
    facts = run_facts(job, result, tau, run.start)
    replace_file(job.folder / DATA_CARD, data_card(facts))
    token_ids = lm_head.token_ids if lm_head.is_reduced else None
    save_heads(job.folder, heads, _config(job, result, tau), token_ids, yaml.safe_dump(facts, sort_keys=False))
    return TrainReport(result.evaluation.positions, result.evaluation.accuracy, tau, backend.quantization, change)


def _load(job: TrainJob, start: LoadedHeads | None, watch: Watch) -> tuple[Backend, OutputHead, Heads]:
    device = resolve_device(job.engine.device)
    loaded = load_model(job.model, device, resolve_dtype(job.model.dtype), watch.line)
    head = output_head(loaded.model)
    if head.weight is not loaded.model.get_input_embeddings().weight:
        # Packing frees the plain weights of an untied lm_head, and training still reads them; a tied one's stay.
        head = dataclasses.replace(head, weight=head.weight.detach().clone())
    heads = first_heads(job, start, loaded).to(device)
    backend = choose_backend(loaded, job.model.quantization, job.engine, watch.line)
    if isinstance(heads, MtpModule):
        attach_base(heads, loaded.model)
    return backend, head, heads


def _reporting(watch: Watch) -> Callable[[Progress], None]:
    def report(done: Progress) -> None:
        losses = " ".join(f"{loss:.2f}" for loss in done.head_losses)
        watch.advance("training", done.step, done.steps, f"loss by head {losses}")

    return report


def _config(job: TrainJob, result: Result, tau: float) -> HeadsConfig:
    loaded, heads = result.backend.loaded, result.heads
    short = [answer.ask.prompt for answer in result.data.kept if len(answer.ask.prompt) <= _SELF_TEST_LENGTH]
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
            "tokens": result.data.facts["training_tokens"],
            "dataset_digest": result.data.facts["dataset_digest"],
        },
        baseline={HELD_OUT: round(tau, 3)},
        calibration=result.evaluation.calibration,
        self_test=tuple(sorted(set(short), key=lambda prompt: (-len(prompt), prompt))[:_SELF_TEST_PROMPTS]),
    )


def _baseline(job: TrainJob, result: Result, prompts: Sequence[tuple[int, ...]]) -> float:
    """Acceptance length of the heads alone on held-out prompts, greedy, every proposed node verified."""
    heads, lm_head = copy.deepcopy((result.heads, result.lm_head))  # serving packs them
    drafter = head_drafter(heads, lm_head, calibration=result.evaluation.calibration)
    settings = EngineSettings(job.model, job.engine)
    core = assemble(result.backend, settings, lambda _: None, [drafter], measures_steps=False).core
    sampling = SamplingParams(temperature=0.0, max_tokens=min(_BASELINE_TOKENS, job.settings.answers.max_tokens))
    return measure_acceptance(core, prompts[:_BASELINE_PROMPTS], sampling).length
