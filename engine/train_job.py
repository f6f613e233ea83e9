"""What a training run is told, and what it says."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from engine.config import EngineConfig, ModelConfig, TrainingConfig
from heads.mtp import MtpModule
from heads.streaming import StreamingHeads

if TYPE_CHECKING:
    from engine.changed_model import Change


WORK = "work"  # inside the folder of heads: answers, checkpoint and log of the run
# Whose heads attend to the text, so that training reads contexts of the answers.
CONTEXT_METHODS = (MtpModule.method, StreamingHeads.method)
MODEL = "model"  # inside the folder of heads: the base model, where it was trained too


@dataclass(frozen=True, slots=True)
class Material:
    """prompts: token ids, chat template included. always_drafted: ids that a reduced draft vocabulary must hold.
    sources: what each prompt is counted under; empty where they came without."""

    prompts: Sequence[tuple[int, ...]]
    always_drafted: Sequence[int]
    sources: Sequence[str] = ()


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
    "medusa", "markov", "mtp" or "streaming"; None: that of start_from, or "medusa". start_from: a folder of heads to
    train further, whose sizes go before those of the settings; markov heads may start from medusa ones."""

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
    on held-out prompts. change: of the base model, if it was trained too; all figures are then the changed model's.
    quantization: of the weights that were measured."""

    positions: int
    accuracy: Sequence[Mapping[int, float]]
    acceptance_length: float
    quantization: str
    change: Change | None = None
