"""The settings of ``headlong train``: the shipped file says every default, and a refusal is one line."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from engine.config import EngineConfig, ModelConfig, TrainingConfig
from heads.settings import LoraSettings, TrainSettings
from server.config import load_settings
from server.config_errors import ConfigError, dotted_keys
from server.training.config import PromptSection, TrainConfig
from server.training.prompts import PromptError
from server.training.selection import training_prompts

FILE = Path(__file__).parents[2] / "configs" / "train" / "default.yaml"


def dotted(tree: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in tree.items():
        yield prefix + key
        if isinstance(value, dict):
            yield from dotted(value, f"{prefix}{key}.")


def test_the_shipped_file_says_every_default() -> None:
    assert load_settings(TrainConfig, FILE) == load_settings(TrainConfig)
    assert set(dotted(yaml.safe_load(FILE.read_text()))) == set(dotted_keys(TrainConfig))


def test_defaults_are_the_engines_own() -> None:
    assert load_settings(TrainConfig).to_engine_settings() == (ModelConfig(), EngineConfig(), TrainingConfig())


def test_every_setting_reaches_the_engine() -> None:
    overrides = [
        "model.dtype=float32",
        "engine.kv_cache_memory=1GiB",
        "answers.temperatures=[0.5, 1]",
        "answers.tokens=7",
        "training.num_heads=2",
        "training.seed=9",
        "training.base=lora",
        "lora.rank=4",
        "lora.base_weight=2",
        "training.kv=own",
    ]
    model, engine, training = load_settings(TrainConfig, FILE, overrides, {"model.path": "m"}).to_engine_settings()
    assert (model.path, model.dtype) == ("m", "float32")
    assert engine.kv_cache_memory == 2**30
    assert training.answers.temperatures == (0.5, 1.0)
    assert training.answers.tokens == 7
    assert training.training == TrainSettings(num_heads=2, seed=9, kv="own")
    assert training.lora == LoraSettings(rank=4, base_weight=2.0)
    assert load_settings(TrainConfig, FILE, ["lora.rank=4"]).to_engine_settings()[2].lora is None


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("training.epoch=2", ["training.epoch: unknown key", "did you mean training.epochs?"]),
        ("speculation.enabled=true", ["speculation: unknown key"]),
        ("method=eagle", ["method", "'eagle'", "'medusa'"]),
        ("training.epochs=0", ["training.epochs", "0", "greater than or equal to 1"]),
        ("training.epochs=1.5", ["training.epochs", "1.5", "valid integer"]),
        ("training.num_heads=17", ["training.num_heads", "less than or equal to 16"]),
        ("training.num_layers=0", ["training.num_layers", "greater than or equal to 1"]),
        ("training.kv=both", ["training.kv", "'both'", "'own'"]),
        ("training.draft_vocab=-1", ["training.draft_vocab", "greater than or equal to 0"]),
        ("training.learning_rate=0", ["training.learning_rate", "greater than 0"]),
        ("training.learning_rate=.nan", ["training.learning_rate", "nan"]),
        ("training.clip=.inf", ["training.clip", "finite"]),
        ("training.depth_decay=1.1", ["training.depth_decay", "less than or equal to 1"]),
        ("training.warmup=-0.1", ["training.warmup", "greater than or equal to 0"]),
        ("training.weight_decay=2", ["training.weight_decay", "less than or equal to 1"]),
        ("training.seed=-1", ["training.seed", "greater than or equal to 0"]),
        ("training.checkpoint_steps=0", ["training.checkpoint_steps"]),
        ("training.base=full", ["training.base", "'full'", "'lora'"]),
        ("lora.rank=0", ["lora.rank", "greater than or equal to 1"]),
        ("lora.base_weight=-1", ["lora.base_weight", "greater than or equal to 0"]),
        ("lora.heads_first=1", ["lora.heads_first", "less than 1"]),
        ("answers.temperatures=[]", ["answers.temperatures", "at least 1 item"]),
        ("answers.temperatures=[0]", ["answers.temperatures.0", "greater than 0"]),
        ("answers.temperatures=[.nan]", ["answers.temperatures.0"]),
        ("answers.max_tokens=1", ["answers.max_tokens", "greater than or equal to 2"]),
        ("answers.tokens=many", ["answers.tokens", "'many'", "valid integer"]),
        ("prompts.file=5", ["prompts.file", "5", "valid string"]),
        ("engine.kv_cache_memory=2XB", ["engine.kv_cache_memory", "'2XB'", "GiB"]),
    ],
)
def test_a_refusal_is_one_line_with_the_key(override: str, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings(TrainConfig, None, [override])
    message = str(caught.value)
    assert "\n" not in message
    assert [part for part in parts if part not in message] == []


def test_benchmark_prompts_are_not_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Dataset:
        prompts = ("Count all the words in this sentence and name the longest",)

    monkeypatch.setattr("server.training.selection.load_dataset", lambda name: Dataset)
    file = tmp_path / "prompts.txt"
    file.write_text("count ALL the words in this sentence and stop\nWhat is a word?\n")
    chosen = training_prompts(PromptSection(file=str(file)))
    assert [prompt.text for prompt in chosen.prompts] == ["What is a word?"]
    assert chosen.facts["selection"]["of_benchmarks"] == 1
    assert chosen.facts["benchmarks"] == {"mt-bench": 1, "humaneval": 1, "edits": 1}
    with pytest.raises(PromptError, match=r"absent\.txt"):
        training_prompts(PromptSection(file=str(tmp_path / "absent.txt")))


def test_a_file_of_benchmark_prompts_alone_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Dataset:
        prompts = ("What is a word?",)

    monkeypatch.setattr("server.training.selection.load_dataset", lambda name: Dataset)
    file = tmp_path / "prompts.txt"
    file.write_text("What is a word?\n")
    with pytest.raises(PromptError, match="benchmark"):
        training_prompts(PromptSection(file=str(file)))


def headlong_train(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "server", "train", *arguments], capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize(
    ("arguments", "status", "part"),
    [
        (["--set", "training.epoch=2"], 2, "unknown key"),
        (["--method", "eagle"], 2, "'medusa'"),
        (["--config", "absent.yaml"], 2, "absent.yaml"),
        (["--prompts", "absent.jsonl"], 1, "absent.jsonl"),
    ],
)
def test_the_command_refuses_in_one_line_and_writes_nothing(
    tmp_path: Path, arguments: list[str], status: int, part: str
) -> None:
    result = headlong_train("--out", str(tmp_path / "out"), *arguments)
    assert result.stdout == ""
    assert result.stderr.startswith("headlong: ")
    assert result.stderr.count("\n") == 1
    assert part in result.stderr
    assert result.returncode == status
    assert not (tmp_path / "out").exists()


def test_the_command_wants_a_folder() -> None:
    result = headlong_train()
    assert result.returncode == 2
    assert "--out" in result.stderr
