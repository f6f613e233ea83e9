"""When a drafter is worth asking: its drafts must save more time than making them takes.

Drafting costs time whether or not the controller then takes a node, and in a large batch it often takes none. So each
drafter keeps a book for each size of batch: what its nodes were expected to save, less what it spent. In the red, it
is asked only as often as costs next to nothing, until that turns out well. Drafts never enter the text, so a clock may
decide this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from engine.scheduler import ScheduledRequest
from engine.spec_decode.controller import StepCosts, plain_seconds

_TRIALS = 3  # proposals before a book is believed
_WEIGHT = 0.1  # of the newest proposal in the average
_PROBE_WEIGHT = 0.5  # of one made after a pause
_SHARE = 0.002  # of the time between them that probes of one method may lose
_LONGEST_PAUSE = 256  # steps


@dataclass(slots=True)
class _Book:
    """balance: average seconds saved a step, less those spent. left: steps of the pause still to go."""

    balance: float = 0.0
    entries: int = 0
    left: int = 0

    def enter(self, seconds: float, step: float) -> None:
        """seconds: what one proposal saved, less what it took. step: seconds of a step without drafts."""
        weight = _PROBE_WEIGHT if self.is_red else max(_WEIGHT, 1 / (self.entries + 1))
        self.balance += weight * (seconds - self.balance)
        self.entries += 1
        if self.is_red:
            self.left = min(max(1, round(-self.balance / (_SHARE * step))), _LONGEST_PAUSE)

    @property
    def is_red(self) -> bool:
        return self.entries >= _TRIALS and self.balance < 0


@dataclass(slots=True)
class DraftPace:
    """Decides for each step and method whether to ask for drafts. ``costs`` None: always."""

    costs: StepCosts | None = None
    _books: dict[tuple[str, int], _Book] = field(default_factory=dict)
    _spent: dict[tuple[str, int], float] = field(default_factory=dict)
    _least: dict[tuple[int, int], float] = field(default_factory=dict)

    def least_survival(self, batch: int, nodes: int) -> float:
        """``StepCosts.least_survival``, remembered: it is wanted at every step."""
        if self.costs is None:
            return 0.0
        if (batch, nodes) not in self._least:
            self._least[batch, nodes] = self.costs.least_survival(batch, nodes)
        return self._least[batch, nodes]

    def token_seconds(self, batch: int) -> float:
        """What a drafted token that is right saves: the time of one where ``batch`` requests decode without drafts."""
        return 0.0 if self.costs is None or not batch else self.costs(batch) / batch

    def asks(self, method: str, batch: int) -> bool:
        """Whether to ask ``method`` for drafts now. batch: the requests that run. Called once a step."""
        if self.costs is None:
            return True
        book = self._book(_page(method, batch))
        if book.left == 0:
            return True
        book.left -= 1
        return False

    def spend(self, method: str, batch: int, seconds: float) -> None:
        """Drafts of ``method`` took this long."""
        self._spent[_page(method, batch)] = self._spent.get(_page(method, batch), 0.0) + seconds

    def _book(self, page: tuple[str, int]) -> _Book:
        """A new one begins as that of smaller batches stands, if that is in the red: a larger batch leaves less room
        for drafts."""
        if page not in self._books:
            smaller = [self._books[page[0], size] for size in range(page[1]) if (page[0], size) in self._books]
            self._books[page] = replace(smaller[-1]) if smaller and smaller[-1].is_red else _Book()
        return self._books[page]

    def settle(self, scheduled: Sequence[ScheduledRequest]) -> None:
        """Enters what the proposals made since the last step save in the coming one, which is ``scheduled``."""
        if self.costs is not None and self._spent:
            saved = _savings(scheduled, self.costs)
            for page, seconds in self._spent.items():
                self._book(page).enter(saved.get(page[0], 0.0) - seconds, self.costs(1 << (page[1] - 1)))
        self._spent.clear()


def _page(method: str, batch: int) -> tuple[str, int]:
    return method, batch.bit_length()


def _savings(scheduled: Sequence[ScheduledRequest], costs: StepCosts) -> dict[str, float]:
    """Seconds that each method's drafted rows are expected to save: what plain decoding would need for the tokens they
    yield, less what the rows add to the step, shared out by the tokens. Prompts in the step count as the requests that
    they will be (``controller``): by the time their rows take, any draft would seem to pay."""
    expected: dict[str, float] = {}
    decoding = rows = nodes = 0
    for item in scheduled:
        rows += item.count
        decoding += item.completes
        nodes += len(item.tree)
        for method, survival in zip(item.tree.methods, item.tree.survival, strict=True):
            expected[method] = expected.get(method, 0.0) + survival
    total = sum(expected.values())
    if not total or not decoding:
        return {}
    plain = plain_seconds(costs, decoding, len(scheduled) - decoding)
    saved = total * plain / decoding - (costs(rows + nodes) - costs(rows))
    return {method: saved * share / total for method, share in expected.items()}
