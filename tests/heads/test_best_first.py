"""The best tree of n nodes, against trying every tree."""

from __future__ import annotations

import itertools
import random

import pytest

from heads.best_first import best_tree


def every_path(probabilities: list[list[float]]) -> list[float]:
    """Probability of every path; the n largest form the best tree, since no child is likelier than its parent."""
    found = []
    for depth in range(1, len(probabilities) + 1):
        for choice in itertools.product(*probabilities[:depth]):
            product = 1.0
            for factor in choice:
                product *= factor
            found.append(product)
    return sorted(found, reverse=True)


@pytest.mark.parametrize("seed", range(20))
def test_no_tree_of_as_many_nodes_is_better(seed: int) -> None:
    draw = random.Random(seed)
    lists = [sorted((draw.random() for _ in range(4)), reverse=True) for _ in range(3)]
    nodes = best_tree(lists, 9)
    assert [node.probability for node in nodes] == pytest.approx(every_path(lists)[:9])
    for index, node in enumerate(nodes):
        assert node.parent < index
        assert node.depth == (1 if node.parent < 0 else nodes[node.parent].depth + 1)
    assert len({(node.parent, node.rank) for node in nodes}) == len(nodes)


def test_bounds() -> None:
    assert best_tree([], 5) == []
    assert best_tree([[]], 5) == []
    assert best_tree([[0.5]], 0) == []
    assert len(best_tree([[0.5], [], [0.9]], 5)) == 1
    assert [node.probability for node in best_tree([[0.5, 0.4], [0.5]], 9, 0.21)] == [0.5, 0.4, 0.25]
