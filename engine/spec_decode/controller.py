"""How many drafted rows a step is worth: never more than pay for themselves.

A step of n rows takes T(n), measured at start-up. The expected yield of a step is one token for each decoding request
plus the survival probabilities of the drafted nodes. Nodes of all requests are taken in order of survival while that
yield per second is at its best; the curve is jagged, so every count is looked at. No nodes at all is a valid answer.

Prompts that share a step have to be computed whatever is drafted, so their time does not count; and a token that is
not drafted now comes later in a batch that they have joined, so it costs what tokens cost there.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from engine.request import Request
from engine.spec_decode.tree import DraftTree

# Below this estimated gain a draft is not worth the risk that the estimates are off.
MIN_GAIN = 1.02


@dataclass(frozen=True, slots=True)
class DraftChoice:
    """The tree a request verifies in this step; with an empty one, why."""

    tree: DraftTree
    reason: str = ""


@dataclass(frozen=True, slots=True)
class DraftRoom:
    """other_rows: prompt rows expected to share the forward pass. nodes: drafted rows that fit in it at most.
    others: requests that will soon decode beside those that do now."""

    other_rows: int
    nodes: int
    others: int = 0


class StepCosts:
    """T(rows): seconds of a forward pass by its rows, interpolated between measured counts and extrapolated beyond."""

    def __init__(self, seconds: Mapping[int, float]) -> None:
        """seconds: at least one row count and its time. A step takes no longer than a larger one: noise only adds time,
        so where the figures say otherwise the smaller step was disturbed."""
        if not seconds:
            raise ValueError("no step time was measured")
        self._rows = sorted(seconds)
        self._seconds = list(accumulate((seconds[rows] for rows in reversed(self._rows)), min))[::-1]

    @classmethod
    def measured(
        cls,
        time_step: Callable[[int], float],
        max_rows: int,
        repeats: int = 3,
        known: Mapping[int, float] | None = None,
    ) -> StepCosts:
        """Times 1, 2, 3, 4, 6, 8, 12, 16, 24, ... rows up to ``max_rows``; the best of ``repeats`` and ``known`` each.

        The counts take turns, so that a busy moment of the machine does not make one of them look dear.
        """
        counts = [rows for rows in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128) if rows < max_rows]
        seconds = {rows: (known or {}).get(rows, math.inf) for rows in [*counts, max_rows]}
        for _ in range(repeats):
            for rows in [*counts, max_rows]:
                seconds[rows] = min(time_step(rows), seconds[rows])
        return cls(seconds)

    def __call__(self, rows: int) -> float:
        after = bisect.bisect_left(self._rows, rows)
        if after < len(self._rows) and self._rows[after] == rows:
            return self._seconds[after]
        if after == 0:
            return self._seconds[0]
        if len(self._rows) == 1:
            return self._seconds[0]
        after = min(after, len(self._rows) - 1)
        low, high = self._rows[after - 1], self._rows[after]
        slope = (self._seconds[after] - self._seconds[after - 1]) / (high - low)
        return self._seconds[after - 1] + slope * (rows - low)

    def least_survival(self, decoding: int, nodes: int) -> float:
        """Drafted nodes that are less likely than this cannot pay for their rows, however many of ``nodes`` there are:
        the least that would do if all were alike, in a step of ``decoding`` requests and no prompt."""
        plain = self(decoding)
        return max(0.0, min(decoding * (self(decoding + count) / plain - 1) / count for count in range(1, nodes + 1)))

    def as_dict(self) -> dict[int, float]:
        return dict(zip(self._rows, self._seconds, strict=True))


def plain_seconds(costs: StepCosts, decoding: int, others: int) -> float:
    """What one token each costs ``decoding`` requests without drafts: their share of a step with ``others``."""
    batch = decoding + others
    return costs(batch) * decoding / batch if batch else 0.0


class Controller:
    """Sizes the drafts of a step. ``costs`` None takes every proposed node: for tests and for comparison."""

    def __init__(self, costs: StepCosts | None, *, enabled: bool = True) -> None:
        self.costs = costs
        self.enabled = enabled

    def choose(
        self, decoding: Sequence[Request], limits: Mapping[str, tuple[int, int]], room: DraftRoom
    ) -> dict[str, DraftChoice]:
        """A choice for every decoding request.

        limits: (nodes, depth) each may use.
        """
        proposals: dict[str, DraftTree] = {}
        choices: dict[str, DraftChoice] = {}
        for request in decoding:
            nodes, depth = limits[request.request_id]
            reason = self._why_none(request, nodes)
            if reason:
                choices[request.request_id] = DraftChoice(DraftTree(), reason)
            else:
                proposals[request.request_id] = request.proposal.pruned(nodes, depth)
        sizes = self._best_sizes(proposals, len(decoding), room)
        for request_id, proposal in proposals.items():
            size = sizes.get(request_id, 0)
            tree = proposal if size == len(proposal) else proposal.pruned(size, proposal.max_depth)
            choices[request_id] = DraftChoice(tree, "" if size else "low_acceptance")
        return choices

    def _why_none(self, request: Request, nodes: int) -> str:
        if not self.enabled:
            return "disabled"
        if not request.source.speculation.enabled or request.source.speculation.max_draft_tokens == 0:
            return "request"
        if nodes == 0:
            return "limit"
        return "" if len(request.proposal) else "no_draft"

    def _best_sizes(self, proposals: Mapping[str, DraftTree], num_decoding: int, room: DraftRoom) -> dict[str, int]:
        if self.costs is None:
            return {request_id: len(tree) for request_id, tree in proposals.items()}
        nodes = sorted(
            ((survival, request_id) for request_id, tree in proposals.items() for survival in tree.survival),
            key=lambda node: -node[0],
        )
        plain_rows, plain = num_decoding + room.other_rows, plain_seconds(self.costs, num_decoding, room.others)
        without = self.costs(plain_rows)
        best_rate = num_decoding / plain * MIN_GAIN if num_decoding else 0.0
        best_count, expected = 0, float(num_decoding)
        for count, (survival, _) in enumerate(nodes[: room.nodes], start=1):
            expected += survival
            rate = expected / (plain + self.costs(plain_rows + count) - without)
            if rate > best_rate:
                best_rate, best_count = rate, count
        sizes: dict[str, int] = {}
        for _, request_id in nodes[:best_count]:
            sizes[request_id] = sizes.get(request_id, 0) + 1
        return sizes
