"""Runs of ``headlong train`` over a tiny model: settings, prompts, and somebody who watches."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

from tiny_engine import EOS

from engine.config import EngineConfig, ModelConfig, TrainingConfig
from engine.train_job import Material, TrainJob
from heads.settings import AnswerSettings, TrainSettings

SETTINGS = TrainingConfig(
    AnswerSettings(tokens=900, max_tokens=16, shard_size=20, concurrency=16),
    TrainSettings(num_heads=2, num_layers=1, draft_vocab=50, epochs=2, batch_tokens=64, checkpoint_steps=10),
)


def prompts(count: int, seed: int = 1) -> list[tuple[int, ...]]:
    draw = random.Random(seed)
    return [tuple(draw.randrange(1, EOS) for _ in range(draw.randint(3, 8))) for _ in range(count)]


class Watched:
    """Remembers what it is told."""

    def __init__(self) -> None:
        self.stages: dict[str, list[tuple[int, int]]] = {}
        self.lines: list[str] = []

    def line(self, text: str) -> None:
        assert "\n" not in text
        self.lines.append(text)

    def advance(self, stage: str, done: int, total: int, note: str) -> None:
        self.stages.setdefault(stage, []).append((done, total))


def job(model: Path, folder: Path, material: Material | None = None) -> TrainJob:
    given = material or Material(prompts(80), [EOS])
    engine = EngineConfig(device="cpu", kv_cache_memory=8 << 20)
    return TrainJob(ModelConfig(str(model)), folder, lambda path: given, engine, SETTINGS, {"command": ["headlong"]})


def changed(whole: TrainJob, **changes: object) -> TrainJob:
    """Settings of the answers or of the training, by name."""
    answers = {name: value for name, value in changes.items() if hasattr(SETTINGS.answers, name)}
    training = {name: value for name, value in changes.items() if name not in answers}
    settings = TrainingConfig(
        dataclasses.replace(SETTINGS.answers, **answers),  # type: ignore[arg-type]
        dataclasses.replace(SETTINGS.training, **training),  # type: ignore[arg-type]
    )
    return dataclasses.replace(whole, settings=settings)
