"""The draft tree: what drafters propose, the forward pass computes in parallel and the verifier walks.

The root is the last committed token and is not stored; node i hangs under ``parents[i]`` (-1 is the root) at depth
``depths[i]`` >= 1. Parents come before their children. A chain is a tree of one branch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

ROOT = -1


@dataclass(slots=True)
class DraftTree:
    """Nodes in parallel lists.

    survival: estimated probability that the node and all its ancestors are accepted; never larger than the parent's.
    methods: the drafter that proposed the node (the first one, where several did).
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    survival: list[float] = field(default_factory=list)
    methods: list[str] = field(default_factory=list)
    _children: dict[tuple[int, int], int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def max_depth(self) -> int:
        return max(self.depths, default=0)

    def add(self, token: int, parent: int, survival: float, method: str) -> int:
        """Adds a node, or finds it if ``parent`` already has a child with this token; returns its index.

        A node proposed twice stays one node, belongs to its first proposer, and keeps the larger survival.
        """
        bound = survival if parent == ROOT else min(survival, self.survival[parent])
        known = self._children.get((parent, token))
        if known is not None:
            self.survival[known] = max(self.survival[known], bound)
            return known
        node = len(self.tokens)
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(1 if parent == ROOT else self.depths[parent] + 1)
        self.survival.append(bound)
        self.methods.append(method)
        self._children[parent, token] = node
        return node

    def copy(self) -> DraftTree:
        return DraftTree(
            self.tokens[:], self.parents[:], self.depths[:], self.survival[:], self.methods[:], dict(self._children)
        )

    def child(self, node: int, token: int) -> int | None:
        """The child of ``node`` that carries ``token``, or None. Siblings have distinct tokens."""
        return self._children.get((node, token))

    def ancestors(self, node: int) -> list[int]:
        """The nodes from the root's child down to ``node`` itself."""
        path = []
        while node != ROOT:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def cutoff(self, max_nodes: int, least: float) -> float:
        """The survival that a further node must exceed to be among the ``max_nodes`` likeliest; at least ``least``.

        Where no node is allowed, none is likely enough.
        """
        if max_nodes == 0:
            return math.inf
        if len(self) < max_nodes:
            return least
        return max(least, sorted(self.survival, reverse=True)[max_nodes - 1])

    def path_tokens(self, node: int) -> list[int]:
        return [self.tokens[step] for step in self.ancestors(node)]

    def count_by_depth(self) -> dict[str, tuple[int, ...]]:
        """For each method, the number of its nodes at each position (position 0 is depth 1)."""
        counts: dict[str, list[int]] = {}
        for depth, method in zip(self.depths, self.methods, strict=True):
            row = counts.setdefault(method, [])
            row.extend([0] * (depth - len(row)))
            row[depth - 1] += 1
        return {method: tuple(row) for method, row in counts.items()}

    def pruned(self, max_nodes: int, max_depth: int) -> DraftTree:
        """The ``max_nodes`` likeliest nodes no deeper than ``max_depth``, likeliest chain first.

        Survival never grows along a path, so the n most probable nodes always form a tree (ties go to the earlier
        node). The likeliest chain comes first so that, accepted, its KV already lies in place.
        """
        allowed = [node for node in range(len(self)) if self.depths[node] <= max_depth]
        kept = set(sorted(allowed, key=lambda node: (-self.survival[node], self.depths[node], node))[:max_nodes])
        chain = self._likeliest_chain(kept)
        in_chain = set(chain)
        return self._subset([*chain, *(node for node in range(len(self)) if node in kept and node not in in_chain)])

    def _likeliest_chain(self, kept: set[int]) -> list[int]:
        best: dict[int, int] = {}
        for node in sorted(kept):
            held = best.get(self.parents[node])
            if held is None or self.survival[node] > self.survival[held]:
                best[self.parents[node]] = node
        chain: list[int] = []
        step = best.get(ROOT)
        while step is not None:
            chain.append(step)
            step = best.get(step)
        return chain

    def _subset(self, order: Sequence[int]) -> DraftTree:
        subset = DraftTree()
        renumbered = {ROOT: ROOT}
        for node in order:
            renumbered[node] = subset.add(
                self.tokens[node], renumbered[self.parents[node]], self.survival[node], self.methods[node]
            )
        return subset


def merged(trees: Iterable[DraftTree]) -> DraftTree:
    """One tree holding every node of ``trees``; equal paths are one node that belongs to the first tree."""
    rest = iter(trees)
    result = next(rest, DraftTree()).copy()
    for tree in rest:
        renumbered = {ROOT: ROOT}
        for node, token in enumerate(tree.tokens):
            parent = renumbered[tree.parents[node]]
            renumbered[node] = result.add(token, parent, tree.survival[node], tree.methods[node])
    return result
