"""The draft tree: merging, pruning, order."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from engine.spec_decode.tree import ROOT, DraftTree, merged


def random_tree(seed: int, size: int) -> DraftTree:
    draw, tree = random.Random(seed), DraftTree()
    for _ in range(size):
        tree.add(draw.randrange(5), draw.randrange(-1, len(tree)), draw.random(), draw.choice("ab"))
    return tree


def paths(tree: DraftTree) -> dict[tuple[int, ...], str]:
    return {tuple(tree.path_tokens(node)): tree.methods[node] for node in range(len(tree))}


def test_a_node_proposed_twice_is_one_node_of_its_first_proposer() -> None:
    tree = DraftTree()
    first = tree.add(7, ROOT, 0.3, "suffix")
    assert tree.add(7, ROOT, 0.6, "medusa") == first
    assert (tree.methods, tree.survival) == (["suffix"], [0.6])


@given(st.integers(0, 999), st.integers(0, 30), st.integers(0, 30), st.integers(0, 6))
def test_pruning_keeps_the_likeliest_nodes_as_a_tree(seed: int, size: int, nodes: int, depth: int) -> None:
    tree = random_tree(seed, size)
    pruned = tree.pruned(nodes, depth)
    assert set(paths(pruned)) <= set(paths(tree))
    assert pruned.max_depth <= depth
    allowed = sorted((s for s, d in zip(tree.survival, tree.depths, strict=True) if d <= depth), reverse=True)
    assert sorted(pruned.survival, reverse=True) == allowed[:nodes]
    assert all(parent < node for node, parent in enumerate(pruned.parents))


def test_the_likeliest_chain_comes_first() -> None:
    tree = DraftTree()
    weak = tree.add(1, ROOT, 0.2, "a")
    strong = tree.add(2, ROOT, 0.7, "a")
    tree.add(3, weak, 0.1, "a")
    tree.add(4, strong, 0.6, "a")
    pruned = tree.pruned(4, 4)
    assert pruned.tokens[:2] == [2, 4]
    assert pruned.parents[:2] == [ROOT, 0]


@given(st.integers(0, 999), st.integers(0, 20), st.integers(0, 20))
def test_merging_keeps_every_path_and_the_first_owner(seed: int, one: int, two: int) -> None:
    first, second = random_tree(seed, one), random_tree(seed + 1, two)
    both = paths(merged([first, second]))
    assert both == paths(second) | paths(first)


def test_survival_never_grows_along_a_path() -> None:
    tree = random_tree(3, 30)
    assert all(tree.survival[n] <= tree.survival[p] for n, p in enumerate(tree.parents) if p != ROOT)


def test_counts_by_method_and_position() -> None:
    tree = DraftTree()
    node = tree.add(1, ROOT, 0.9, "a")
    tree.add(2, ROOT, 0.5, "b")
    tree.add(3, node, 0.4, "b")
    assert tree.count_by_depth() == {"a": (1,), "b": (1, 1)}


def test_what_a_further_node_must_exceed() -> None:
    tree = DraftTree()
    for token, survival in ((1, 0.9), (2, 0.5), (3, 0.2)):
        tree.add(token, ROOT, survival, "a")
    assert [tree.cutoff(nodes, 0.3) for nodes in (1, 2, 3, 4)] == [0.9, 0.5, 0.3, 0.3]
    assert tree.cutoff(0, 0.3) > 1.0, "no node is allowed"
    assert DraftTree().cutoff(2, 0.3) == 0.3
