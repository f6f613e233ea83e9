"""Token ids to text, one token at a time: the deltas joined are the decoding of all ids without special tokens."""

from __future__ import annotations

import codecs
from typing import Protocol

from server.tokenizer import Tokenizer

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_MAX_HELD = 16  # tokens that may wait for the rest of a character; no character is longer


class Detokenizer(Protocol):
    """``push`` gives the text that a token makes certain, never a part of a character; ``flush`` gives the rest."""

    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


def new_detokenizer(tokenizer: Tokenizer) -> Detokenizer:
    """A fresh detokenizer for one choice."""
    return ByteLevelDetokenizer(tokenizer) if tokenizer.is_byte_level else WindowDetokenizer(tokenizer)


class ByteLevelDetokenizer:
    """For byte-level BPE, where tokens are byte strings: concatenation and an incremental UTF-8 decoder are exact."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._bytes_of = tokenizer.token_bytes
        self._special_ids = tokenizer.special_ids
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return "" if token_id in self._special_ids else self._utf8.decode(self._bytes_of(token_id))

    def flush(self) -> str:
        return self._utf8.decode(b"", True)


class WindowDetokenizer:
    """For decoders with context (sentencepiece): decodes the new tokens behind those of the last delta.

    A run of byte-fallback tokens is text only when it ends, because one wrong byte changes the reading of the whole
    run; it is not decoded meanwhile, so a long one costs no more than a short one. Special tokens and ids outside the
    vocabulary never enter the window: they decode to nothing, and the decoder would then strip a leading space that
    is not the first.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []
        self._context_text = ""
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        if token_id in self._tokenizer.special_ids or not self._tokenizer.token_bytes(token_id):
            return ""
        self._pending.append(token_id)
        if self._tokenizer.is_byte_fallback(token_id):
            return ""
        return self._advance(at_end=False)

    def flush(self) -> str:
        return self._advance(at_end=True) if self._pending else ""

    def _advance(self, at_end: bool) -> str:
        text = self._tokenizer.decode(self._context + self._pending)
        if not at_end and text.endswith(_REPLACEMENT) and len(self._pending) < _MAX_HELD:
            return ""
        delta = text[len(self._context_text) :]
        self._context, self._pending = self._pending, []
        self._context_text = self._tokenizer.decode(self._context)
        return delta
