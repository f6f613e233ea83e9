"""Evaluating heads of both methods on a tiny model: every way of drafting writes the same text, each as it says."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
import yaml
from tiny_engine import VOCAB, tiny_model
from tiny_folder import write_tiny_model
from tiny_heads import random_heads, random_mtp

from engine.config import EngineConfig, ModelConfig
from engine.errors import HeadTrainingError, ModelLoadError
from engine.heads_report import EvaluationJob, HeadsReport, Shape, evaluate_heads
from engine.loading import load_model
from heads.checkpoint import RUN_FILE, save_heads
from heads.config import BaseModel, HeadsConfig

SHAPES = (Shape("chain-2", 2, is_chain=True), Shape("tree-8", 8))
PROMPTS = {"some": [(3, 4, 5), (6, 7)], "others": [(9, 8), tuple(range(1, 61)) * 2]}


class Told:
    def __init__(self) -> None:
        self.stages: list[tuple[int, int]] = []

    def line(self, text: str) -> None:
        assert "\n" not in text

    def advance(self, stage: str, done: int, total: int, note: str) -> None:
        self.stages.append((done, total))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "tiny-model")


@pytest.fixture(autouse=True)
def _step_times_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def write_heads(folder: Path, model: Path, method: str) -> Path:
    digest = load_model(ModelConfig(str(model)), torch.device("cpu"), None, lambda _: None).digest
    heads = random_mtp(tiny_model("llama", torch.float32)) if method == "mtp" else random_heads()
    config = HeadsConfig(
        method,
        3,
        32,
        VOCAB,
        BaseModel("tiny-model", digest),
        baseline={"held-out": 1.5},
        mtp=heads.shape if method == "mtp" else None,
    )
    run = yaml.safe_dump({"result": {"accuracy": [{"top_1": 0.5, "top_3": 0.75}]}})
    save_heads(folder, heads, config, None, run)
    return folder


def job(model: Path, folder: Path, prompts: Mapping[str, Sequence[tuple[int, ...]]] | None = None) -> EvaluationJob:
    engine = EngineConfig(device="cpu", kv_cache_memory=4 << 20, max_num_seqs=4, max_num_batched_tokens=64)
    given = PROMPTS if prompts is None else prompts
    return EvaluationJob(
        ModelConfig(str(model)), folder, lambda _: given, 12, temperatures=(0.0, 0.8), shapes=SHAPES, engine=engine
    )


@pytest.mark.parametrize("method", ["medusa", "mtp"])
def test_every_way_writes_the_same_text_and_keeps_its_shape(method: str, model: Path, tmp_path: Path) -> None:
    told = Told()
    report = evaluate_heads(job(model, write_heads(tmp_path / "heads", model, method)), told)
    ways = {(cell.dataset, cell.temperature, cell.is_coupled, cell.shape.name) for cell in report.cells}
    assert len(ways) == len(report.cells) == 2 * 3 * 2
    assert told.stages == [(done, 12) for done in range(13)]
    check_texts(report)
    check_shapes(report)
    assert report.heads["method"] == method
    assert report.heads["held_out_length"] == 1.5
    assert report.heads["held_out_accuracy"] == [{"top_1": 0.5, "top_3": 0.75}]
    assert report.model["name"] == "tiny-model"
    assert {1, 8, 48} <= report.step_seconds.keys()


def check_texts(report: HeadsReport) -> None:
    texts: dict[tuple[str, float], set[tuple[tuple[int, ...], ...]]] = {}
    for cell in report.cells:
        text = tuple(tuple(answer.tokens) for answer in cell.answers)
        texts.setdefault((cell.dataset, cell.temperature), set()).add(text)
    assert all(len(found) == 1 for found in texts.values())
    (greedy,), (sampled,) = texts["some", 0.0], texts["some", 0.8]
    assert greedy != sampled
    ((only,),) = texts["others", 0.0]  # the other prompt leaves no room
    assert only


def check_shapes(report: HeadsReport) -> None:
    deepest = 0
    for cell in report.cells:
        assert any(sum(answer.nodes) for answer in cell.answers)
        for answer in cell.answers:
            assert len(answer.tokens) == len(answer.depths)
            assert max(answer.nodes) <= cell.shape.nodes
            assert max(answer.depths) <= min(3, cell.shape.nodes)
            # A forward gives one token of its own, but for the last, which may end within its draft.
            own = answer.depths.count(0)
            assert len(answer.nodes) - 1 <= own <= len(answer.nodes)
            deepest = max(deepest, *answer.depths)
        assert sum(bucket.nodes for bucket in cell.buckets) > 0
        assert cell.verify_seconds > 0
        if cell.times is not None:
            assert 0 < cell.times.draft < cell.times.step
    assert deepest > 0, "nothing was ever accepted, so nothing was shown"


def test_what_cannot_be_evaluated_is_one_sentence(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="is not a folder of heads") as refused:
        evaluate_heads(job(model, tmp_path / "absent"), Told())
    assert "\n" not in str(refused.value)
    heads = write_heads(tmp_path / "heads", model, "medusa")
    with pytest.raises(HeadTrainingError, match="no prompt of long leaves room for 12 tokens"):
        evaluate_heads(job(model, heads, {"long": [tuple(range(1, 61)) * 2]}), Told())


@pytest.mark.parametrize("text", [None, "a: [", "result: 3", "result: {accuracy: [{top_1: high}]}"])
def test_heads_are_whole_without_run_yaml(text: str | None, model: Path, tmp_path: Path) -> None:
    heads = write_heads(tmp_path / "heads", model, "medusa")
    if text is None:
        (heads / RUN_FILE).unlink()
    else:
        (heads / RUN_FILE).write_text(text)
    few = dataclasses.replace(job(model, heads, {"one": [(3, 4)]}), temperatures=(0.0,), shapes=SHAPES[:1])
    assert evaluate_heads(few, Told()).heads["held_out_accuracy"] == []
