"""Cuts text at the first stop string, and holds back what may still become one."""

from __future__ import annotations

from collections.abc import Sequence


def _failure_table(pattern: str) -> list[int]:
    """For each prefix length of ``pattern`` the length of its longest proper border (Knuth, Morris and Pratt, 1977)."""
    table = [0] * (len(pattern) + 1)
    border = 0
    for i in range(1, len(pattern)):
        while border and pattern[i] != pattern[border]:
            border = table[border]
        border += pattern[i] == pattern[border]
        table[i + 1] = border
    return table


class StopMatcher:
    """Character by character: the earliest completing match wins; of two that complete together, the longer.

    The result does not depend on how the text is split into calls of ``feed``.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._patterns = [(stop, _failure_table(stop)) for stop in stops]
        self._lengths = [0] * len(stops)  # of each stop, how much of it the text ends with
        self._held = ""
        self.has_cut = False

    def feed(self, text: str, may_cut: bool = True) -> str:
        """The text that is now certain. With ``may_cut`` false a match is let through as text.

        After a match ``has_cut`` is true, and the text from the match on is gone.
        """
        if not self._patterns or not text:
            return text
        text = self._held + text
        for i in range(len(self._held), len(text)):
            matched = self._advance(text[i])
            if matched and may_cut:
                self.has_cut = True
                self._held = ""
                return text[: i + 1 - matched]
        certain = len(text) - max(self._lengths)
        self._held = text[certain:]
        return text[:certain]

    def flush(self) -> str:
        """What was held back, at the end of an answer that no stop string ended."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> int:
        """Takes one character; returns the length of the longest stop string that it completes, or 0."""
        longest = 0
        for k, (pattern, failure) in enumerate(self._patterns):
            length = self._lengths[k]
            while length and pattern[length] != character:
                length = failure[length]
            length += pattern[length] == character
            if length == len(pattern):
                longest = max(longest, length)
                length = failure[length]
            self._lengths[k] = length
        return longest
