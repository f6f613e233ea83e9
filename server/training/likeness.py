"""Prompts that say nearly the same: the Jaccard similarity of their shingles, computed exactly.

Exact rather than MinHash: at some ten thousand prompts it takes about a second, it needs no SciPy, and the list of
prompts, on which the split and a resumed run depend, cannot move with a library's hash functions.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence

SHINGLE = 5  # words
THRESHOLD = 0.8
"""Prompts at least this similar are near-duplicates."""

Shingles = frozenset[tuple[str, ...]]


def words(text: str) -> tuple[str, ...]:
    """In lower case and without punctuation."""
    return tuple(re.findall(r"[^\W_]+", text.lower()))


def shingles(text: str) -> Shingles:
    """Every run of ``SHINGLE`` words; of a shorter text all its words as one, of a text without words the text."""
    found = words(text) or (text,)
    return frozenset(found[start : start + SHINGLE] for start in range(max(1, len(found) - SHINGLE + 1)))


def jaccard(left: Shingles, right: Shingles) -> float:
    """Shared shingles over all of both, 0 to 1."""
    shared = len(left & right)
    return shared / (len(left) + len(right) - shared)


def without_near_duplicates(texts: Sequence[str]) -> Iterator[int]:
    """Indices of the texts that are less than ``THRESHOLD`` similar to every text kept before them.

    Prefix filtering (Chaudhuri et al., 2006; Bayardo et al., 2007): of two sets so similar, the rarest shingles of one
    hold at least one of the rarest of the other, so only those are looked up and the index stays small.
    """
    sets = [shingles(text) for text in texts]
    frequency = Counter(shingle for one in sets for shingle in one)
    index: dict[tuple[str, ...], list[int]] = {}
    for number, one in enumerate(sets):
        rarest = sorted(one, key=lambda shingle: (frequency[shingle], shingle))
        rarest = rarest[: len(one) - math.ceil(THRESHOLD * len(one)) + 1]
        candidates = {other for shingle in rarest for other in index.get(shingle, ())}
        if any(jaccard(one, sets[other]) >= THRESHOLD for other in candidates):
            continue
        for shingle in rarest:
            index.setdefault(shingle, []).append(number)
        yield number
