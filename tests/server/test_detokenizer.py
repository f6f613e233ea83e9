"""Deltas joined are the decoding of all ids, whatever the ids."""

from __future__ import annotations

import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast
from wire_app import smollm2_tokenizer, tiny_tokenizer

from server.detokenizer import ByteLevelDetokenizer, Detokenizer, WindowDetokenizer, new_detokenizer
from server.tokenizer import Tokenizer

TEXTS = ("Hi 👋🏽, 世界! 👨‍👩‍👧 naïve café", "  two  spaces\n\n\tтекст ", "日本語のテキスト😀😀", "a\u200bb\ufffdc")


def sentencepiece_tokenizer() -> Tokenizer:
    """Llama-2's kind: a space mark, byte fallback, and a leading space that the decoder strips."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁Hello", "▁there", "world", "é", "!", "▁▁"]
    backend = tokenizers.Tokenizer(
        models.BPE({p: i for i, p in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>"))


SENTENCEPIECE = sentencepiece_tokenizer()


def joined(detokenizer: Detokenizer, ids: list[int]) -> str:
    return "".join(detokenizer.push(token_id) for token_id in ids) + detokenizer.flush()


@given(st.lists(st.integers(0, 305), max_size=30))
@settings(deadline=None)
def test_any_byte_level_ids(ids: list[int]) -> None:
    tokenizer = tiny_tokenizer()
    assert joined(new_detokenizer(tokenizer), ids) == tokenizer.decode(ids)


@given(st.lists(st.integers(0, 270), max_size=30))
@settings(max_examples=400, deadline=None)
def test_any_sentencepiece_ids(ids: list[int]) -> None:
    assert joined(new_detokenizer(SENTENCEPIECE), ids) == SENTENCEPIECE.decode(ids)


@given(st.lists(st.sampled_from([0, 1, 2, *range(259, 266), 3 + 0xC3, 3 + 0xA9, 3 + 0x20, 3 + 0xFF]), max_size=12))
@settings(max_examples=400, deadline=None)
def test_sentencepiece_runs_of_bytes_spaces_and_special_tokens(ids: list[int]) -> None:
    assert joined(new_detokenizer(SENTENCEPIECE), ids) == SENTENCEPIECE.decode(ids)


def test_the_kinds_are_told_apart() -> None:
    assert isinstance(new_detokenizer(tiny_tokenizer()), ByteLevelDetokenizer)
    assert isinstance(new_detokenizer(SENTENCEPIECE), WindowDetokenizer)


def test_real_text_comes_back_whole_and_never_in_part_of_a_character() -> None:
    tokenizer = smollm2_tokenizer()
    for text in TEXTS:
        detokenizer = new_detokenizer(tokenizer)
        deltas = [detokenizer.push(token_id) for token_id in tokenizer.encode(text)]
        assert "".join(deltas) == text
        assert detokenizer.flush() == ""
        assert "\ufffd" not in "".join(deltas).replace("b\ufffdc", "")


@given(st.text(max_size=40))
@settings(deadline=None)
def test_any_text_comes_back_from_the_real_tokenizer(text: str) -> None:
    tokenizer = smollm2_tokenizer()
    ids = tokenizer.encode(text)
    assert joined(new_detokenizer(tokenizer), ids) == tokenizer.decode(ids)


def test_a_character_that_never_ends_is_flushed() -> None:
    tokenizer = tiny_tokenizer()
    detokenizer = new_detokenizer(tokenizer)
    ids = tokenizer.encode("😀")[:-1]
    assert [detokenizer.push(token_id) for token_id in ids] == [""] * len(ids)
    assert detokenizer.flush() == "\ufffd"
