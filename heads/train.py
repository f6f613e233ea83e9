"""Training of heads on stored states: soft targets from the model's own lm_head, resumable to the bit.

The order of the batches is a function of the seed, so a checkpoint needs only weights, optimiser and step: a run that
is killed and started again ends with the same weights as one that was not.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import math
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from heads.batch import Batch, make_batch
from heads.data import Answer
from heads.errors import HeadsError
from heads.lm_head import DraftLmHead
from heads.loss import DraftHeads, learn
from heads.settings import TrainSettings

CHECKPOINT_FILE = "checkpoint.pt"
LOG_FILE = "train.jsonl"


@dataclass(frozen=True, slots=True)
class Progress:
    """After a step. loss: of that step. head_losses: cross-entropy of each head, nats."""

    step: int
    steps: int
    loss: float
    head_losses: tuple[float, ...]


class TrainableHeads(DraftHeads, Protocol):
    """``DraftHeads`` that are a module. is_recursive: the same weights serve every depth."""

    is_recursive: bool

    def parameters(self) -> Iterator[nn.Parameter]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> Any: ...


def batches(answers: Sequence[Answer], settings: TrainSettings) -> list[list[int]]:
    """Indices of the answers in each step of all epochs: shuffled by the seed, about ``batch_tokens`` each."""
    order = random.Random(settings.seed)
    steps: list[list[int]] = []
    for _ in range(settings.epochs):
        indices = list(range(len(answers)))
        order.shuffle(indices)
        step: list[int] = []
        size = 0
        for index in indices:
            step.append(index)
            size += len(answers[index].tokens)
            if size >= settings.batch_tokens:
                steps.append(step)
                step, size = [], 0
        if step:
            steps.append(step)
    return steps


def learning_rate(step: int, steps: int, settings: TrainSettings) -> float:
    """Linear warm-up, then a cosine to zero. step: from 0."""
    warm = max(1, round(steps * settings.warmup))
    if step < warm:
        return settings.learning_rate * (step + 1) / warm
    return settings.learning_rate * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


def train(
    heads: TrainableHeads,
    lm_head: DraftLmHead,
    answers: Sequence[Answer],
    settings: TrainSettings,
    folder: Path,
    progress: Callable[[Progress], None],
) -> None:
    """Trains ``heads`` in place, going on from the checkpoint in ``folder`` if there is one.

    Raises HeadsError for no answers, or a checkpoint of another run; OSError where none can be written.
    """
    plan = batches(answers, settings)
    if not plan:
        raise HeadsError("there are no answers to train on")
    run = _Run(heads, settings, folder, _fingerprint(heads, answers, lm_head, settings))
    for step in range(run.resume(), len(plan)):
        batch = make_batch([answers[index] for index in plan[step]], lm_head)
        rate = learning_rate(step, len(plan), settings)
        losses = run.step(batch, lm_head, rate)
        loss = sum(weight * value for weight, value in zip(run.weights, losses, strict=True))
        done = Progress(step + 1, len(plan), loss, tuple(losses))
        run.log(done, rate)
        if done.step % settings.checkpoint_steps == 0 or done.step == len(plan):
            run.save(done.step)
        progress(done)


class _Run:
    """Weights, optimiser and files of one training run."""

    def __init__(self, heads: TrainableHeads, settings: TrainSettings, folder: Path, fingerprint: str) -> None:
        depths = min(heads.num_heads, settings.unroll) if heads.is_recursive else heads.num_heads
        self.weights = [settings.depth_decay**depth for depth in range(depths)]
        self._heads = heads
        self._settings = settings
        self._folder = folder
        self._fingerprint = fingerprint
        self._optimizer = torch.optim.AdamW(
            heads.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=settings.weight_decay
        )
        folder.mkdir(parents=True, exist_ok=True)

    def resume(self) -> int:
        """Loads the last checkpoint; returns the number of steps done."""
        path = self._folder / CHECKPOINT_FILE
        if not path.exists():
            self._truncate_log(0)
            return 0
        try:
            saved = torch.load(path, weights_only=True)
            fingerprint = saved["fingerprint"]
        except Exception as error:  # a damaged file makes the unpickler fail in any way
            raise HeadsError(f"{path} is not a checkpoint of a run; remove it to start again") from error
        if fingerprint != self._fingerprint:
            raise HeadsError(f"{path} belongs to a run with other answers or settings; remove it to start again")
        self._heads.load_state_dict(saved["heads"])
        self._optimizer.load_state_dict(saved["optimizer"])
        step = int(saved["step"])
        self._truncate_log(step)
        return step

    def step(self, batch: Batch, lm_head: DraftLmHead, rate: float) -> list[float]:
        """One optimiser step; returns each head's mean cross-entropy."""
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.zero_grad(set_to_none=True)
        losses = learn(self._heads, lm_head, batch, self.weights)
        nn.utils.clip_grad_norm_(self._heads.parameters(), self._settings.clip)
        self._optimizer.step()
        return losses

    def save(self, step: int) -> None:
        """Raises OSError."""
        path = self._folder / CHECKPOINT_FILE
        partial = path.with_suffix(".partial")
        state = {
            "fingerprint": self._fingerprint,
            "step": step,
            "heads": self._heads.state_dict(),
            "optimizer": self._optimizer.state_dict(),
        }
        content = io.BytesIO()
        torch.save(state, content)  # to a file, it would hide that a disk is full behind an error of its own
        with partial.open("wb") as file:
            file.write(content.getbuffer())
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)

    def log(self, done: Progress, rate: float) -> None:
        """One JSON line a step."""
        line = {
            "step": done.step,
            "steps": done.steps,
            "loss": round(done.loss, 5),
            "heads": [round(loss, 5) for loss in done.head_losses],
            "learning_rate": rate,
            "time": round(time.time(), 1),
        }
        with (self._folder / LOG_FILE).open("a") as file:
            file.write(json.dumps(line) + "\n")

    def _truncate_log(self, steps: int) -> None:
        """Drops the lines of steps that were done after the last checkpoint and will be done again."""
        path = self._folder / LOG_FILE
        if path.exists():
            kept = path.read_text().splitlines(keepends=True)[:steps]
            path.write_text("".join(kept))


def _fingerprint(
    heads: TrainableHeads, answers: Sequence[Answer], lm_head: DraftLmHead, settings: TrainSettings
) -> str:
    """What a checkpoint depends on. heads: as they are before the first step."""
    digest = hashlib.sha256(json.dumps(dataclasses.asdict(settings), sort_keys=True).encode())
    for name, tensor in heads.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.cpu().contiguous().numpy().tobytes())
    digest.update(lm_head.token_ids.numpy().tobytes())
    for answer in answers:
        digest.update(f"{answer.ask.seed} {answer.tokens}\n".encode())
    return digest.hexdigest()
