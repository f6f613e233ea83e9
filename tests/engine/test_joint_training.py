"""``--train-base lora`` on a tiny model: what the new model is, what it is called, and what stays as it was."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import json
import math
from pathlib import Path

import pytest
import torch
import yaml
from tiny_engine import EOS, VOCAB
from tiny_folder import write_tiny_model
from tiny_training import SETTINGS, Watched, job, prompts
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.assembly import assemble, make_drafters
from engine.backend import choose_backend
from engine.changed_model import ORIGIN_FILE
from engine.config import EngineConfig, EngineSettings, ModelConfig, SpeculationConfig, TrainingConfig
from engine.errors import HeadTrainingError, ModelLoadError
from engine.head_training import train_heads
from engine.loading import LoadedModel, load_model
from engine.loading.heads import output_head
from engine.lora_base import LoraBase
from engine.sampling_params import EngineRequest, SamplingParams
from engine.spec_decode.controller import Controller
from engine.train_job import MODEL, WORK, TrainJob, TrainReport
from heads.checkpoint import WEIGHTS_FILE, load_heads
from heads.data import Answer, AnswerStore, Ask
from heads.joint import closeness
from heads.lm_head import DraftLmHead, OutputHead
from heads.settings import LoraSettings
from heads.train import CHECKPOINT_FILE, LOG_FILE

LORA = LoraSettings(rank=4, alpha=8, learning_rate=5e-3, heads_first=0.25)
NAME = "tiny-model-headlong-lora"


def joint(whole: TrainJob, **lora: object) -> TrainJob:
    settings = dataclasses.replace(whole.settings, lora=dataclasses.replace(LORA, **lora))  # type: ignore[arg-type]
    return dataclasses.replace(whole, settings=settings)


def load(folder: Path) -> LoadedModel:
    return load_model(ModelConfig(str(folder)), torch.device("cpu"), torch.float32, lambda _: None)


def files(folder: Path) -> dict[str, str]:
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny_model(tmp_path_factory.mktemp("tiny") / "tiny-model")
    (folder / "LICENSE").write_text("as you like")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS, "top_k": 40, "do_sample": True}))
    return folder


@dataclasses.dataclass(frozen=True)
class Done:
    """before, after: the files of the original around the run."""

    folder: Path
    report: TrainReport
    watched: Watched
    before: dict[str, str]
    after: dict[str, str]


@pytest.fixture(scope="module", params=["medusa", "markov", "mtp"])
def done(model: Path, request: pytest.FixtureRequest) -> Done:
    folder, watched, before = model.parent / request.param, Watched(), files(model)
    whole = joint(dataclasses.replace(job(model, folder), method=request.param))
    return Done(folder, train_heads(whole, watched), watched, before, files(model))


def test_the_new_model_is_another_and_says_so(done: Done, model: Path) -> None:
    folder = done.folder / MODEL
    old, new = load(model), load(folder)
    assert new.name == NAME
    assert new.digest != old.digest
    assert done.after == done.before, "the original's files are only read"
    assert NAME in (folder / "README.md").read_text()
    card = (folder / "README.md").read_text()
    assert "not the original model" in card
    assert old.digest in card
    origin = json.loads((folder / ORIGIN_FILE).read_text())
    assert origin["changed_from"] == {"name": "tiny-model", "digest": old.digest}
    assert json.loads((folder / "config.json").read_text()).get("_name_or_path", NAME) == NAME
    assert str(model.parent) not in "".join(path.read_text() for path in folder.glob("*.json"))
    assert (folder / "LICENSE").read_text() == "as you like"
    assert (folder / "generation_config.json").read_bytes() == (model / "generation_config.json").read_bytes()
    assert (new.eos_token_ids, new.default_sampling) == (old.eos_token_ids, old.default_sampling)
    assert AutoTokenizer.from_pretrained(folder).encode("w3 w7") == [3, 7]


def test_the_heads_are_the_new_models_alone(done: Done, model: Path) -> None:
    found, new = load_heads(done.folder), load(done.folder / MODEL)
    assert (found.config.base_model.name, found.config.base_model.digest) == (NAME, new.digest)
    config = SpeculationConfig(heads=str(done.folder))
    assert make_drafters(config, new).methods == ("suffix", found.config.method)
    with pytest.raises(ModelLoadError, match=f"were trained on {NAME}, not on tiny-model"):
        make_drafters(config, load(model))
    run = yaml.safe_load((done.folder / "run.yaml").read_text())
    assert run["model"]["name"] == "tiny-model"
    assert run["changed_model"]["digest"] == new.digest
    assert run["changed_model"]["lora"]["rank"] == 4


def test_the_measured_change_is_that_of_the_two_models_on_disk(done: Done, model: Path) -> None:
    """Written out with transformers alone, answer by answer."""
    manifest = done.folder / WORK / "answers"
    answers = AnswerStore(manifest, json.loads((manifest / "answers.json").read_text())).read_all()
    kept = [answer for answer in answers if answer.is_held_out and len(answer.tokens) > 1]
    models = [AutoModelForCausalLM.from_pretrained(folder) for folder in (model, done.folder / MODEL)]
    kl, agreed, losses, count = 0.0, 0, [0.0, 0.0], 0
    for answer in kept:
        ids = torch.tensor([[*answer.ask.prompt, *answer.tokens]])
        with torch.no_grad():
            old, new = [one(ids).logits[0, len(answer.ask.prompt) - 1 : -1].double().log_softmax(-1) for one in models]
        kl += float((old.exp() * (old - new)).sum())
        agreed += int((old.argmax(-1) == new.argmax(-1)).sum())
        for index, logs in enumerate((old, new)):
            losses[index] -= float(logs[range(len(answer.tokens)), answer.tokens].sum())
        count += len(answer.tokens)
    assert done.report.change is not None
    found = done.report.change.held_out
    assert found.tokens == count
    assert found.kl == pytest.approx(kl / count, rel=1e-3)
    assert 1e-4 < found.kl < 1.0, "changed, and still close"
    assert found.agreement == pytest.approx(agreed / count)
    assert found.perplexity_before == pytest.approx(math.exp(losses[0] / count), rel=1e-4)
    assert found.perplexity_after == pytest.approx(math.exp(losses[1] / count), rel=1e-4)
    assert f"{found.kl:.5f}" in (done.folder / MODEL / "README.md").read_text()


def test_its_text_is_the_same_with_its_heads_and_without(done: Done) -> None:
    """Law 1, for every prompt and at two temperatures; drafts are accepted."""
    loaded = load(done.folder / MODEL)
    settings = EngineSettings(
        ModelConfig("tiny"),
        EngineConfig(device="cpu", kv_cache_memory=8 << 20),
        SpeculationConfig(heads=str(done.folder), drafters=(load_heads(done.folder).config.method,)),
    )
    drafters = make_drafters(settings.speculation, loaded).drafters
    backend = choose_backend(loaded, "none", settings.engine, lambda _: None)
    texts, accepted = [], 0
    for used in ([], drafters):
        core = assemble(backend, settings, lambda _: None, used, measures_steps=False).core
        core.scheduler.controller = Controller(None)
        found: dict[str, list[int]] = {}
        for index, prompt in enumerate(prompts(12, seed=5)):
            sampling = SamplingParams(temperature=0.8 * (index % 2), seed=index, max_tokens=24)
            core.add(EngineRequest(f"{index}", prompt, sampling))
        while core.has_work:
            for output in core.step().outputs:
                found.setdefault(output.request_id, []).extend(token.token_id for token in output.tokens)
                accepted += sum(token.depth > 0 for token in output.tokens)
        texts.append(found)
    assert texts[0] == texts[1]
    assert len(texts[0]) == 12
    assert accepted > 0


def test_the_base_waits_for_the_heads_and_then_learns(done: Done) -> None:
    lines = [json.loads(line) for line in (done.folder / WORK / LOG_FILE).read_text().splitlines()]
    frozen = round(len(lines) * LORA.heads_first)
    assert frozen > 0
    assert all(line["base_learning_rate"] == 0 and line["kl"] is None for line in lines[:frozen])
    assert all(line["base_learning_rate"] > 0 and line["kl"] >= -1e-6 for line in lines[frozen:])
    assert max(line["kl"] for line in lines[frozen:]) > 10 * max(lines[frozen]["kl"], 1e-7), "it starts as the original"
    assert {"answers", "training", "held-out answers"} <= set(done.watched.stages)


class Broken(Exception):
    """Stands for a kill."""


class Breaks(Watched):
    """Fails once a stage has come as far as it is told."""

    def __init__(self, stage: str, done: int) -> None:
        super().__init__()
        self._where = (stage, done)

    def advance(self, stage: str, done: int, total: int, note: str) -> None:
        if stage == self._where[0] and done >= self._where[1]:
            raise Broken
        super().advance(stage, done, total, note)


@pytest.mark.parametrize("done", ["medusa"], indirect=True)
def test_a_run_broken_off_anywhere_ends_as_an_undisturbed_one(done: Done, model: Path, tmp_path: Path) -> None:
    whole = joint(job(model, tmp_path))
    steps = len((done.folder / WORK / LOG_FILE).read_text().splitlines())
    for stage, count in (("training", 3), ("training", steps - 2), ("held-out answers", 0)):
        with pytest.raises(Broken):
            train_heads(whole, Breaks(stage, count))
    train_heads(whole, Watched())
    for name in (WEIGHTS_FILE, "config.json", f"{MODEL}/model.safetensors", f"{MODEL}/README.md"):
        assert (tmp_path / name).read_bytes() == (done.folder / name).read_bytes(), name


def test_merging_gives_the_adapted_model(model: Path) -> None:
    """And adapters start without effect, so that the first joint step sees the original."""
    answers = [
        Answer(Ask(prompt, 0.0, 1), tuple(range(1, 9 + index)), torch.zeros(0))
        for index, prompt in enumerate(prompts(3))
    ]
    plain = load(model)
    ids = torch.tensor([[*answers[1].ask.prompt, *answers[1].tokens]])
    with torch.no_grad():
        original = plain.model(ids).logits
    base = LoraBase(plain.model, LORA, 3)
    first = len(answers[1].ask.prompt) - 1
    span = slice(len(answers[0].tokens), len(answers[0].tokens) + len(answers[1].tokens))
    head = DraftLmHead(output_head(load(model).model), None)
    with torch.no_grad():
        untouched = head(base.read(answers).states[span])
        assert torch.allclose(untouched, original[0, first:-1], atol=1e-5)
        for parameter in base.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        adapted = head(base.read(answers).states[span])
        merged = base.merge()(ids).logits[0, first:-1]
    assert float((adapted - untouched).abs().max()) > 0.1
    assert torch.allclose(merged, adapted, atol=1e-5)


def test_adapters_are_a_function_of_the_seed_and_leave_the_random_numbers_alone(model: Path) -> None:
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    made = [LoraBase(load(model).model, LORA, seed).state_dict() for seed in (3, 3, 4)]
    assert torch.equal(torch.rand(1), expected)
    assert all(torch.equal(tensor, made[1][name]) for name, tensor in made[0].items())
    assert not all(torch.equal(tensor, made[2][name]) for name, tensor in made[0].items())
    assert not any("lm_head" in name or "embed" in name for name in made[0])


def test_closeness_of_a_model_to_itself() -> None:
    generator = torch.Generator().manual_seed(0)
    head = DraftLmHead(OutputHead(torch.randn(VOCAB, 8, generator=generator)), None)
    states = torch.randn(150, 8, generator=generator)
    tokens = head(states).argmax(dim=-1)
    found = closeness(head, [(states, states, tokens)])
    assert (found.tokens, found.agreement) == (150, 1.0)
    assert found.kl == pytest.approx(0.0, abs=1e-6)
    assert found.perplexity_before == found.perplexity_after


@pytest.mark.parametrize("done", ["medusa"], indirect=True)
def test_a_heavier_term_keeps_the_model_closer(done: Done, model: Path, tmp_path: Path) -> None:
    close = train_heads(joint(job(model, tmp_path), base_weight=50.0), Watched())
    assert close.change is not None
    assert done.report.change is not None
    assert close.change.held_out.kl < 0.5 * done.report.change.held_out.kl


def test_without_peft_the_run_ends_before_it_begins(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "peft" else find(name, *rest))
    watched = Watched()
    with pytest.raises(HeadTrainingError, match=r"pip install 'headlong\[lora\]'"):
        train_heads(joint(job(model, tmp_path)), watched)
    assert not watched.stages


def test_nothing_of_others_is_overwritten(model: Path, tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    (foreign / MODEL).mkdir(parents=True)
    (foreign / MODEL / "notes.txt").write_text("mine")
    with pytest.raises(HeadTrainingError, match="holds something else"):
        train_heads(joint(job(model, foreign)), Watched())
    own = write_tiny_model(tmp_path / "own" / MODEL)
    before = files(own)
    with pytest.raises(HeadTrainingError, match="is the model itself"):
        train_heads(joint(job(own, tmp_path / "own")), Watched())
    assert (files(own), files(foreign / MODEL).keys()) == (before, {"notes.txt"})


def test_a_checkpoint_of_a_run_without_the_base_is_refused(model: Path, tmp_path: Path) -> None:
    train_heads(job(model, tmp_path), Watched())
    assert (tmp_path / WORK / CHECKPOINT_FILE).exists()
    with pytest.raises(HeadTrainingError, match="other answers or settings"):
        train_heads(joint(job(model, tmp_path)), Watched())
    assert TrainingConfig().lora is None
    assert SETTINGS.lora is None
