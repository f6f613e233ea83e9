"""The settings of ``headlong train``: one YAML file and overrides, checked like the server's."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal

from pydantic import Field

from engine.config import DEFAULT_LORA, EngineConfig, ModelConfig, TrainingConfig
from server.config import Count, ModelSection, Section, Size

_DEFAULT = TrainingConfig()
_ANSWERS, _TRAINING = _DEFAULT.answers, _DEFAULT.training
Temperature = Annotated[float, Field(gt=0, le=2, allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0, le=1)]


class MachineSection(Section):
    """``engine``: what the answers are written with; null means chosen at load."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    kv_cache_memory: Size | None = None
    max_model_len: Count | None = None
    num_threads: Count | None = None


class PromptSection(Section):
    """``prompts``. file: JSON lines or text, one prompt a line, or a folder of code; null is the built-in recipe. seed:
    of the sample."""

    file: str | None = None
    seed: int = 0


class AnswerSection(Section):
    """``answers``: what is written to train on (``heads.settings.AnswerSettings``)."""

    tokens: Count = _ANSWERS.tokens
    max_tokens: Annotated[int, Field(ge=2)] = _ANSWERS.max_tokens
    temperatures: Annotated[tuple[Temperature, ...], Field(strict=False, min_length=1)] = _ANSWERS.temperatures
    shard_size: Count = _ANSWERS.shard_size
    concurrency: Count = _ANSWERS.concurrency


class TrainingSection(Section):
    """``training``: one run over the answers (``heads.settings.TrainSettings``). base: whether and how the base
    model is trained with the heads."""

    base: Literal["lora"] | None = None
    num_heads: Annotated[int, Field(ge=1, le=16)] = _TRAINING.num_heads
    num_layers: Annotated[int, Field(ge=1, le=8)] = _TRAINING.num_layers
    rank: Annotated[int, Field(ge=1, le=4096)] = _TRAINING.rank
    stream_layers: Annotated[int, Field(ge=1, le=64)] = _TRAINING.stream_layers
    unroll: Annotated[int, Field(ge=1, le=16)] = _TRAINING.unroll
    kv: Literal["base", "own"] = _TRAINING.kv
    draft_vocab: Annotated[int, Field(ge=0)] = _TRAINING.draft_vocab
    epochs: Count = _TRAINING.epochs
    batch_tokens: Count = _TRAINING.batch_tokens
    learning_rate: Annotated[float, Field(gt=0, le=1)] = _TRAINING.learning_rate
    weight_decay: Annotated[float, Field(ge=0, le=1)] = _TRAINING.weight_decay
    depth_decay: Share = _TRAINING.depth_decay
    warmup: Annotated[float, Field(ge=0, le=1)] = _TRAINING.warmup
    clip: Annotated[float, Field(gt=0, allow_inf_nan=False)] = _TRAINING.clip
    seed: Annotated[int, Field(ge=0)] = _TRAINING.seed
    checkpoint_steps: Count = _TRAINING.checkpoint_steps


class LoraSection(Section):
    """``lora``: of the base model, where ``training.base`` asks for one (``heads.settings.LoraSettings``)."""

    rank: Annotated[int, Field(ge=1, le=1024)] = DEFAULT_LORA.rank
    alpha: Count = DEFAULT_LORA.alpha
    learning_rate: Annotated[float, Field(gt=0, le=1)] = DEFAULT_LORA.learning_rate
    base_weight: Annotated[float, Field(ge=0, allow_inf_nan=False)] = DEFAULT_LORA.base_weight
    heads_first: Annotated[float, Field(ge=0, lt=1)] = DEFAULT_LORA.heads_first


class TrainConfig(Section):
    """Everything a training run is told. start_from: a folder of heads to train further. method: null is theirs, or
    medusa."""

    method: Literal["medusa", "markov", "mtp", "streaming"] | None = None
    start_from: str | None = None
    model: ModelSection = ModelSection()
    engine: MachineSection = MachineSection()
    prompts: PromptSection = PromptSection()
    answers: AnswerSection = AnswerSection()
    training: TrainingSection = TrainingSection()
    lora: LoraSection = LoraSection()

    def to_engine_settings(self) -> tuple[ModelConfig, EngineConfig, TrainingConfig]:
        """The engine's share."""
        settings = dict(self.training)
        base = settings.pop("base")
        training = TrainingConfig(
            answers=dataclasses.replace(_ANSWERS, **dict(self.answers)),
            training=dataclasses.replace(_TRAINING, **settings),
            lora=None if base is None else dataclasses.replace(DEFAULT_LORA, **dict(self.lora)),
        )
        return ModelConfig(**dict(self.model)), EngineConfig(**dict(self.engine)), training
