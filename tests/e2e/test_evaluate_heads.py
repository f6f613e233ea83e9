"""``headlong heads evaluate`` from the command line: the report it leaves, and what it refuses in one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_engine import VOCAB
from tiny_folder import write_prompts, write_tiny_model
from tiny_heads import random_heads

from engine.config import ModelConfig
from engine.loading import load_model
from heads.checkpoint import save_heads
from heads.config import BaseModel, HeadsConfig


def evaluate(*arguments: str | Path, cache: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "server", "heads", "evaluate", *map(str, arguments)]
    environment = os.environ | {"XDG_CACHE_HOME": str(cache)}
    return subprocess.run(command, capture_output=True, text=True, timeout=250, env=environment)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "tiny-model")


@pytest.fixture(scope="module")
def heads(model: Path) -> Path:
    digest = load_model(ModelConfig(str(model)), torch.device("cpu"), None, lambda _: None).digest
    config = HeadsConfig("medusa", 3, 32, VOCAB, BaseModel("tiny-model", digest))
    folder = model.parent / "heads"
    save_heads(folder, random_heads(), config, None, "result: {}\n")
    return folder


def test_the_report(model: Path, heads: Path, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl", 2)
    options = ("--n", "2", "--max-tokens", "8", "--dataset", prompts, "--out", tmp_path / "out")
    result = evaluate(heads, "--model", model, *options, cache=tmp_path / "cache")
    assert result.returncode == 0, result.stderr
    assert "speed-up" in result.stdout
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["plot.svg", "report.json", "report.md"]
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    ways = [(row["temperature"], row["coupled"], row["shape"]) for row in report["rows"]]
    assert len(set(ways)) == len(ways) == 5 * 5
    assert {row["tokens"] for row in report["rows"] if row["temperature"] == 0} == {16}
    assert all(row["tau"] >= 1 for row in report["rows"])
    assert len(report["best"]) == 5
    assert "### " + str(prompts) in (tmp_path / "out" / "report.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((), "is not a folder of heads"),
        (("--dataset", "/absent/prompts.txt"), "neither a known dataset"),
        (("--out", "/absent/folder/out"), "its folder does not exist"),
    ],
)
def test_what_cannot_be_done_is_one_line(arguments: tuple[str, ...], reason: str, tmp_path: Path) -> None:
    options = arguments if "--dataset" in arguments else ("--dataset", "edits", *arguments)
    result = evaluate(tmp_path / "absent", *options, cache=tmp_path)
    assert result.returncode == 1
    assert result.stdout == ""
    (line,) = [line for line in result.stderr.splitlines() if line.strip()]
    assert line.startswith("headlong: ")
    assert reason in line
