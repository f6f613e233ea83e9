"""Near-duplicates: the same as by comparing every pair, and where the threshold lies."""

from __future__ import annotations

import random

import pytest

from server.training.likeness import SHINGLE, THRESHOLD, jaccard, shingles, without_near_duplicates


def test_shingles_are_runs_of_five_words_or_all_words() -> None:
    assert SHINGLE == 5
    assert shingles("One, two THREE four five; six") == {
        ("one", "two", "three", "four", "five"),
        ("two", "three", "four", "five", "six"),
    }
    assert shingles("Why not?") == {("why", "not")}
    assert shingles("???") == {("???",)}


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [("a b c d e f", "a b c d e f", 1.0), ("a b c d e f", "a b c d e g", 1 / 3), ("a b", "a b c", 0.0)],
)
def test_jaccard_is_shared_over_all(left: str, right: str, expected: float) -> None:
    assert jaccard(shingles(left), shingles(right)) == pytest.approx(expected)


def numbered(count: int) -> str:
    return " ".join(f"w{index}" for index in range(count))


def test_the_threshold_is_part_of_what_is_left_out() -> None:
    """Of 12 words 8 shingles. One word more: 8 of 9 shared. Two of 12 changed at the end: 6 of 10."""
    assert THRESHOLD == 0.8
    whole = numbered(12)
    assert list(without_near_duplicates([whole, whole + " more", numbered(10) + " x y", whole.upper()])) == [0, 2]
    # 8 of 10 shared is exactly the threshold.
    assert list(without_near_duplicates([whole, numbered(14)])) == [0]
    assert list(without_near_duplicates([whole, numbered(15)])) == [0, 1]


def test_short_texts_are_the_same_or_not() -> None:
    texts = ["Hello", "hello!", "Hello there", "???", "!!!", "???"]
    assert list(without_near_duplicates(texts)) == [0, 2, 3, 4]


@pytest.mark.parametrize("seed", range(5))
def test_it_finds_what_comparing_every_pair_finds(seed: int) -> None:
    """Texts made from few templates, so that likeness lies on both sides of the threshold."""
    draw = random.Random(seed)
    texts = []
    for _ in range(150):
        words = [
            f"w{index}" for index in range(draw.randrange(3) * 100, draw.randrange(3) * 100 + draw.randint(205, 240))
        ]
        words = words[-draw.randint(3, 40) :]
        for _ in range(draw.randrange(3)):
            words[draw.randrange(len(words))] = f"v{draw.randrange(4)}"
        texts.append(" ".join(words))
    kept: list[int] = []
    for index, text in enumerate(texts):
        if all(jaccard(shingles(text), shingles(texts[other])) < THRESHOLD for other in kept):
            kept.append(index)
    assert list(without_near_duplicates(texts)) == kept
    assert 0 < len(kept) < len(texts)
