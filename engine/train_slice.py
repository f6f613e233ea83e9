"""Short real slices of a training run's work, timed: what ``engine.train_cost`` reckons with.

Answers are timed while the run writes its own, so nothing of that is lost; contexts and training steps on made-up
answers (their cost does not depend on what they say), seconds of work before the first answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from heads.data import Answer, Ask

Clock = Callable[[], float]

_LEAST_SECONDS = 30.0
_LEAST_TOKENS = 4  # a request side by side: past the prompts that all begin at once


class AnswerPace:
    """Tells ``report`` once how many answer tokens a second are written: when enough were, or on ``finish``."""

    def __init__(self, concurrency: int, report: Callable[[float], None], clock: Clock = time.monotonic) -> None:
        self._least = _LEAST_TOKENS * concurrency
        self._report: Callable[[float], None] | None = report
        self._clock = clock
        self._began: float | None = None
        self._tokens = 0

    def begin(self) -> None:
        """Answers are about to be written; the first call counts."""
        if self._began is None:
            self._began = self._clock()

    def count(self, tokens: int) -> None:
        """Tokens that were written since the last call."""
        self._tokens += tokens
        if self._tokens >= self._least and self._elapsed() >= _LEAST_SECONDS:
            self.finish()

    def finish(self) -> None:
        """There is nothing more to measure."""
        report, self._report = self._report, None
        if report is not None:
            elapsed = self._elapsed()
            report(self._tokens / elapsed if elapsed > 0 else 0.0)

    def _elapsed(self) -> float:
        return 0.0 if self._began is None else self._clock() - self._began


def made_up_answers(asks: Sequence[Ask], sizes: tuple[int, int, int], count: int) -> list[Answer]:
    """To the first asks, from random tokens and states, ``count`` tokens or more in all. sizes: tokens of each answer,
    width of a state, vocabulary."""
    length, hidden, vocab = sizes
    draw = torch.Generator().manual_seed(0)  # the run's own random numbers stay as they are
    answers = []
    for index in range(-(-count // length)):
        tokens = torch.randint(vocab, (length,), generator=draw)
        states = torch.randn(length, hidden, generator=draw).to(torch.float16)
        answers.append(Answer(asks[index % len(asks)], tuple(tokens.tolist()), states))
    return answers


def with_contexts(
    answers: Sequence[Answer], add_context: Callable[[Answer], Answer], clock: Clock = time.monotonic
) -> tuple[list[Answer], float]:
    """The answers with their contexts, and the entries read a second; the first is read twice, to warm up."""
    add_context(answers[0])
    began = clock()
    read = [add_context(answer) for answer in answers]
    entries = sum(len(answer.ask.prompt) + len(answer.tokens) for answer in answers)
    return read, entries / max(clock() - began, 1e-9)
