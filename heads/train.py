"""Training of heads on stored states, or with the model (``heads.joint``): soft targets from the model's own lm_head,
resumable to the bit.

The order of the batches is a function of the seed, so a checkpoint needs only weights, optimiser and step: a run that
is killed and started again ends with the same weights as one that was not.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import io
import json
import math
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from heads.batch import make_batch
from heads.data import Answer
from heads.errors import HeadsError
from heads.joint import Joint, learn_jointly
from heads.lm_head import DraftLmHead
from heads.loss import DraftHeads, learn
from heads.settings import LoraSettings, TrainSettings

CHECKPOINT_FILE = "checkpoint.pt"
LOG_FILE = "train.jsonl"
_WARM_STEPS, _TIMED_STEPS, _TIMED_SECONDS = 2, 20, 10.0


@dataclass(frozen=True, slots=True)
class Progress:
    """After a step. loss: of that step. head_losses: cross-entropy of each head, nats. kl: from the original model to
    the one that is trained with the heads, nats; None while that is frozen, or none is."""

    step: int
    steps: int
    loss: float
    head_losses: tuple[float, ...]
    kl: float | None = None


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


def base_learning_rate(step: int, steps: int, settings: TrainSettings, lora: LoraSettings) -> float:
    """Of the base model's adapters: zero for the heads' first steps, then a warm-up of its own; it falls as theirs."""
    frozen = round(steps * lora.heads_first)
    if step < frozen:
        return 0.0
    warm = max(1, round(steps * settings.warmup))
    share = learning_rate(step, steps, settings) / settings.learning_rate
    return lora.learning_rate * share * min(1.0, (step - frozen + 1) / warm)


def train(
    heads: TrainableHeads,
    lm_head: DraftLmHead,
    answers: Sequence[Answer],
    settings: TrainSettings,
    folder: Path,
    progress: Callable[[Progress], None],
    joint: Joint | None = None,
) -> None:
    """Trains ``heads`` in place, and adapters of the base model with them if there is a ``joint``, going on from the
    checkpoint in ``folder`` if there is one.

    Raises HeadsError for no answers, or a checkpoint of another run; OSError where none can be written.
    """
    plan = batches(answers, settings)
    if not plan:
        raise HeadsError("there are no answers to train on")
    run = _Run(heads, settings, folder, _fingerprint(heads, answers, lm_head, settings, joint), joint)
    for step in range(run.resume(), len(plan)):
        rates = [learning_rate(step, len(plan), settings)]
        if joint is not None:
            rates.append(base_learning_rate(step, len(plan), settings, joint.settings))
        losses, kl = run.step([answers[index] for index in plan[step]], lm_head, rates)
        loss = sum(weight * value for weight, value in zip(run.weights, losses, strict=True))
        if joint is not None and kl is not None:
            loss += joint.settings.base_weight * kl
        done = Progress(step + 1, len(plan), loss, tuple(losses), kl)
        run.log(done, rates)
        if done.step % settings.checkpoint_steps == 0 or done.step == len(plan):
            run.save(done.step)
        progress(done)


def training_rate(
    heads: TrainableHeads,
    lm_head: DraftLmHead,
    answers: Sequence[Answer],
    settings: TrainSettings,
    clock: Callable[[], float] = time.monotonic,
) -> float:
    """Answer tokens a second, measured by training a copy of the heads on the answers, all in one step: up to 20 steps
    or 10 seconds after two to warm up."""
    with tempfile.TemporaryDirectory() as folder:
        run = _Run(copy.deepcopy(heads), settings, Path(folder), "", None)
        rates = [settings.learning_rate]
        for _ in range(_WARM_STEPS):
            run.step(answers, lm_head, rates)
        done, elapsed, began = 0, 0.0, clock()
        while done < _TIMED_STEPS and elapsed < _TIMED_SECONDS:
            run.step(answers, lm_head, rates)
            done, elapsed = done + 1, clock() - began
    return done * sum(len(answer.tokens) for answer in answers) / max(elapsed, 1e-9)


def share_trained(folder: Path) -> float:
    """How much of a run's steps the log in ``folder`` tells of, 0 to 1."""
    path = folder / LOG_FILE
    lines = path.read_text().splitlines() if path.exists() else []
    return len(lines) / int(json.loads(lines[0])["steps"]) if len(lines) > 1 else 0.0


class _Run:
    """Weights, optimiser and files of one training run."""

    def __init__(
        self, heads: TrainableHeads, settings: TrainSettings, folder: Path, fingerprint: str, joint: Joint | None
    ) -> None:
        depths = min(heads.num_heads, settings.unroll) if heads.is_recursive else heads.num_heads
        self.weights = [settings.depth_decay**depth for depth in range(depths)]
        self._heads = heads
        self._settings = settings
        self._folder = folder
        self._fingerprint = fingerprint
        self._joint = joint
        # What learns at one rate and is clipped together.
        self._groups = [list(heads.parameters())]
        if joint is not None:
            self._groups.append(list(joint.base.parameters()))
        self._optimizer = torch.optim.AdamW(
            [{"params": group} for group in self._groups],
            lr=settings.learning_rate,
            betas=(0.9, 0.95),
            weight_decay=settings.weight_decay,
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
        if self._joint is not None:
            self._joint.base.load_state_dict(saved["base"])
        self._optimizer.load_state_dict(saved["optimizer"])
        step = int(saved["step"])
        self._truncate_log(step)
        return step

    def step(
        self, answers: Sequence[Answer], lm_head: DraftLmHead, rates: Sequence[float]
    ) -> tuple[list[float], float | None]:
        """One optimiser step; returns each head's mean cross-entropy, and the KL if the base model learned too.

        rates: of the heads, and of the base model's adapters if there are any; while theirs is zero, the states are the
        stored ones.
        """
        for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        self._optimizer.zero_grad(set_to_none=True)
        kl: float | None = None
        if self._joint is not None and rates[-1] > 0:
            losses, kl = learn_jointly(self._joint, self._heads, lm_head, answers, self.weights)
        else:
            losses = learn(self._heads, lm_head, make_batch(answers, lm_head), self.weights)
        for parameters in self._groups:
            nn.utils.clip_grad_norm_(parameters, self._settings.clip)
        self._optimizer.step()
        return losses, kl

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
        if self._joint is not None:
            state["base"] = self._joint.base.state_dict()
        content = io.BytesIO()
        torch.save(state, content)  # to a file, it would hide that a disk is full behind an error of its own
        with partial.open("wb") as file:
            file.write(content.getbuffer())
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)

    def log(self, done: Progress, rates: Sequence[float]) -> None:
        """One JSON line a step."""
        line = {
            "step": done.step,
            "steps": done.steps,
            "loss": round(done.loss, 5),
            "heads": [round(loss, 5) for loss in done.head_losses],
            "learning_rate": rates[0],
            "time": round(time.time(), 1),
        }
        if self._joint is not None:
            line |= {"base_learning_rate": rates[1], "kl": None if done.kl is None else round(done.kl, 6)}
        with (self._folder / LOG_FILE).open("a") as file:
            file.write(json.dumps(line) + "\n")

    def _truncate_log(self, steps: int) -> None:
        """Drops the lines of steps that were done after the last checkpoint and will be done again."""
        path = self._folder / LOG_FILE
        if path.exists():
            kept = path.read_text().splitlines(keepends=True)[:steps]
            path.write_text("".join(kept))


def _fingerprint(
    heads: TrainableHeads,
    answers: Sequence[Answer],
    lm_head: DraftLmHead,
    settings: TrainSettings,
    joint: Joint | None,
) -> str:
    """What a checkpoint depends on. heads, joint: as they are before the first step."""
    digest = hashlib.sha256(json.dumps(dataclasses.asdict(settings), sort_keys=True).encode())
    states = [heads.state_dict()]
    if joint is not None:
        digest.update(json.dumps(dataclasses.asdict(joint.settings), sort_keys=True).encode())
        states.append(joint.base.state_dict())
    for name, tensor in (pair for state in states for pair in state.items()):
        digest.update(name.encode())
        digest.update(tensor.cpu().contiguous().numpy().tobytes())
    digest.update(lm_head.token_ids.numpy().tobytes())
    for answer in answers:
        digest.update(f"{answer.ask.seed} {answer.tokens}\n".encode())
    return digest.hexdigest()
