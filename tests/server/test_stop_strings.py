"""The cut: earliest completing match, nothing of it leaked, independent of how the text is split."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.stop_strings import StopMatcher


def reference(text: str, stops: list[str]) -> tuple[str, bool]:
    """Reads the text character by character and looks for every stop string at each end."""
    for end in range(1, len(text) + 1):
        completed = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if completed:
            return text[: end - max(completed)], True
    return text, False


def run(pieces: list[str], stops: list[str]) -> tuple[str, bool]:
    matcher = StopMatcher(stops)
    result = ""
    for piece in pieces:
        result += matcher.feed(piece)
        if matcher.has_cut:
            return result, True
    return result + matcher.flush(), False


@given(st.lists(st.text("ab", max_size=4), max_size=12), st.lists(st.text("ab", min_size=1, max_size=5), max_size=4))
@settings(max_examples=1000, deadline=None)
def test_any_split_gives_the_reference_cut(pieces: list[str], stops: list[str]) -> None:
    assert run(pieces, stops) == reference("".join(pieces), stops)


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3))
def test_what_is_emitted_is_never_part_of_a_stop_string_to_come(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    emitted = ""
    for character in text:
        emitted += matcher.feed(character)
        if matcher.has_cut:
            return
    for stop in stops:  # whatever comes next, what was emitted stays a prefix of the final text
        assert reference(text + stop, stops)[0].startswith(emitted)


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("one END two", ["END"], "one "),
        ("aab", ["ab", "aab"], ""),
        ("xyz", ["yz", "y"], "x"),
        ("EEND", ["END"], "E"),
        ("ababac", ["abac"], "ab"),
        ("only EN", ["END"], "only EN"),
    ],
)
def test_examples(text: str, stops: list[str], expected: str) -> None:
    assert run(list(text), stops)[0] == expected
    assert run([text], stops)[0] == expected


def test_a_match_that_may_not_cut_yet_is_text() -> None:
    matcher = StopMatcher(["ab"])
    assert matcher.feed("ab", may_cut=False) == "ab"
    assert not matcher.has_cut
    assert matcher.feed("cab") == "c"
    assert matcher.has_cut
