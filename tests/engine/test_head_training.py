"""The stages of ``headlong train`` on a tiny model: what they leave, and what they refuse in one sentence."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from filelock import FileLock
from tiny_engine import EOS, VOCAB
from tiny_folder import write_tiny_model
from tiny_training import SETTINGS, Watched, changed, job, prompts
from transformers import AutoModelForCausalLM, Gemma3TextConfig, PreTrainedModel

from engine.assembly import make_drafters
from engine.backend import Backend, choose_backend
from engine.config import ModelConfig, SpeculationConfig
from engine.distill import AnswerGenerator
from engine.errors import HeadTrainingError, ModelLoadError, RequestFailedError
from engine.first_heads import draft_vocab
from engine.head_training import estimate, train_heads
from engine.loading import load_model
from engine.spec_decode.own_kv_drafter import OwnKvDrafter
from engine.train_job import WORK, Material, TrainReport
from heads.checkpoint import WEIGHTS_FILE, load_heads
from heads.config import StreamSizes
from heads.data import Answer, AnswerStore, Ask, held_out
from heads.lm_head import DraftLmHead, OutputHead
from heads.markov import MarkovHeads
from heads.mtp import MtpModule
from heads.streaming import StreamingHeads
from heads.train import CHECKPOINT_FILE


class Killed(Exception):
    pass


class Killing(Watched):
    """Ends the run at one step of a stage."""

    def __init__(self, stage: str, step: int) -> None:
        super().__init__()
        self._at = (stage, step)

    def advance(self, stage: str, done: int, total: int, note: str) -> None:
        if (stage, done) == self._at:
            raise Killed


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "tiny-model")


@pytest.fixture(scope="module")
def done(model: Path) -> tuple[Path, TrainReport, Watched]:
    """A folder of heads; tests copy it before they change anything."""
    watched = Watched()
    folder = model.parent / "heads"
    return folder, train_heads(job(model, folder), watched), watched


@pytest.fixture
def folder(done: tuple[Path, TrainReport, Watched], tmp_path: Path) -> Path:
    return Path(shutil.copytree(done[0], tmp_path / "heads"))


def test_what_a_run_leaves(done: tuple[Path, TrainReport, Watched], model: Path) -> None:
    folder, report, _ = done
    found = load_heads(folder)
    assert found.config.base_model.name == "tiny-model"
    assert (found.config.hidden_size, found.config.vocab_size, found.config.num_heads) == (32, VOCAB, 2)
    assert found.token_ids is not None
    assert len(found.token_ids) == 50
    assert EOS in found.token_ids
    assert found.config.baseline == {"held-out": pytest.approx(report.acceptance_length, abs=1e-3)}
    assert found.config.calibration is not None
    assert found.config.self_test
    assert set(found.config.self_test) <= {prompt for prompt in prompts(80) if held_out(prompt)}
    answers = AnswerStore(folder / WORK / "answers", json.loads((folder / WORK / "answers/answers.json").read_text()))
    stored = answers.read_all()
    assert len(stored) == 80
    run = yaml.safe_load((folder / "run.yaml").read_text())
    assert run["data"]["held_out_tokens"] == sum(len(one.tokens) for one in stored if one.is_held_out)
    assert run["data"]["training_tokens"] == found.config.trained["tokens"]
    assert run["command"] == ["headlong"]
    assert run["data"]["answers_cut_at_a_loop"] == sum(one.was_cut for one in stored)
    assert run["data"]["prompts_answered"] == 80
    assert run["data"]["answers"] == run["data"]["training_answers"] + run["data"]["held_out_answers"]
    assert str(model.parent) not in (folder / "config.json").read_text(), "what is given on must not tell of a machine"


def test_progress_ends_where_it_said_it_would(done: tuple[Path, TrainReport, Watched]) -> None:
    answers, training = done[2].stages["answers"], done[2].stages["training"]
    assert answers[-1] == (SETTINGS.answers.tokens, SETTINGS.answers.tokens)
    assert all(count <= total for count, total in answers)
    assert [count for count, _ in training] == list(range(1, training[-1][1] + 1))


def test_a_finished_run_is_made_again_without_work(folder: Path, model: Path) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    watched = Watched()
    train_heads(job(model, folder), watched)
    assert "training" not in watched.stages
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"max_tokens": 12}, r"holds answers of another run \(max_tokens was 16, is 12\)"),
        ({"shard_size": 10}, r"holds answers of another run \(shard_size"),
        ({"temperatures": (0.5,)}, r"holds answers of another run \(asks"),
        ({"seed": 3}, r"holds answers of another run \(asks"),
        ({"learning_rate": 0.5}, "other answers or settings"),
        ({"num_heads": 3}, "other answers or settings"),
        ({"draft_vocab": 40}, "other answers or settings"),
        ({"max_tokens": 96}, "no prompt leaves room for an answer"),
    ],
)
def test_a_folder_of_another_run_is_refused(folder: Path, model: Path, changes: dict[str, object], reason: str) -> None:
    with pytest.raises(HeadTrainingError, match=reason) as refused:
        train_heads(changed(job(model, folder), **changes), Watched())
    assert "\n" not in str(refused.value)


def damaged(*path: str) -> Callable[[Path], None]:
    return lambda folder: folder.joinpath(WORK, *path).write_bytes(b"junk") and None


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (damaged(CHECKPOINT_FILE), "checkpoint.pt is not a checkpoint"),
        (damaged("answers", "answers-00001.safetensors"), "answers-00001.safetensors is damaged"),
        (damaged("answers", "answers.json"), "cannot be used for training answers"),
    ],
)
def test_damaged_files_are_named(folder: Path, model: Path, damage: Callable[[Path], None], reason: str) -> None:
    damage(folder)
    with pytest.raises(HeadTrainingError, match=reason) as refused:
        train_heads(job(model, folder), Watched())
    assert "\n" not in str(refused.value)


def test_prompts_too_few_to_hold_some_out_are_refused(model: Path, tmp_path: Path) -> None:
    for kept in (True, False):
        few = [prompt for prompt in prompts(200) if held_out(prompt) is kept][:5]
        with pytest.raises(HeadTrainingError, match="5 answers are too few to train on some and test on others"):
            train_heads(job(model, tmp_path / str(kept), Material(few, [])), Watched())


def test_prompts_that_leave_no_room_are_left_out(model: Path, tmp_path: Path) -> None:
    long = [tuple(range(1, 60)) * 2, ()]
    train_heads(job(model, tmp_path, Material([*long, *prompts(80)], [])), Watched())
    stored = sum(path.suffix == ".safetensors" for path in (tmp_path / WORK / "answers").iterdir())
    assert stored == 4


def test_a_model_that_is_not_there_is_refused_as_one(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError):
        train_heads(job(tmp_path / "absent", tmp_path / "out"), Watched())


def test_a_folder_that_cannot_be_used_is_named(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HeadTrainingError, match="file"):
        train_heads(job(model, tmp_path / "file"), Watched())
    (tmp_path / "heads" / WEIGHTS_FILE).mkdir(parents=True)
    with pytest.raises(HeadTrainingError, match=WEIGHTS_FILE):
        train_heads(job(model, tmp_path / "heads"), Watched())


@pytest.mark.parametrize("method", ["medusa", "markov", "mtp"])
def test_an_estimate_alone_trains_nothing_and_the_run_goes_on_from_it(model: Path, tmp_path: Path, method: str) -> None:
    watched, whole = Watched(), dataclasses.replace(job(model, tmp_path / "out"), method=method)
    estimate(whole, watched)
    (told,) = [line for line in watched.lines if line.startswith("Estimate")]
    assert ("contexts" in told) == (method == "mtp")
    assert "answers 0.0 min" in told, "so few are all written before the pace is known"
    assert [path.name for path in (tmp_path / "out").iterdir()] == [WORK]
    assert "training" not in watched.stages
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out" / WORK / "answers").iterdir()}
    assert len(before) == 5
    again = Watched()
    train_heads(whole, again)
    assert {name: (tmp_path / "out" / WORK / "answers" / name).stat().st_mtime_ns for name in before} == before
    assert sum(line.startswith("Estimate") for line in again.lines) == 1


def test_an_estimate_does_not_change_what_is_trained(done: tuple[Path, TrainReport, Watched], model: Path) -> None:
    """The slices are of copies, and draw no random numbers of the run."""
    folder = model.parent / "estimated"
    estimate(job(model, folder), Watched())
    train_heads(job(model, folder), Watched())
    for name in ("heads.safetensors", "config.json", "data_card.md"):
        assert (folder / name).read_bytes() == (done[0] / name).read_bytes()


def test_the_estimate_comes_while_the_first_answers_are_written(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a slow machine: enough is known before the first shard is whole."""
    monkeypatch.setattr("engine.train_slice._LEAST_SECONDS", 0.0)
    watched = Watched()
    estimate(job(model, tmp_path), watched)
    assert [path.name for path in (tmp_path / WORK / "answers").iterdir()] == ["answers.json"]
    assert any(line.startswith("Estimate") for line in watched.lines)


def test_two_runs_do_not_share_a_folder(model: Path, tmp_path: Path) -> None:
    (tmp_path / WORK).mkdir()
    with (
        FileLock(tmp_path / WORK / "lock"),
        pytest.raises(HeadTrainingError, match="another run is at work in"),
    ):
        train_heads(job(model, tmp_path), Watched())


def test_a_fault_of_the_engine_is_told_and_leaves_no_shard(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: AnswerGenerator, asks: list[Ask]) -> list[Answer]:
        raise RequestFailedError("logits are not finite")

    monkeypatch.setattr(AnswerGenerator, "__call__", fails)
    with pytest.raises(HeadTrainingError, match="logits are not finite"):
        train_heads(job(model, tmp_path), Watched())
    assert [path.name for path in (tmp_path / WORK / "answers").iterdir()] == ["answers.json"]


def test_a_draft_vocabulary_holds_what_it_must_then_what_is_frequent() -> None:
    answer = Answer(Ask((1,), 0.0, 1), (9, 9, 9, 7, 7, 3), torch.zeros(6, 2))
    found = draft_vocab([answer], [50, 2], 4, VOCAB)
    assert found is not None
    assert found.tolist() == [2, 7, 9, 50]
    filled = draft_vocab([answer], [50], 6, VOCAB)
    assert filled is not None
    assert filled.tolist() == [0, 1, 3, 7, 9, 50]
    cut = draft_vocab([answer], [50, 2, 8], 2, VOCAB)
    assert cut is not None
    assert cut.tolist() == [2, 50]
    assert draft_vocab([answer], [50], 0, VOCAB) is None
    assert draft_vocab([answer], [50], VOCAB, VOCAB) is None


def test_an_mtp_module_is_trained_on_what_the_model_knew_of_the_text(model: Path, tmp_path: Path) -> None:
    """From the same answers; it goes on after a kill between the stages, and drafts in an engine afterwards."""
    watched = Watched()
    mtp = changed(dataclasses.replace(job(model, tmp_path / "mtp"), method="mtp"), unroll=2, num_heads=3)
    report = train_heads(mtp, watched)
    found = load_heads(tmp_path / "mtp")
    assert isinstance(found.heads, MtpModule)
    assert found.config.method == "mtp"
    assert found.config.mtp is not None
    assert (found.config.mtp.kv, found.config.num_heads) == ("base", 3)
    assert len(report.accuracy) == 3
    assert report.acceptance_length >= 1.0
    assert watched.stages["contexts"][-1] == (4, 4)
    (tmp_path / "mtp" / WORK / "answers" / "contexts-00001.safetensors").unlink()
    train_heads(mtp, Watched())
    again = load_heads(tmp_path / "mtp").heads.state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in found.heads.state_dict().items())
    (tmp_path / "mtp" / WORK / "answers" / "contexts-00001.safetensors").write_bytes(b"cut off")
    with pytest.raises(HeadTrainingError, match=r"contexts-00001.safetensors is damaged"):
        train_heads(mtp, Watched())


@pytest.mark.parametrize("method", ["medusa", "mtp"])
def test_heads_of_a_model_with_tied_embeddings(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma 3: windows, two tables of rotation, a vocabulary far larger than the draft vocabulary. Its embedding, most
    of its weights, is not copied for training; the heads draft in an engine afterwards."""
    folder = write_tiny_model(tmp_path / "tiny-gemma", tied_gemma3())
    given: list[tuple[OutputHead, Backend]] = []
    backends: list[Backend] = []

    def chosen(*arguments: Any) -> Backend:
        backends.append(choose_backend(*arguments))
        return backends[-1]

    def reduced(head: OutputHead, token_ids: torch.Tensor | None) -> DraftLmHead:
        given.append((head, backends[-1]))
        return DraftLmHead(head, token_ids)

    monkeypatch.setattr("engine.head_training.choose_backend", chosen)
    monkeypatch.setattr("engine.head_training.DraftLmHead", reduced)
    asked = changed(dataclasses.replace(job(folder, tmp_path / "heads"), method=method), unroll=2, num_heads=2)
    report = train_heads(asked, Watched())
    ((head, backend),) = given
    assert head.weight.data_ptr() == backend.loaded.model.get_input_embeddings().weight.data_ptr()
    found = load_heads(tmp_path / "heads")
    assert (found.config.method, found.config.vocab_size) == (method, 997)
    assert found.token_ids is not None
    assert len(found.token_ids) == 50
    assert report.accuracy[0][1] > 0.1, "the heads learned nothing"
    loaded = load_model(ModelConfig(str(folder)), torch.device("cpu"), None, lambda _: None)
    made = make_drafters(SpeculationConfig(heads=str(tmp_path / "heads")), loaded)
    assert made.methods == ("suffix", method)


def tied_gemma3() -> PreTrainedModel:
    """Random, and sure enough of its next token for heads to learn it."""
    torch.manual_seed(5)
    layers = ["sliding_attention", "full_attention"]
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    sizes |= {"num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 96, "query_pre_attn_scalar": 16}
    sizes |= {"vocab_size": 997, "sliding_window": 7, "layer_types": layers, "eos_token_id": EOS}
    config = Gemma3TextConfig(**sizes, tie_word_embeddings=True)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(5.0)
    return model


def test_a_module_with_a_kv_of_its_own_is_trained_served_and_trained_further(model: Path, tmp_path: Path) -> None:
    """Further with a KV of its own too, whatever the settings say."""
    first = changed(dataclasses.replace(job(model, tmp_path / "first"), method="mtp"), kv="own", epochs=1)
    assert train_heads(first, Watched()).acceptance_length >= 1.0
    before = load_heads(tmp_path / "first")
    assert before.config.mtp is not None
    assert before.config.mtp.kv == "own"
    drafting = make_drafters(
        SpeculationConfig(heads=str(tmp_path / "first")),
        load_model(ModelConfig(str(model)), torch.device("cpu"), torch.float32, lambda _: None),
    )
    assert drafting.methods == ("suffix", "mtp")
    assert isinstance(drafting.drafters[1], OwnKvDrafter)
    further = dataclasses.replace(job(model, tmp_path / "second"), start_from=tmp_path / "first")
    train_heads(changed(further, epochs=1, learning_rate=1e-9), Watched())
    after = load_heads(tmp_path / "second")
    assert after.config.mtp == before.config.mtp
    start = before.heads.state_dict()
    assert all(torch.allclose(tensor, start[name], atol=1e-3) for name, tensor in after.heads.state_dict().items())
    assert yaml.safe_load((tmp_path / "second" / "run.yaml").read_text())["training"]["kv"] == "own"


def test_streams_are_trained_served_and_trained_further(model: Path, tmp_path: Path) -> None:
    """Going on after a kill between the stages and in the middle of training; further with their own sizes."""
    watched = Watched()
    first = changed(
        dataclasses.replace(job(model, tmp_path / "first"), method="streaming"), stream_layers=1, rank=4, num_heads=3
    )
    report = train_heads(first, watched)
    before = load_heads(tmp_path / "first")
    assert isinstance(before.heads, StreamingHeads)
    assert (before.config.method, before.config.num_heads, before.config.rank) == ("streaming", 3, 4)
    assert before.config.streaming == StreamSizes(1, 48, 4, 2, 8)
    assert bool(before.heads.layers[0].q_proj.b.weight.any()), "what changes the weights was trained"
    assert len(report.accuracy) == 3
    assert report.acceptance_length >= 1.0
    assert watched.stages["contexts"][-1] == (4, 4)
    work = tmp_path / "first" / WORK
    shutil.copytree(work / "answers", tmp_path / "killed" / WORK / "answers")
    (tmp_path / "killed" / WORK / "answers" / "top1-00001.safetensors").unlink()
    with pytest.raises(Killed):
        train_heads(dataclasses.replace(first, folder=tmp_path / "killed"), Killing("training", 14))
    train_heads(dataclasses.replace(first, folder=tmp_path / "killed"), Watched())
    again = load_heads(tmp_path / "killed").heads.state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in before.heads.state_dict().items())
    drafters = make_drafters(
        SpeculationConfig(heads=str(tmp_path / "first")),
        load_model(ModelConfig(str(model)), torch.device("cpu"), torch.float32, lambda _: None),
    )
    assert drafters.methods == ("suffix", "streaming")
    further = dataclasses.replace(job(model, tmp_path / "second"), start_from=tmp_path / "first")
    train_heads(changed(further, learning_rate=1e-9, rank=8, stream_layers=3), Watched())
    after = load_heads(tmp_path / "second")
    assert (after.config.rank, after.config.streaming) == (4, before.config.streaming)
    start = before.heads.state_dict()
    assert all(torch.allclose(tensor, start[name], atol=1e-3) for name, tensor in after.heads.state_dict().items())
    too_many = changed(dataclasses.replace(job(model, tmp_path / "third"), method="streaming"), stream_layers=2)
    with pytest.raises(ModelLoadError, match="streams through 2 layers need a model of more"):
        train_heads(too_many, Watched())


def test_markov_heads_are_trained_served_and_trained_further(model: Path, tmp_path: Path) -> None:
    """Further with their own rank and draft vocabulary, whatever the settings and the answers say."""
    first = changed(dataclasses.replace(job(model, tmp_path / "first"), method="markov"), rank=8)
    report = train_heads(first, Watched())
    before = load_heads(tmp_path / "first")
    assert isinstance(before.heads, MarkovHeads)
    assert (before.config.method, before.config.num_heads, before.config.rank) == ("markov", 2, 8)
    assert before.token_ids is not None
    assert len(before.token_ids) == 50
    assert bool(before.heads.embedding.weight.any()), "the bias was trained"
    assert len(report.accuracy) == 2
    assert report.acceptance_length >= 1.0
    drafters = make_drafters(
        SpeculationConfig(heads=str(tmp_path / "first")),
        load_model(ModelConfig(str(model)), torch.device("cpu"), torch.float32, lambda _: None),
    )
    assert drafters.methods == ("suffix", "markov")
    other = Material(prompts(80, seed=2), [EOS])
    further = dataclasses.replace(job(model, tmp_path / "second", other), start_from=tmp_path / "first")
    train_heads(changed(further, learning_rate=1e-9, rank=4, draft_vocab=20), Watched())
    after = load_heads(tmp_path / "second")
    assert (after.config.method, after.config.rank) == ("markov", 8)
    assert after.token_ids is not None
    assert torch.equal(after.token_ids, before.token_ids)
    start = before.heads.state_dict()
    assert all(torch.allclose(tensor, start[name], atol=1e-3) for name, tensor in after.heads.state_dict().items())
    assert yaml.safe_load((tmp_path / "second" / "run.yaml").read_text())["training"]["draft_vocab"] == 50


def test_markov_heads_may_draft_the_whole_vocabulary(model: Path, tmp_path: Path) -> None:
    whole = changed(dataclasses.replace(job(model, tmp_path / "out"), method="markov"), draft_vocab=0, epochs=1)
    train_heads(whole, Watched())
    found = load_heads(tmp_path / "out")
    assert found.token_ids is None
    again = dataclasses.replace(job(model, tmp_path / "again"), start_from=tmp_path / "out")
    train_heads(changed(again, epochs=1), Watched())
    assert load_heads(tmp_path / "again").token_ids is None


def test_heads_are_trained_further(model: Path, tmp_path: Path) -> None:
    """Method and sizes are theirs, whatever the settings say; a checkpoint of a run from other heads is not gone on
    with."""
    train_heads(job(model, tmp_path / "first"), Watched())
    further = dataclasses.replace(job(model, tmp_path / "second"), start_from=tmp_path / "first")
    train_heads(changed(further, learning_rate=1e-9, num_heads=3, num_layers=2), Watched())
    before, after = load_heads(tmp_path / "first"), load_heads(tmp_path / "second")
    assert (after.config.method, after.config.num_heads, after.config.num_layers) == ("medusa", 2, 1)
    start = before.heads.state_dict()
    assert all(torch.allclose(tensor, start[name], atol=1e-3) for name, tensor in after.heads.state_dict().items())
    with pytest.raises(HeadTrainingError, match=r"checkpoint.pt belongs to a run with other"):
        train_heads(changed(job(model, tmp_path / "second"), learning_rate=1e-9), Watched())


def test_markov_heads_may_start_from_medusa_heads(model: Path, tmp_path: Path) -> None:
    """They keep the draft vocabulary, and gain a bias."""
    train_heads(job(model, tmp_path / "first"), Watched())
    other = Material(prompts(80, seed=2), [EOS])
    further = dataclasses.replace(
        job(model, tmp_path / "second", other), start_from=tmp_path / "first", method="markov"
    )
    train_heads(changed(further, learning_rate=1e-9, rank=8), Watched())
    before, after = load_heads(tmp_path / "first"), load_heads(tmp_path / "second")
    assert (after.config.method, after.config.rank, after.config.num_heads) == ("markov", 8, 2)
    assert before.token_ids is not None
    assert after.token_ids is not None
    assert torch.equal(after.token_ids, before.token_ids)
    found = after.heads.state_dict()
    for name, tensor in before.heads.state_dict().items():
        assert torch.allclose(found[f"medusa.{name}"], tensor, atol=1e-3)


@pytest.mark.parametrize("is_own", [True, False], ids=["own", "shared"])
def test_public_heads_are_trained_further(model: Path, tmp_path: Path, is_own: bool) -> None:
    """And become heads of our own format, their lm_heads with them."""
    public = tmp_path / "public"
    public.mkdir()
    weights = {"0.0.linear.weight": 0.1 * torch.randn(32, 32), "0.0.linear.bias": torch.zeros(32)}
    if is_own:
        weights["0.1.weight"] = torch.randn(VOCAB, 32)
    torch.save(weights, public / "medusa_lm_head.pt")
    (public / "config.json").write_text(json.dumps({"medusa_num_heads": 1, "medusa_num_layers": 1}))
    further = dataclasses.replace(job(model, tmp_path / "out"), start_from=public)
    report = train_heads(changed(further, draft_vocab=20, learning_rate=1e-3), Watched())
    found = load_heads(tmp_path / "out")
    assert report.acceptance_length >= 1.0
    assert (found.config.format, found.config.num_heads, found.config.vocab_size) == ("headlong", 1, VOCAB)
    assert found.token_ids is not None
    after = found.heads.state_dict()
    assert not torch.equal(after["heads.0.0.linear.weight"], weights["0.0.linear.weight"].half().float())
    assert ("lm_heads.0.weight" in after) == is_own
    if is_own:  # the rows of the draft vocabulary alone are trained
        moved = (after["lm_heads.0.weight"] != weights["0.1.weight"].half().float()).any(dim=1)
        assert moved.any()
        assert set(moved.nonzero().flatten().tolist()) <= set(found.token_ids.tolist())


def test_what_cannot_be_trained_further_is_said(model: Path, tmp_path: Path) -> None:
    missing = dataclasses.replace(job(model, tmp_path / "out"), start_from=tmp_path / "none")
    with pytest.raises(HeadTrainingError, match=str(tmp_path / "none")):
        train_heads(missing, Watched())
    train_heads(changed(job(model, tmp_path / "first"), epochs=1), Watched())
    other = dataclasses.replace(job(model, tmp_path / "out"), start_from=tmp_path / "first", method="mtp")
    with pytest.raises(HeadTrainingError, match="holds heads of the method medusa, not mtp"):
        train_heads(other, Watched())
