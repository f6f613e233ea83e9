"""The ``suffix`` drafter: what followed the last time the text stood like this.

For each request it keeps where every 1-, 2- and 3-gram of prompt and output ended. The continuations of the longest
matching suffixes, weighted by how long each match is and how often each continuation was seen, form the tree. No
training and no state beyond the request. Related: prompt lookup decoding; SuffixDecoding (arXiv 2411.04975).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.spec_decode.acceptance import AcceptanceTable, Buckets
from engine.spec_decode.drafter import DraftContext, DraftFeedback, ExtraRows
from engine.spec_decode.tree import ROOT, DraftTree

if TYPE_CHECKING:
    from engine.model_runner import ModelRunner
    from engine.spec_decode.candidates import HeadCompute

MAX_GRAM = 3
MAX_MATCH = 32  # longer matches say no more about what follows
MAX_SOURCES = 16  # earlier occurrences looked at, the latest first
MIN_SURVIVAL = 0.02
# Match lengths that share a rate, and what is assumed of each before anything was seen.
_BUCKETS = Buckets(
    edges=(1, 2, 3, 4, 6, 8, 12, 16, 24, MAX_MATCH),
    assumed=(0.12, 0.25, 0.35, 0.45, 0.55, 0.65, 0.75, 0.8, 0.85, 0.9),
    prior_weight=6.0,
    decay=0.97,
)


@dataclass(slots=True)
class SuffixIndex:
    """Where each n-gram ended, for one growing token list. ``ends[n][gram]`` holds indices, oldest first."""

    ends: tuple[dict[tuple[int, ...], list[int]], ...] = field(
        default_factory=lambda: tuple({} for _ in range(MAX_GRAM + 1))
    )
    length: int = 0

    def extend(self, tokens: Sequence[int]) -> None:
        """Indexes the tokens beyond those already seen; ``tokens`` is the whole list."""
        for end in range(self.length, len(tokens)):
            for size in range(1, min(MAX_GRAM, end + 1) + 1):
                gram = tuple(tokens[end + 1 - size : end + 1])
                self.ends[size].setdefault(gram, []).append(end)
        self.length = len(tokens)

    def matches(self, tokens: Sequence[int]) -> list[tuple[int, int]]:
        """(length, end) of earlier places that match the suffix of ``tokens``, longest match first.

        Only the longest n-gram that occurred before is followed; at most ``MAX_SOURCES`` places.
        """
        last = len(tokens) - 1
        for size in range(min(MAX_GRAM, len(tokens)), 0, -1):
            ends = self.ends[size].get(tuple(tokens[last + 1 - size :]), [])
            earlier = [end for end in ends[-MAX_SOURCES - 1 :] if end < last]
            if earlier:
                found = [(self._match_length(tokens, end, size), end) for end in earlier]
                return sorted(found, reverse=True)
        return []

    @staticmethod
    def _match_length(tokens: Sequence[int], end: int, known: int) -> int:
        length, last = known, len(tokens) - 1
        while length < MAX_MATCH and length <= end and tokens[end - length] == tokens[last - length]:
            length += 1
        return length


@dataclass(slots=True)
class _RequestState:
    acceptance: AcceptanceTable
    index: SuffixIndex = field(default_factory=SuffixIndex)
    # The match length that the estimate of each proposed path rests on.
    origins: dict[tuple[int, ...], int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Vote:
    """One earlier place: where its match ended, how long it was, and what its word counts."""

    end: int
    length: int
    weight: float


@dataclass(frozen=True, slots=True)
class _Growth:
    """Builds one proposal, depth by depth: the places still alive under a node vote for its children."""

    tree: DraftTree
    context: DraftContext
    state: _RequestState
    least: float

    def grow(self, matches: list[tuple[int, int]], start: int = ROOT) -> None:
        """Adds what followed the ``matches`` of the text up to and with node ``start``."""
        longest = matches[0][0]
        # Halved for every token by which a match is shorter: a longer context predicts better.
        level = [(start, [_Vote(end, length, 0.5 ** (longest - length)) for length, end in matches])]
        depth = 0
        deepest = self.context.max_depth - (0 if start == ROOT else self.tree.depths[start])
        most = len(self.tree) + 2 * self.context.max_nodes
        while level and depth < deepest and len(self.tree) < most:
            level = [child for node, votes in level for child in self._children(node, votes, depth)]
            depth += 1

    def _children(self, node: int, votes: list[_Vote], depth: int) -> list[tuple[int, list[_Vote]]]:
        tokens = self.context.token_ids
        following: dict[int, list[_Vote]] = {}
        for vote in votes:
            if vote.end + depth + 1 < len(tokens):
                following.setdefault(tokens[vote.end + depth + 1], []).append(vote)
        total = sum(vote.weight for alive in following.values() for vote in alive)
        parent = 1.0 if node == ROOT else self.tree.survival[node]
        path = () if node == ROOT else tuple(self.tree.path_tokens(node))
        children = []
        for token, alive in following.items():
            match = min(MAX_MATCH, max(vote.length for vote in alive) + depth)
            share = sum(vote.weight for vote in alive) / total
            survival = parent * self.state.acceptance.rate(match) * share
            if survival >= self.least:
                child = self.tree.add(token, node, survival, SuffixDrafter.method)
                self.state.origins[*path, token] = match
                children.append((child, alive))
        return children


class SuffixDrafter:
    """See the module's docstring. ``method`` is "suffix"."""

    method = "suffix"
    needs_hidden = False
    hidden_layers: tuple[int, ...] = ()
    max_extra_rows = 0

    def __init__(self) -> None:
        self._requests: dict[str, _RequestState] = {}
        self._acceptance = AcceptanceTable(_BUCKETS)

    def prepare(self, compute: HeadCompute, runner: ModelRunner) -> None:
        """Nothing: it computes with the text alone."""

    def read(self, contexts: Sequence[DraftContext]) -> None:
        """Indexes the tokens that came since the last time."""
        for context in contexts:
            self._state(context).index.extend(context.token_ids)

    def propose(self, contexts: Sequence[DraftContext]) -> list[DraftTree]:
        self.read(contexts)
        return [self._propose(context) for context in contexts]

    def extra_rows(self, context: DraftContext, tree: DraftTree) -> ExtraRows | None:
        return None

    def release(self, request_id: str) -> None:
        self._requests.pop(request_id, None)

    def _state(self, context: DraftContext) -> _RequestState:
        state = self._requests.get(context.request_id)
        if state is None:
            state = _RequestState(self._acceptance.child())
            self._requests[context.request_id] = state
        return state

    def _propose(self, context: DraftContext) -> DraftTree:
        state = self._state(context)
        state.origins = {}
        tree = DraftTree()
        matches = state.index.matches(context.token_ids)
        least = max(MIN_SURVIVAL, context.least)
        if matches and context.max_nodes > 0 and state.acceptance.rate(matches[0][0]) >= least:
            _Growth(tree, context, state, least).grow(matches)
        return tree

    def extend(self, context: DraftContext, tree: DraftTree) -> None:
        """What followed the last time the text stood as it would with another drafter's tokens."""
        state = self._requests.get(context.request_id)
        if state is None:
            return
        least = tree.cutoff(context.max_nodes, max(MIN_SURVIVAL, context.least))
        for node in range(len(tree)):
            path = tuple(tree.path_tokens(node))
            if tree.survival[node] > least and path not in state.origins:
                matches = state.index.matches([*context.token_ids, *path])
                if matches:
                    _Growth(tree, context, state, least).grow(matches, node)

    def observe(self, feedback: DraftFeedback) -> None:
        """Counts, along what was really emitted, how often a match of some length was followed as it had been.

        It asks whether any child was right, so that one rate serves every share of the votes.
        """
        state = self._requests.get(feedback.request_id)
        if state is None or not state.origins:
            return
        path: tuple[int, ...] = ()
        for token in feedback.emitted:
            # A path may begin with another drafter's tokens, so one that is not ours is no reason to stop.
            asked = [match for known, match in state.origins.items() if known[:-1] == path]
            path = (*path, token)
            if asked:
                state.acceptance.record(max(asked), path in state.origins)
