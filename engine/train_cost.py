"""What a training run will cost from where it stands: arithmetic on measured rates (``engine.train_slice``)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from heads.data import HELD_OUT_SHARE

LONG = 150 * 60
"""Seconds beyond which a run on a CPU is told how to become shorter."""

_HALF, _SINGLE = 2, 4  # bytes of a number
_CHECKPOINT = 3  # numbers a parameter: itself and AdamW's two moments
_ASIDE = 2  # a checkpoint is written beside the one before


@dataclass(frozen=True, slots=True)
class Workload:
    """What a whole run consists of.

    target: answer tokens wanted. asks: prompts there are. max_tokens: of an answer. prompt_tokens: of all asks.
    hidden: width of a state. context: numbers of a context's entry, keys and values; 0 where heads need none.
    parameters: trained. reads_disk: contexts stay on disk, where each step reads its own.
    """

    target: int
    asks: int
    max_tokens: int
    prompt_tokens: int
    epochs: int
    hidden: int
    context: int
    parameters: int
    reads_disk: bool = False


@dataclass(frozen=True, slots=True)
class Done:
    """What is there already. answers, tokens: in whole shards. writing: tokens of the shard under way. entries: of
    contexts. trained: share of the steps."""

    answers: int = 0
    tokens: int = 0
    writing: int = 0
    entries: int = 0
    trained: float = 0.0


@dataclass(frozen=True, slots=True)
class Rates:
    """Measured, a second: answer tokens written (0: none were, since none are left), context entries read (0: none are
    needed), answer tokens trained on."""

    answers: float
    contexts: float
    training: float


@dataclass(frozen=True, slots=True)
class Cost:
    """answers, contexts, training: seconds still to go. disk: bytes of the folder in the end, the work included. held:
    bytes of memory that data and training take beside the model."""

    answers: float
    contexts: float
    training: float
    disk: int
    held: int

    @property
    def seconds(self) -> float:
        return self.answers + self.contexts + self.training


def cost(work: Workload, done: Done, rates: Rates) -> Cost:
    """Until answers are stored, each is taken to be as long as allowed: few prompts are overrated, not underrated."""
    length = done.tokens / done.answers if done.answers else work.max_tokens
    tokens = max(done.tokens, min(work.target, round(work.asks * length)))
    answers = math.ceil(tokens / max(length, 1))
    prompts = answers * work.prompt_tokens / work.asks
    entries = tokens + prompts if work.context else 0
    trained = work.epochs * tokens * (1 - HELD_OUT_SHARE)
    states = tokens * (_HALF * work.hidden + _SINGLE)
    contexts = _HALF * (entries * work.context + (prompts * work.hidden if work.context else 0))
    parameters = _SINGLE * work.parameters * _CHECKPOINT
    kept = 0 if work.reads_disk else contexts
    return Cost(
        answers=_seconds(tokens - done.tokens - done.writing, rates.answers),
        contexts=_seconds(entries - done.entries, rates.contexts),
        training=_seconds(trained * (1 - done.trained), rates.training),
        disk=round(states + _SINGLE * prompts + contexts + _ASIDE * parameters + _HALF * work.parameters),
        held=round(states + _SINGLE * prompts + kept + parameters + _SINGLE * work.parameters),
    )


def _seconds(amount: float, rate: float) -> float:
    return max(0.0, amount) / rate if rate else 0.0


@dataclass(frozen=True, slots=True)
class Machine:
    """used: bytes of memory this process has now. free: bytes left on the disk. is_cpu: nothing faster is used."""

    used: int
    free: int
    is_cpu: bool


def tell(found: Cost, work: Workload, machine: Machine) -> Iterator[str]:
    """The estimate in lines."""
    stages = [f"answers {_minutes(found.answers)}"]
    if work.context:
        stages.append(f"contexts {_minutes(found.contexts)}")
    stages.append(f"training {_minutes(found.training)}")
    yield (
        f"Estimate from a measured slice: {', '.join(stages)}, in all {_minutes(found.seconds)} from here; "
        "the test at the end is not counted"
    )
    yield (
        f"It takes up to {_size(found.disk)} on disk ({_size(machine.free)} free) and about "
        f"{_size(machine.used + found.held)} of main memory"
    )
    if machine.is_cpu and found.seconds > LONG:
        yield (
            f"Fewer answer tokens (--tokens, now {work.target}) or epochs (--set training.epochs=, now {work.epochs}) "
            "shorten it nearly in proportion"
        )


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 570 else f"{seconds / 60:.1f} min"


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"
