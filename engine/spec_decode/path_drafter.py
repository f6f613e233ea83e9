"""Drafters whose heads know the drafted tokens before: the tree grows depth by depth, the likeliest nodes first.

Each depth is one more pass of the heads, so it is only gone into where the tokens it is expected to yield are worth
the time it takes. A node has children of its own choice, unlike those of independent heads (EAGLE-2, arXiv 2406.16858,
grows its trees alike).
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, Unpack

import torch

from engine.spec_decode.acceptance import AcceptanceTable
from engine.spec_decode.candidates import HeadCompute
from engine.spec_decode.draft_block import MAX_PASS_ROWS, DepthRows, DraftBlock, DraftPass
from engine.spec_decode.drafter import DraftContext, DraftFeedback
from engine.spec_decode.drafter_base import HeadDrafter, HeadOptions, HeadsT, committed
from engine.spec_decode.head_ranking import MIN_SURVIVAL, RankedRow, offer_of
from engine.spec_decode.tree import ROOT, DraftTree
from heads.lm_head import DraftLmHead
from heads.mtp import MtpModule

if TYPE_CHECKING:
    from engine.model_runner import ModelRunner


_BEAM = 8  # nodes of a request that get children at one depth
_CHILDREN = 8  # of a node at most
_WEIGHT = 0.1  # of the newest figure in an average


@dataclass(slots=True)
class _RequestState:
    """tables: acceptance by depth. tree: what was proposed last. asked: for each of its nodes (or ROOT) that got
    children, the heads' confidence in each by its token."""

    tables: list[AcceptanceTable]
    tree: DraftTree = field(default_factory=DraftTree)
    asked: dict[int, dict[int, float]] = field(default_factory=dict)


@dataclass(slots=True)
class _Growing:
    """A request's tree under way. front: nodes of the deepest level that get children, best first. rows: pass row of
    each node that got some. state_of: what came out of each row."""

    context: DraftContext
    state: _RequestState
    front: list[int] = field(default_factory=lambda: [ROOT])
    rows: dict[int, int] = field(default_factory=dict)
    state_of: dict[int, torch.Tensor] = field(default_factory=dict)

    @property
    def tree(self) -> DraftTree:
        return self.state.tree

    @property
    def least(self) -> float:
        return max(MIN_SURVIVAL, self.context.least)

    def path(self, node: int) -> list[int]:
        """Pass rows from the root's to the node's own."""
        return [self.rows[step] for step in (ROOT, *self.tree.ancestors(node))]


class PathDrafter(HeadDrafter[HeadsT, _RequestState], Generic[HeadsT]):
    """See the module's docstring. One kind of heads is a ``method`` and its ``DraftBlock``."""

    def __init__(self, heads: HeadsT, lm_head: DraftLmHead, **options: Unpack[HeadOptions]) -> None:
        super().__init__(heads, lm_head, **options)
        self._block: DraftBlock | None = None
        self._seconds: dict[int, float] = {}  # of a depth below the first, by the bit length of its rows
        self._best_rate = [0.5] * (heads.num_heads + 1)  # of a node's likeliest child, by depth

    def _pack(self, compute: HeadCompute, runner: ModelRunner) -> None:
        self._block = self._make_block(compute, runner)

    @abstractmethod
    def _make_block(self, compute: HeadCompute, runner: ModelRunner) -> DraftBlock:
        """What the heads are computed with."""

    @torch.inference_mode()
    def propose(self, contexts: Sequence[DraftContext]) -> list[DraftTree]:
        assert self._block is not None, "prepare comes first"
        growing = [
            _Growing(context, self._fresh_state(context))
            for context in contexts
            if context.accepted is not None and context.max_nodes > 0
        ]
        if growing:
            self._grow(growing, self._block.begin([committed(one.context) for one in growing]))
        trees = {one.context.request_id: one.tree for one in growing}
        return [trees.get(context.request_id, DraftTree()) for context in contexts]

    def _fresh_state(self, context: DraftContext) -> _RequestState:
        known = self._requests.get(context.request_id)
        tables = self._calibrations.of_request(context.sampling) if known is None else known.tables
        state = _RequestState(tables)
        self._requests[context.request_id] = state
        return state

    def _grow(self, growing: Sequence[_Growing], drafting: DraftPass) -> None:
        for depth in range(1, self._heads.num_heads + 1):
            for one in growing:
                if depth > one.context.max_depth:
                    one.front = []
            if not self._pays(growing, depth):
                return
            began = time.perf_counter()
            rows = self._descend(growing, drafting, depth)
            if depth > 1:  # the first is never weighed, and may cost more: heads that know it all begin there
                self._note_seconds(rows, time.perf_counter() - began)
            for one in growing:
                one.front = self._next_front(one, depth)

    def _pays(self, growing: Sequence[_Growing], depth: int) -> bool:
        """Whether the tokens that one more depth is expected to yield are worth its time; the first always is, since
        who asks for drafts has weighed that."""
        rows = sum(len(one.front) for one in growing)
        worth = growing[0].context.token_seconds
        if depth == 1 or not rows or not worth:
            return bool(rows)
        gain = 0.0
        for one in growing:
            for node in one.front:
                gain += max(0.0, one.tree.survival[node] * self._best_rate[depth] - one.context.least)
        return gain * worth > self._seconds.get(rows.bit_length(), 0.0)

    def _note_seconds(self, rows: int, seconds: float) -> None:
        size = rows.bit_length()
        known = self._seconds.get(size, seconds)
        self._seconds[size] = known + _WEIGHT * (seconds - known)

    def _descend(self, growing: Sequence[_Growing], drafting: DraftPass, depth: int) -> int:
        """Gives every node of the fronts its children; returns how many nodes those were."""
        states, tokens, owners, paths, ranked = [], [], [], [], []
        for owner, one in enumerate(growing):
            for node in one.front:
                states.append(self._state_before(one, node))
                tokens.append(one.context.token_ids[-1] if node == ROOT else one.tree.tokens[node])
                owners.append(owner)
                one.rows[node] = len(one.rows)
                paths.append(one.path(node))
                path = () if node == ROOT else tuple(one.tree.path_tokens(node))
                ranked.append(RankedRow(one.context, depth, min(_CHILDREN, one.context.max_nodes), path))
        found_states, logits = drafting.run(DepthRows(torch.stack(states), tokens, owners, paths, depth))
        found = iter(zip(found_states, self._ranking.candidates(logits, ranked), strict=True))
        for one in growing:
            for node in one.front:
                one.state_of[node], candidates = next(found)
                offer = offer_of(candidates, one.state.tables[depth - 1])
                above = 1.0 if node == ROOT else one.tree.survival[node]
                asked = one.state.asked[node] = {}
                if offer.rates:
                    self._best_rate[depth] += _WEIGHT * (offer.rates[0] - self._best_rate[depth])
                for token, confidence, rate in zip(offer.tokens, offer.confidences, offer.rates, strict=True):
                    if above * rate < one.least:
                        break
                    one.tree.add(token, node, above * rate, self.method)
                    asked[token] = confidence
        return len(tokens)

    def _state_before(self, one: _Growing, node: int) -> torch.Tensor:
        """Of the token before ``node``: the root's is the base model's own."""
        return self._root_state(one.context) if node == ROOT else one.state_of[one.tree.parents[node]]

    def _root_state(self, context: DraftContext) -> torch.Tensor:
        """[hidden], float32: what the first depth reads."""
        assert context.accepted is not None
        return context.accepted.final.float()

    def _next_front(self, one: _Growing, depth: int) -> list[int]:
        """Nodes of this depth whose children may be among the likeliest of the tree."""
        tree = one.tree
        cutoff = tree.cutoff(one.context.max_nodes, one.least)
        nodes = [n for n in range(len(tree)) if tree.depths[n] == depth and tree.survival[n] > cutoff]
        room = min(_BEAM, MAX_PASS_ROWS - len(one.rows))
        return sorted(sorted(nodes, key=lambda node: -tree.survival[node])[:room])

    def extend(self, context: DraftContext, tree: DraftTree) -> None:
        """Nothing: below the others' nodes it would take another pass."""
        return

    def observe(self, feedback: DraftFeedback) -> None:
        """Counts the children of every node on the way that the text took."""
        state = self._requests.get(feedback.request_id)
        if state is None:
            return
        node: int | None = ROOT
        for table, token in zip(state.tables, feedback.emitted, strict=False):
            if node is None:
                break
            for candidate, confidence in state.asked.get(node, {}).items():
                table.record(confidence, candidate == token)
            node = state.tree.child(node, token)
        state.asked = {}


class MtpDrafter(PathDrafter[MtpModule]):
    """An MTP module, over the runner's own KV cache."""

    method = MtpModule.method

    def _make_block(self, compute: HeadCompute, runner: ModelRunner) -> DraftBlock:
        return runner.make_block(self._heads, self._lm_head)
