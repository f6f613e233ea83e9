"""A drafter that is looked at: its likeliest chain, and how often its nodes are right."""

from __future__ import annotations

import pytest

from engine.spec_decode.tree import ROOT, DraftTree
from engine.spec_decode.watched import Reliability, likeliest_chain


def branching() -> DraftTree:
    """5 (0.6) -> 7 (0.3), 8 (0.12); 6 (0.2)."""
    tree = DraftTree()
    tree.add(6, ROOT, 0.2, "m")
    first = tree.add(5, ROOT, 0.6, "m")
    tree.add(8, first, 0.12, "m")
    tree.add(7, first, 0.3, "m")
    return tree


def test_the_chain_takes_the_likeliest_child_at_every_depth() -> None:
    chain = likeliest_chain(branching(), 4)
    assert (chain.tokens, chain.parents, chain.survival) == ([5, 7], [ROOT, 0], [0.6, 0.3])
    assert chain.methods == ["m", "m"]
    assert likeliest_chain(branching(), 1).tokens == [5]
    assert len(likeliest_chain(branching(), 0)) == len(likeliest_chain(DraftTree(), 4)) == 0


def counted(emitted: list[int]) -> dict[float, tuple[int, float, int]]:
    found = Reliability()
    found.count(branching(), emitted)
    return {one.upto: (one.nodes, pytest.approx(one.expected), one.right) for one in found.buckets if one.nodes}


def test_a_node_counts_where_its_parent_was_right() -> None:
    """By its chance under the parent: 0.2 and 0.5 of the first node's children."""
    assert counted([5, 7, 1]) == {0.65: (1, 0.6, 1), 0.25: (2, 0.4, 0), 0.5: (1, 0.5, 1)}
    assert counted([6, 7]) == {0.65: (1, 0.6, 0), 0.25: (1, 0.2, 1)}


def test_nodes_beyond_the_text_do_not_count() -> None:
    assert counted([5]) == {0.65: (1, 0.6, 1), 0.25: (1, 0.2, 0)}
