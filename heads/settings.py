"""The settings of a training run: plain frozen dataclasses, already validated by whoever read the user's file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

KvSource = Literal["base", "own"]


@dataclass(frozen=True, slots=True)
class AnswerSettings:
    """The answers to train on.

    tokens: how many answer tokens are wanted in all. max_tokens: of one answer. temperatures: of the sampled half; the
    other half is greedy. shard_size: answers stored at once. concurrency: answers written side by side.
    """

    tokens: int = 300_000
    max_tokens: int = 192
    temperatures: tuple[float, ...] = (0.7, 0.8, 0.9, 1.0)
    shard_size: int = 256
    concurrency: int = 64


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """One training run.

    num_heads: Medusa or Markov heads or streams, or how deep an MTP module drafts; unroll: of those depths, the first
    ones trained, from which the deeper follow. num_layers: residual blocks of a Medusa or Markov head. rank: of Markov
    heads' bias, or of what streams change weights by. stream_layers: how many of the model's uppermost layers streams
    run through. kv: whose keys and values an MTP module reads.
    draft_vocab: tokens the heads may draft, 0 for the whole vocabulary. batch_tokens: positions of one step at least
    (answers are kept whole).
    depth_decay: head k's loss weighs depth_decay ** (k - 1). warmup: share of the steps before the learning rate, which
    then falls as a cosine, is at its highest. checkpoint_steps: steps between two checkpoints.
    """

    num_heads: int = 4
    num_layers: int = 2
    rank: int = 64
    stream_layers: int = 4
    unroll: int = 3
    kv: KvSource = "base"
    draft_vocab: int = 8192
    epochs: int = 3
    batch_tokens: int = 128
    learning_rate: float = 2e-3
    weight_decay: float = 0.0
    depth_decay: float = 0.8
    warmup: float = 0.05
    clip: float = 1.0
    seed: int = 0
    checkpoint_steps: int = 200


@dataclass(frozen=True, slots=True)
class LoraSettings:
    """A LoRA (arXiv 2106.09685) of the base model that is trained together with the heads (``heads.joint``).

    rank, alpha: a weight changes by alpha / rank * B A. learning_rate: at its highest. base_weight: of the term that
    keeps the model close to what it was, beside the heads' losses. heads_first: share of the steps before the base
    begins to learn.
    """

    rank: int = 16
    alpha: int = 32
    learning_rate: float = 5e-4
    base_weight: float = 1.0
    heads_first: float = 0.25
