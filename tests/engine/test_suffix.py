"""The suffix drafter finds what followed before, and learns how far to trust it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.sampling_params import SamplingParams
from engine.spec_decode.acceptance import AcceptanceTable, Buckets
from engine.spec_decode.drafter import DraftContext, DraftFeedback
from engine.spec_decode.suffix import MAX_MATCH, SuffixDrafter, SuffixIndex
from engine.spec_decode.tree import ROOT


def context(tokens: list[int], depth: int = 8, nodes: int = 16) -> DraftContext:
    return DraftContext("r", tokens, 1, SamplingParams(), depth, nodes)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60))
def test_matches_are_real_and_the_longest_is_found(tokens: list[int]) -> None:
    index = SuffixIndex()
    for length in range(1, len(tokens) + 1):
        index.extend(tokens[:length])
    found = index.matches(tokens)
    last = len(tokens)

    def overlap(end: int) -> int:
        size = 0
        while size <= end and size < MAX_MATCH and tokens[end - size] == tokens[last - 1 - size]:
            size += 1
        return size

    best = max((overlap(end) for end in range(last - 1)), default=0)
    assert (found[0][0] if found else 0) == best or len(tokens) > 17
    for length, end in found:
        assert overlap(end) == length


def test_copies_what_followed_the_longest_match() -> None:
    tokens = [9, 1, 2, 3, 4, 5, 6, 7, 8, 2, 9, 1, 2, 3]
    tree = SuffixDrafter().propose([context(tokens)])[0]
    assert tree.tokens[:5] == [4, 5, 6, 7, 8]
    assert tree.parents[:5] == [ROOT, 0, 1, 2, 3]


def test_branches_where_the_text_went_on_differently() -> None:
    tokens = [5, 1, 2, 3, 7, 6, 1, 2, 3, 8, 4, 1, 2, 3, 7, 9, 1, 2, 3]
    tree = SuffixDrafter().propose([context(tokens)])[0]
    seven, eight = tree.child(ROOT, 7), tree.child(ROOT, 8)
    assert seven is not None
    assert eight is not None
    assert tree.survival[seven] > tree.survival[eight]


def test_what_could_not_pay_is_not_proposed() -> None:
    tokens = [5, 1, 2, 3, 7, 6, 1, 2, 3, 8, 4, 1, 2, 3, 7, 9, 1, 2, 3]
    whole = SuffixDrafter().propose([context(tokens)])[0]
    least = sorted(whole.survival)[len(whole) // 2]
    tree = SuffixDrafter().propose([replace(context(tokens), least=least)])[0]
    assert sorted(tree.survival) == [survival for survival in sorted(whole.survival) if survival >= least]
    assert len(SuffixDrafter().propose([replace(context(tokens), least=0.99)])[0]) == 0


def test_respects_the_limits() -> None:
    tokens = list(range(20)) * 2
    assert SuffixDrafter().propose([context(tokens, depth=3)])[0].max_depth == 3
    assert len(SuffixDrafter().propose([context(tokens, nodes=0)])[0]) == 0


def test_learns_from_refusals_and_from_hits() -> None:
    tokens = [1, 2, 3, 4, 5, 6, 1, 2, 3]
    drafter = SuffixDrafter()
    before = drafter.propose([context(tokens)])[0].survival[0]
    for _ in range(20):
        tree = drafter.propose([context(tokens)])[0]
        drafter.observe(DraftFeedback("r", tree, [0]))
    worse = drafter.propose([context(tokens)])[0]
    for _ in range(60):
        tree = drafter.propose([context(tokens)])[0]
        drafter.observe(DraftFeedback("r", tree, [4, 5, 6]))
    better = drafter.propose([context(tokens)])[0]
    assert worse.survival[0] < before / 2
    assert better.survival[0] > before


def test_a_released_request_leaves_nothing_but_what_was_learned() -> None:
    drafter = SuffixDrafter()
    drafter.propose([context([1, 2, 1])])
    drafter.release("r")
    assert drafter._requests == {}


def test_a_new_request_starts_from_what_others_taught() -> None:
    shared = AcceptanceTable(Buckets((1, 2, 8), (0.1, 0.2, 0.3), prior_weight=6.0, decay=0.97))
    first = shared.child()
    for _ in range(50):
        first.record(2, right=True)
    assert shared.rate(2) > 0.8
    assert shared.child().rate(2) == pytest.approx(shared.rate(2))
    assert shared.rate(1) == pytest.approx(0.1)
    assert shared.rates([1, 3, 99]) == pytest.approx([0.1, 0.3, 0.3])
