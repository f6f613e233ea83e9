"""``headlong train`` from the command line on a tiny random model: killed, resumed, served."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import yaml
from filelock import FileLock
from running_server import running_server
from tiny_engine import Sizes, tiny_core
from tiny_folder import write_prompts, write_tiny_model

from engine.config import ModelConfig
from engine.draft_test import measure_acceptance
from engine.loading import load_model
from engine.loading.heads import output_head
from engine.sampling_params import SamplingParams
from engine.spec_decode.medusa import MedusaDrafter
from engine.train_job import WORK
from heads.checkpoint import load_heads
from heads.data import held_out
from heads.lm_head import DraftLmHead
from heads.medusa import MedusaHeads
from heads.train import CHECKPOINT_FILE, LOG_FILE

SETTINGS = {
    "answers.tokens": 6000,
    "answers.max_tokens": 32,
    "answers.shard_size": 64,
    "answers.concurrency": 32,
    "engine.kv_cache_memory": "32MiB",
    "engine.num_threads": 1,
    "training.num_heads": 3,
    "training.num_layers": 1,
    "training.draft_vocab": 50,
    "training.epochs": 8,
    "training.batch_tokens": 64,
    "training.checkpoint_steps": 25,
}
Folders = tuple[Path, Path]


def train_command(folders: Folders, out: Path, **overrides: Any) -> list[str]:
    model, prompts = folders
    settings = [f"--set={key}={value}" for key, value in (SETTINGS | overrides).items()]
    return [
        sys.executable,
        "-m",
        "server",
        "train",
        str(model),
        "--out",
        str(out),
        "--prompts",
        str(prompts),
        *settings,
    ]


def train(folders: Folders, out: Path, **overrides: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(train_command(folders, out, **overrides), capture_output=True, text=True, timeout=200)


def train_until(folders: Folders, out: Path, reached: Callable[[], bool]) -> None:
    """Starts the run and kills it, as a power cut would, once ``reached``."""
    process = subprocess.Popen(
        train_command(folders, out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    deadline = time.monotonic() + 120
    while not reached():
        assert process.poll() is None, "the run ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    root = tmp_path_factory.mktemp("tiny")
    return write_tiny_model(root / "tiny-model"), write_prompts(root / "prompts.jsonl", 400)


@pytest.fixture(scope="module")
def trained(folders: Folders) -> Path:
    out = folders[0].parent / "heads"
    result = train(folders, out)
    assert result.returncode == 0, result.stderr
    assert "acceptance length of the heads alone" in result.stdout
    return out


def test_what_a_run_leaves(trained: Path) -> None:
    assert sorted(path.name for path in trained.iterdir()) == [
        "config.json",
        "data_card.md",
        "draft_vocab.json",
        "heads.safetensors",
        "run.yaml",
        WORK,
    ]
    run = yaml.safe_load((trained / "run.yaml").read_text())
    assert run["command"][1] == "train"
    assert run["prompts"][0]["source"] == "prompts.jsonl"
    assert run["data"]["training_tokens"] > 4000
    given = trained.parent / "prompts.jsonl"
    assert run["given"]["sha256"] == hashlib.sha256(given.read_bytes()).hexdigest()
    card = (trained / "data_card.md").read_text()
    assert f"file `prompts.jsonl`, SHA-256 `{run['given']['sha256']}`" in card
    assert f"| prompts.jsonl | {run['selection']['kept']} | {run['data']['answers']} |" in card
    for name in ("data_card.md", "run.yaml", "config.json"):
        assert str(trained.parent) not in (trained / name).read_text(), "what is given on must not tell of a machine"
    assert run["result"]["acceptance_length"]["held-out"] > 1.3
    config = load_heads(trained).config
    assert config.base_model.name == "tiny-model"
    assert all(held_out(prompt) for prompt in config.self_test)
    assert config.self_test


def test_a_run_killed_twice_ends_as_an_undisturbed_one(folders: Folders, trained: Path) -> None:
    out = trained.parent / "killed"
    answers = out / WORK / "answers"
    train_until(folders, out, lambda: (answers / "answers-00000.safetensors").exists())
    assert not (answers / "answers-00003.safetensors").exists(), "killed too late to show anything"
    train_until(folders, out, lambda: (out / WORK / CHECKPOINT_FILE).exists())
    assert not (out / "config.json").exists()
    result = train(folders, out)
    assert result.returncode == 0, result.stderr
    for name in ("heads.safetensors", "config.json", "draft_vocab.json"):
        assert (out / name).read_bytes() == (trained / name).read_bytes(), name
    steps = [json.loads(line)["step"] for line in (out / WORK / LOG_FILE).read_text().splitlines()]
    assert steps == list(range(1, len(steps) + 1))


def test_trained_heads_accept_more_than_untrained_ones(folders: Folders, trained: Path) -> None:
    loaded = load_model(ModelConfig(str(folders[0])), torch.device("cpu"), None, lambda _: None)
    found = load_heads(trained)
    prompts = [tuple(range(start, start + 5)) for start in range(1, 21)]
    lengths = []
    for heads in (found.heads, MedusaHeads(found.config.hidden_size, found.config.num_heads)):
        drafter = MedusaDrafter(heads.eval(), DraftLmHead(output_head(loaded.model), found.token_ids))
        core = tiny_core("llama", [drafter], Sizes(max_draft_tokens=4))
        lengths.append(measure_acceptance(core, prompts, SamplingParams(temperature=0.0, max_tokens=30)).length)
    assert lengths[0] > 1.3
    assert lengths[0] > lengths[1] + 0.15


def test_the_heads_are_served_and_change_no_answer(folders: Folders, trained: Path) -> None:
    with running_server(str(folders[0]), "--heads", str(trained), "--set", "engine.num_threads=1") as server:
        assert httpx.get(f"{server.url}/v1/models").json()["data"][0]["methods"] == ["suffix", "medusa"]
        for temperature in (0.0, 0.9):
            for start in (1, 7, 30):
                body = {
                    "prompt": [start, start + 1, start + 2],
                    "max_tokens": 40,
                    "seed": 5,
                    "temperature": temperature,
                }
                answers = []
                for speculation in ({"method": "medusa", "detail": True}, {"enabled": False}):
                    fields = {"return_token_ids": True, "speculation": speculation}
                    response = httpx.post(f"{server.url}/v1/completions", json=body | fields, timeout=60)
                    assert response.status_code == 200, response.text
                    answers.append(response.json()["choices"][0])
                assert answers[0]["token_ids"] == answers[1]["token_ids"]
                assert {entry["method"] for entry in answers[0]["accepted_by"]} <= {"medusa", None}
    # Whether a draft of so small a model pays is for the step times to say, which a busy machine blurs; the self-test
    # verifies them all.
    (line,) = [line for line in server.log if "self-test of the medusa heads" in line]
    assert float(line.rsplit(" ", 1)[1]) > 1.2


@pytest.mark.parametrize(
    ("overrides", "status", "reason"),
    [
        ({"training.epoch": 2}, 2, "training.epoch: unknown key; did you mean training.epochs?"),
        ({"answers.max_tokens": 24}, 1, "holds answers of another run (max_tokens was 32, is 24)"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    folders: Folders, trained: Path, overrides: dict[str, Any], status: int, reason: str
) -> None:
    result = train(folders, trained, **overrides)
    assert result.returncode == status
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("headlong: ")
    assert reason in result.stderr.replace("\n", " ")


def test_an_estimate_is_told_and_nothing_is_trained(folders: Folders, tmp_path: Path) -> None:
    out = tmp_path / "estimated"
    result = subprocess.run(
        [*train_command(folders, out), "--estimate"], capture_output=True, text=True, timeout=200, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == ""
    assert "Estimate from a measured slice" in result.stderr
    assert "on disk" in result.stderr
    assert [path.name for path in out.iterdir()] == [WORK]
    assert not (out / WORK / LOG_FILE).exists()


def test_a_missing_model_is_one_line(folders: Folders, tmp_path: Path) -> None:
    result = train((tmp_path / "absent-model", folders[1]), tmp_path / "out")
    assert result.returncode == 1
    assert result.stdout == ""
    (line,) = [line for line in result.stderr.splitlines() if line.strip()]
    assert line.startswith("headlong: ")
    assert "absent-model" in line


def test_a_folder_in_use_is_one_line(folders: Folders, tmp_path: Path) -> None:
    """The lock holds between processes, and is free again once its holder is killed."""
    (tmp_path / WORK).mkdir()
    with FileLock(tmp_path / WORK / "lock"):
        result = train(folders, tmp_path)
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    assert "another run is at work" in result.stderr.replace("\n", " ")


def test_prompts_that_cannot_be_read_are_one_line(folders: Folders, tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    for path in (empty, tmp_path / "absent.jsonl"):
        result = train((folders[0], path), tmp_path / "out")
        assert result.returncode == 1
        assert result.stderr.startswith("headlong: ")
        assert str(path.name) in result.stderr


def test_the_model_is_trained_with_its_heads_killed_and_served_under_its_new_name(
    folders: Folders, tmp_path: Path
) -> None:
    out = tmp_path / "joint"
    # A run of its own settings: the base learns from the first step on, so that the kill falls into the joint part.
    settings = {"lora.heads_first": 0, "training.epochs": 2, "training.checkpoint_steps": 10}
    command = [*train_command(folders, out, **settings), "--train-base", "lora"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    deadline = time.monotonic() + 120
    while not (out / WORK / CHECKPOINT_FILE).exists():
        assert process.poll() is None, "the run ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    result = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stderr
    said = " ".join(result.stdout.split())
    assert "tiny-model-headlong-lora is a new model, not tiny-model." in said
    command_line = f"headlong serve {out / 'model'} --heads {out}"
    assert command_line.replace(" ", "") in said.replace(" ", ""), "lines are broken anywhere"
    lines = [json.loads(line) for line in (out / WORK / LOG_FILE).read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    assert all(line["kl"] is not None for line in lines)
    with running_server(str(out / "model"), "--heads", str(out), "--set", "engine.num_threads=1") as server:
        (listed,) = httpx.get(f"{server.url}/v1/models").json()["data"]
        assert (listed["id"], listed["methods"]) == ("tiny-model-headlong-lora", ["suffix", "medusa"])
        texts = []
        for speculation in ({"method": "medusa"}, {"enabled": False}):
            body = {"prompt": [4, 5, 6], "max_tokens": 40, "temperature": 0.8, "seed": 3, "speculation": speculation}
            texts.append(httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()["choices"][0]["text"])
        assert texts[0] == texts[1]
        assert texts[0]
    refused = subprocess.run(
        [sys.executable, "-m", "server", "serve", str(folders[0]), "--heads", str(out), "--port", "0"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert refused.returncode == 1
    assert "were trained on tiny-model-headlong-lora, not on tiny-model" in refused.stderr
