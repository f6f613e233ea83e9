"""The best tree of n nodes, given for each depth the candidate tokens and their probabilities.

A child is never likelier than its parent, so taking the likeliest open node n times gives the tree of n nodes with the
largest expected number of accepted tokens. The candidates of a depth do not depend on the path (Medusa heads are
independent of each other), which makes the tree a product of lists.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

ROOT = -1


@dataclass(frozen=True, slots=True)
class Node:
    """parent: index of an earlier node, or -1. rank: which candidate of its depth. probability: of the whole path."""

    parent: int
    depth: int
    rank: int
    probability: float


def best_tree(probabilities: Sequence[Sequence[float]], max_nodes: int, min_probability: float = 0.0) -> list[Node]:
    """At most ``max_nodes`` nodes, likeliest first; a path under ``min_probability`` is left out.

    probabilities[d]: of the candidates at depth d + 1, best first, each the chance that the candidate is right where
    its parent is.
    """
    nodes: list[Node] = []
    # (-probability, order, parent, depth, rank); the order makes ties go to the node that was opened first.
    open_nodes: list[tuple[float, int, int, int, int]] = []
    order = 0

    def offer(parent: int, depth: int, rank: int) -> None:
        nonlocal order
        if depth > len(probabilities) or rank >= len(probabilities[depth - 1]):
            return
        above = 1.0 if parent == ROOT else nodes[parent].probability
        probability = above * probabilities[depth - 1][rank]
        if probability >= min_probability:
            heapq.heappush(open_nodes, (-probability, order, parent, depth, rank))
            order += 1

    offer(ROOT, 1, 0)
    while open_nodes and len(nodes) < max_nodes:
        negative, _, parent, depth, rank = heapq.heappop(open_nodes)
        nodes.append(Node(parent, depth, rank, -negative))
        offer(parent, depth, rank + 1)
        offer(len(nodes) - 1, depth + 1, 0)
    return nodes
