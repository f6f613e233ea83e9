"""A drafter that is looked at while it drafts: how often its nodes are right, and what its likeliest chain is worth."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.spec_decode.drafter import (
    CommittedRows,
    DraftContext,
    Drafter,
    DraftFeedback,
    ExtraRows,
    HiddenStates,
    KvOwner,
    TextReader,
)
from engine.spec_decode.tree import ROOT, DraftTree
from heads.config import CONFIDENCE_EDGES

if TYPE_CHECKING:
    import torch

    from engine.model_runner import ModelRunner
    from engine.spec_decode.candidates import HeadCompute

_CHAIN_FROM = 16  # nodes of the tree that a chain is taken from


@dataclass(slots=True)
class Bucket:
    """Nodes whose parent was right and whose expected chance of being right is at most ``upto`` (and above the bucket
    before). expected: the sum of those chances. right: how many were."""

    upto: float
    nodes: int = 0
    expected: float = 0.0
    right: int = 0


def _buckets() -> list[Bucket]:
    return [Bucket(edge) for edge in CONFIDENCE_EDGES]


@dataclass(slots=True)
class Reliability:
    """What a drafter expected of its nodes and what became of them."""

    buckets: list[Bucket] = field(default_factory=_buckets)

    def count(self, tree: DraftTree, emitted: Sequence[int]) -> None:
        """emitted: the tokens that followed the tree's root. Nodes beyond them are left out: nobody knows."""
        is_right: list[bool] = []
        for token, parent, depth, survival in zip(tree.tokens, tree.parents, tree.depths, tree.survival, strict=True):
            reached = depth <= len(emitted) and (parent == ROOT or is_right[parent])
            is_right.append(reached and token == emitted[depth - 1])
            above = 1.0 if parent == ROOT else tree.survival[parent]
            if reached and above > 0:
                chance = survival / above
                bucket = self.buckets[bisect.bisect_left(CONFIDENCE_EDGES, chance, 0, len(CONFIDENCE_EDGES) - 1)]
                bucket.nodes += 1
                bucket.expected += chance
                bucket.right += is_right[-1]


def likeliest_chain(tree: DraftTree, length: int) -> DraftTree:
    """From the root down, always the likeliest child; ``length`` nodes at most."""
    chain, node, end = DraftTree(), ROOT, ROOT
    while len(chain) < length:
        children = [child for child, parent in enumerate(tree.parents) if parent == node]
        if not children:
            break
        node = max(children, key=lambda child: tree.survival[child])
        end = chain.add(tree.tokens[node], end, tree.survival[node], tree.methods[node])
    return chain


class WatchedDrafter:
    """Drafts as ``inner`` does; with ``is_chain`` only the likeliest path of its tree."""

    def __init__(self, inner: Drafter, *, is_chain: bool = False) -> None:
        self.method = inner.method
        self.needs_hidden = inner.needs_hidden
        self.hidden_layers = inner.hidden_layers
        self.max_extra_rows = inner.max_extra_rows
        self.reliability = Reliability()
        self._inner = inner
        self._is_chain = is_chain

    def prepare(self, compute: HeadCompute, runner: ModelRunner) -> None:
        self._inner.prepare(compute, runner)

    def block_bytes(self, block_size: int, dtype: torch.dtype) -> int:
        return self._inner.block_bytes(block_size, dtype) if isinstance(self._inner, KvOwner) else 0

    def store(self, hidden: HiddenStates, committed: Sequence[CommittedRows]) -> None:
        if isinstance(self._inner, KvOwner):
            self._inner.store(hidden, committed)

    def read(self, contexts: Sequence[DraftContext]) -> None:
        if isinstance(self._inner, TextReader):
            self._inner.read(contexts)

    def propose(self, contexts: Sequence[DraftContext]) -> list[DraftTree]:
        if not self._is_chain:
            return self._inner.propose(contexts)
        # A small tree is wide before it is deep, so it need not hold the whole chain.
        wide = [
            dataclasses.replace(context, max_nodes=max(context.max_nodes, _CHAIN_FROM) if context.max_nodes else 0)
            for context in contexts
        ]
        trees = self._inner.propose(wide)
        return [likeliest_chain(tree, context.max_nodes) for tree, context in zip(trees, contexts, strict=True)]

    def extend(self, context: DraftContext, tree: DraftTree) -> None:
        self._inner.extend(context, tree)

    def extra_rows(self, context: DraftContext, tree: DraftTree) -> ExtraRows | None:
        return self._inner.extra_rows(context, tree)

    def observe(self, feedback: DraftFeedback) -> None:
        self.reliability.count(feedback.proposal, feedback.emitted)
        self._inner.observe(feedback)

    def release(self, request_id: str) -> None:
        self._inner.release(request_id)
