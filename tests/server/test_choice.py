"""One choice is a function of its tokens: how the engine grouped them changes nothing."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wire_app import smollm2_tokenizer, tiny_tokenizer

from engine.outputs import FinishReason, RequestOutput, TokenOutput
from engine.sampling_params import EngineRequest, SamplingParams
from server.choice import Choice, ChoiceDelta
from server.detokenizer import new_detokenizer
from server.stop_strings import StopMatcher
from server.tokenizer import Tokenizer

EOS = 1


@dataclass(frozen=True)
class Script:
    """What an engine would emit, and how the client wants it cut."""

    ids: tuple[int, ...]
    stops: tuple[str, ...] = ()
    min_tokens: int = 0
    finish: FinishReason = "length"
    stop_token_id: int | None = None


def play(tokenizer: Tokenizer, script: Script, sizes: list[int]) -> tuple[Choice, list[ChoiceDelta]]:
    request = EngineRequest("r", (5,), SamplingParams(min_tokens=script.min_tokens))
    choice = Choice(0, request, new_detokenizer(tokenizer), StopMatcher(script.stops))
    ids, deltas = list(script.ids), []
    while choice.finish_reason is None:
        size = sizes.pop(0) if sizes else 1
        burst, ids = ids[:size], ids[size:]
        last = not ids
        output = RequestOutput(
            "r",
            tuple(TokenOutput(token_id) for token_id in burst),
            is_decode_step=True,
            finish_reason=script.finish if last else None,
            stop_token_id=script.stop_token_id if last else None,
        )
        delta = choice.feed(output)
        deltas += [delta] if delta else []
    return choice, deltas


def text_of(deltas: list[ChoiceDelta]) -> str:
    return "".join(delta.text for delta in deltas)


def ids_of(deltas: list[ChoiceDelta]) -> list[int]:
    return [token.token_id for delta in deltas for token in delta.tokens]


def reference(tokenizer: Tokenizer, script: Script) -> tuple[str, int, str]:
    """Text, number of tokens and finish reason, from the decodings of all prefixes of the tokens."""
    settled = [tokenizer.decode(script.ids[:count]).rstrip("\ufffd") for count in range(len(script.ids) + 1)]
    for count in range(max(1, script.min_tokens), len(script.ids) + 1):
        for end in range(len(settled[count - 1]) + 1, len(settled[count]) + 1):
            matched = [len(stop) for stop in script.stops if settled[count][:end].endswith(stop)]
            if matched:
                return settled[count][: end - max(matched)], count, "stop"
    return tokenizer.decode(script.ids), len(script.ids), script.finish


PIECES = ["Hello", " world", "👋🏽", "世界", "END", "E", "N", "D", "\n\n", "é", " the", "<stop>", "日本", "😀"]
texts = st.lists(st.sampled_from(PIECES), min_size=1, max_size=14).map("".join)
STOPS = ["END", "\n\n", "世界", "界E", "<stop>", "D\n", "😀", " the"]
stops = st.lists(st.sampled_from(STOPS), max_size=3, unique=True)


@given(texts, stops, st.integers(0, 6), st.lists(st.integers(1, 6), max_size=20))
@settings(max_examples=300, deadline=None)
def test_any_bursts_give_the_reference_cut(text: str, stop: list[str], min_tokens: int, sizes: list[int]) -> None:
    tokenizer = smollm2_tokenizer()
    ids = tuple(tokenizer.encode(text))
    script = Script(ids, tuple(stop), min(min_tokens, len(ids)))
    expected_text, expected_count, expected_reason = reference(tokenizer, script)
    choice, deltas = play(tokenizer, script, sizes)
    assert text_of(deltas) == expected_text
    assert ids_of(deltas) == list(ids[:expected_count])
    assert choice.num_tokens == expected_count
    assert choice.finish_reason == expected_reason
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    whole, whole_deltas = play(tokenizer, script, [len(ids)])
    assert (text_of(whole_deltas), ids_of(whole_deltas)) == (text_of(deltas), ids_of(deltas))
    assert [o for d in whole_deltas for o in d.offsets] == [o for d in deltas for o in d.offsets]
    assert whole.finish_reason == choice.finish_reason


@pytest.mark.parametrize("offset", range(8))
@pytest.mark.parametrize("burst", range(1, 9))
def test_a_stop_string_at_each_offset_of_a_burst(offset: int, burst: int) -> None:
    tokenizer = tiny_tokenizer()
    text = "x" * offset + "END" + "leaked text"
    ids = tuple(tokenizer.encode(text))
    end = len(tokenizer.encode("x" * offset + "END"))
    assert tokenizer.decode(ids[:end]) == "x" * offset + "END"
    choice, deltas = play(tokenizer, Script(ids, ("END",)), [burst] * len(ids))
    assert text_of(deltas) == "x" * offset
    assert ids_of(deltas) == list(ids[:end])
    assert (choice.num_tokens, choice.finish_reason) == (end, "stop")


def test_a_stop_string_before_min_tokens_is_text_and_one_after_cuts() -> None:
    tokenizer = tiny_tokenizer()
    ids = tuple(tokenizer.encode("END x END y"))
    first = len(tokenizer.encode("END"))
    for min_tokens, expected in ((0, ""), (first, ""), (first + 1, "END x ")):
        _, deltas = play(tokenizer, Script(ids, ("END",), min_tokens), [3] * len(ids))
        assert text_of(deltas) == expected


def test_the_eos_token_counts_and_is_no_text() -> None:
    tokenizer = tiny_tokenizer()
    ids = (*tokenizer.encode("hi"), EOS)
    choice, deltas = play(tokenizer, Script(ids, finish="stop", stop_token_id=EOS), [9])
    assert (text_of(deltas), ids_of(deltas), choice.finish_reason) == ("hi", list(ids), "stop")


def test_a_stop_id_that_is_ordinary_text_is_not_shown() -> None:
    tokenizer = tiny_tokenizer()
    ids = tuple(tokenizer.encode("a!"))
    _, deltas = play(tokenizer, Script(ids, finish="stop", stop_token_id=ids[-1]), [])
    assert text_of(deltas) == "a"


def test_held_text_is_flushed_at_the_end() -> None:
    tokenizer = tiny_tokenizer()
    choice, deltas = play(tokenizer, Script(tuple(tokenizer.encode("so EN")), ("END",)), [])
    assert text_of(deltas) == "so EN"
    assert choice.finish_reason == "length"


def test_no_delta_ever_holds_part_of_a_character_or_of_a_stop_string() -> None:
    tokenizer = tiny_tokenizer()
    _, deltas = play(tokenizer, Script(tuple(tokenizer.encode("👋🏽 EN 世界 ENDx")), ("END",)), [])
    assert text_of(deltas) == "👋🏽 EN 世界 "
    assert all("\ufffd" not in delta.text and not delta.text.endswith(("E", "EN")) for delta in deltas[:-1])


def test_the_figures_stop_at_the_cut() -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenizer.encode("aENDbcd")
    end = len(tokenizer.encode("aEND"))
    tokens = tuple(TokenOutput(token_id, depth=i + 1, method="suffix") for i, token_id in enumerate(ids))
    choice = Choice(0, EngineRequest("r", (5,)), new_detokenizer(tokenizer), StopMatcher(("END",)))
    choice.feed(RequestOutput("r", tokens, {"suffix": (2,) * 9}, is_decode_step=True, max_draft_depth=12))
    report = choice.stats.report()
    assert report["num_accepted_draft_tokens"] == end
    assert report["num_draft_tokens"] == 18
    assert report["acceptance_histogram"] == [int(k == end) for k in range(13)]
    assert report["acceptance_length"] == end
    assert len(choice.kept) == end
    assert choice.times.finished is not None
