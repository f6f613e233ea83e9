"""The answers of a run as data: which of them are used, how they are split, and what run.yaml says of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.errors import HeadTrainingError
from engine.train_job import Material
from heads.data import (
    HELD_OUT_SHARE,
    LOOP_REPEATS,
    LOOP_SIZE,
    Answer,
    Ask,
    dataset_digest,
    first_of_each,
    prompts_digest,
)


@dataclass(frozen=True, slots=True)
class TrainingData:
    """seen, kept: the answers to train on and those held out. facts: for run.yaml."""

    seen: Sequence[Answer]
    kept: Sequence[Answer]
    facts: Mapping[str, Any]


def split(stored: Sequence[Answer], asks: Sequence[Ask], material: Material) -> TrainingData:
    """Divides the answers that can be used by the hashes of their prompts.

    Raises HeadTrainingError unless there are some to train on and some to test on.
    """
    whole = [answer for answer in stored if len(answer.tokens) > 1]
    answers = first_of_each(whole)
    seen = [answer for answer in answers if not answer.is_held_out]
    kept = [answer for answer in answers if answer.is_held_out]
    if not seen or not kept:
        raise HeadTrainingError(
            f"{len(answers)} answers are too few to train on some and test on others; give more prompts"
        )
    facts = {
        "prompts_given": len(material.prompts),
        "prompts_too_long": len(material.prompts) - len(asks),
        "prompts_answered": len(stored),
        "loop": {"tokens": LOOP_SIZE, "times": LOOP_REPEATS},
        "answers_cut_at_a_loop": sum(answer.was_cut for answer in stored),
        "answers_too_short": len(stored) - len(whole),
        "answers_repeated": len(whole) - len(answers),
        "answers": len(answers),
        "greedy_answers": sum(answer.ask.temperature == 0.0 for answer in answers),
        "held_out_share": HELD_OUT_SHARE,
        "training_answers": len(seen),
        "held_out_answers": len(kept),
        "training_tokens": _tokens(seen),
        "held_out_tokens": _tokens(kept),
        "sources": _by_source(answers, material),
        "dataset_digest": dataset_digest(seen),
        "held_out_digest": dataset_digest(kept),
        "prompts_digest": prompts_digest(answers),
    }
    return TrainingData(seen, kept, facts)


def _tokens(answers: Sequence[Answer]) -> int:
    return sum(len(answer.tokens) for answer in answers)


def _by_source(answers: Sequence[Answer], material: Material) -> list[dict[str, Any]]:
    """In the order of their names; none where the prompts came without."""
    if not material.sources:
        return []
    names = dict(zip(material.prompts, material.sources, strict=True))
    counts, tokens, kept = (Counter[str]() for _ in range(3))
    for answer in answers:
        name = names[answer.ask.prompt]
        counts[name] += 1
        tokens[name] += len(answer.tokens)
        kept[name] += answer.is_held_out
    return [
        {"source": name, "answers": counts[name], "tokens": tokens[name], "held_out_answers": kept[name]}
        for name in sorted(counts)
    ]
