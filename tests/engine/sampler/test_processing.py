"""The one function that makes a target row: order, every parameter, and tokens on the draft path."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from reference_sampler import edited_logits, filtered_logits

from engine.errors import RequestFailedError
from engine.sampler.processing import RowContext, gather_rows, is_greedy, target_row
from engine.sampling_params import SamplingParams

INF = float("inf")
GREEDY = SamplingParams(temperature=0.0)
PROMPT = [4, 5]


def processed(
    logits: list[float],
    sampling: SamplingParams,
    output: tuple[int, ...] = (),
    path: tuple[int, ...] = (),
    eos: tuple[int, ...] = (),
) -> list[float]:
    row = torch.tensor(logits, dtype=torch.float64)
    context = RowContext(sampling, [*PROMPT, *output], len(PROMPT), eos)
    return target_row(row, context, path).logits.tolist()


def greedy(**changes: object) -> SamplingParams:
    return dataclasses.replace(GREEDY, **changes)  # type: ignore[arg-type]


FLAT = [1.0, 2.0, -1.0, 0.5, 3.0, -2.0]


def test_nothing_asked_for_changes_nothing() -> None:
    assert processed(FLAT, GREEDY, output=(1, 1), path=(2,)) == FLAT
    assert processed(FLAT, SamplingParams(), output=(1, 1), path=(2,)) == FLAT


def test_logit_bias_adds() -> None:
    assert processed(FLAT, greedy(logit_bias=((0, 2.5), (5, -1.0)))) == [3.5, 2.0, -1.0, 0.5, 3.0, -3.0]


def test_repetition_penalty_covers_prompt_output_and_path_once_each() -> None:
    sampling = greedy(repetition_penalty=2.0)
    assert processed(FLAT, sampling, output=(1, 1, 4), path=(2, 2)) == [1.0, 1.0, -2.0, 0.5, 1.5, -4.0]


def test_presence_and_frequency_count_output_and_path_but_not_the_prompt() -> None:
    assert processed(FLAT, greedy(presence_penalty=0.5), output=(1, 1, 4), path=(2, 1)) == [
        1.0,
        1.5,
        -1.5,
        0.5,
        2.5,
        -2.0,
    ]
    assert processed(FLAT, greedy(frequency_penalty=0.5), output=(1, 1, 4), path=(2, 1)) == [
        1.0,
        0.5,
        -1.5,
        0.5,
        2.5,
        -2.0,
    ]


def test_bias_comes_before_the_repetition_penalty_and_that_before_presence() -> None:
    sampling = greedy(logit_bias=((4, -5.0),), repetition_penalty=2.0, presence_penalty=1.0)
    assert processed(FLAT, sampling, path=(4,))[4] == (3.0 - 5.0) * 2.0 - 1.0


def test_path_tokens_count_for_their_own_row_alone() -> None:
    """The base is computed once a step; a longer path must not leave a trace in it."""
    sampling = greedy(repetition_penalty=2.0, presence_penalty=1.0)
    context = RowContext(sampling, [*PROMPT, 1], 2)
    rows = [torch.tensor(FLAT, dtype=torch.float64) for _ in range(3)]
    before, long, after = (target_row(row, context, path) for row, path in zip(rows, [(), (0, 2), ()], strict=True))
    assert before.logits.tolist() == after.logits.tolist()
    assert long.logits.tolist() != before.logits.tolist()


@pytest.mark.parametrize(("output", "path", "is_banned"), [((), (), True), ((0,), (0,), True), ((0, 0), (1,), False)])
def test_min_tokens_bans_eos_and_stop_ids_exactly_until_it_is_reached(
    output: tuple[int, ...], path: tuple[int, ...], is_banned: bool
) -> None:
    for ignore_eos in (False, True):
        sampling = greedy(min_tokens=3, stop_token_ids=(1,), ignore_eos=ignore_eos)
        row = processed(FLAT, sampling, output, path, eos=(4, 5))
        assert [row[token] == -INF for token in (1, 4, 5)] == [is_banned] * 3
        assert [row[token] for token in (0, 2, 3)] == [FLAT[token] for token in (0, 2, 3)]


def test_bad_words_ban_the_last_id_after_the_prefix() -> None:
    sampling = greedy(bad_words=((3,), (0, 1), (1, 2, 4)))
    banned = {
        ((), ()): {3},
        ((0,), ()): {3, 1},
        ((1,), (2,)): {3, 4},
        ((), (1, 2)): {3, 4},
        ((1,), (2, 0)): {3, 1},
        ((2,), ()): {3},
    }
    for (output, path), expected in banned.items():
        row = processed(FLAT, sampling, output, path)
        assert {token for token, value in enumerate(row) if value == -INF} == expected


def test_a_bad_word_does_not_start_in_the_prompt() -> None:
    assert processed(FLAT, greedy(bad_words=((5, 1),))) == FLAT
    assert processed(FLAT, greedy(bad_words=((5, 1),)), output=(5,))[1] == -INF


def test_temperature_divides_and_filters_follow_in_order() -> None:
    assert processed([2.0, 1.0, -4.0], SamplingParams(temperature=2.0)) == [1.0, 0.5, -2.0]
    # Probabilities .4 .3 .2 .1: alone, top_p 0.75 keeps three; after top_k 2 the first two are .571 .429.
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64).log().tolist()
    assert [value > -INF for value in processed(logits, SamplingParams(top_p=0.75))] == [True, True, True, False]
    assert [value > -INF for value in processed(logits, SamplingParams(top_k=2, top_p=0.55))] == [True, False] + [
        False
    ] * 2
    assert [value > -INF for value in processed(logits, SamplingParams(min_p=0.49))] == [True, True, True, False]
    assert [value > -INF for value in processed(logits, SamplingParams(temperature=0.5, min_p=0.49))] == [
        True,
        True,
        False,
        False,
    ]


def test_greedy_ignores_the_filters() -> None:
    assert processed(FLAT, greedy(top_k=1, top_p=0.1, min_p=0.9)) == FLAT
    assert is_greedy(SamplingParams(temperature=1e-9))
    assert not is_greedy(SamplingParams(temperature=0.01))


def test_margins_keep_the_row_before_the_filters() -> None:
    row = torch.tensor(FLAT)
    context = RowContext(SamplingParams(top_k=2, return_margins=True), PROMPT, 2)
    target = target_row(row, context)
    assert target.unfiltered.tolist() == FLAT
    assert (target.logits > -INF).tolist() == [False, True, False, False, True, False]


def test_no_token_left_is_the_request_s_own_error() -> None:
    with pytest.raises(RequestFailedError):
        processed([1.0, 2.0], greedy(bad_words=((0,), (1,))))
    with pytest.raises(RequestFailedError):
        processed([1.0, -INF], greedy(bad_words=((0,),)))


@pytest.mark.parametrize("token", [-1, 6, 2**40])
def test_ids_outside_the_vocabulary_are_refused(token: int) -> None:
    for sampling in (
        greedy(logit_bias=((token, 1.0),)),
        greedy(bad_words=((token,),)),
        greedy(min_tokens=2, stop_token_ids=(token,)),
    ):
        with pytest.raises(ValueError, match="outside the vocabulary"):
            processed(FLAT, sampling)
    with pytest.raises(ValueError, match="outside the vocabulary"):
        processed(FLAT, greedy(presence_penalty=1.0), path=(token,))


def test_rows_are_copied_to_fp32_and_fp64_stays() -> None:
    for dtype, expected in (
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ):
        logits = torch.arange(12.0).reshape(3, 4).to(dtype)
        rows = gather_rows(logits, [2, 0, 2])
        assert rows.dtype == expected
        assert rows.tolist() == [[8, 9, 10, 11], [0, 1, 2, 3], [8, 9, 10, 11]]
        rows.zero_()
        assert logits[2].tolist() == [8, 9, 10, 11]


VOCAB = 6
TOKENS = st.integers(0, VOCAB - 1)
SAMPLINGS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_k=st.integers(0, VOCAB + 1),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.1, 0.6]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    presence_penalty=st.sampled_from([0.0, 0.7, -0.7]),
    frequency_penalty=st.sampled_from([0.0, 0.4, -0.4]),
    logit_bias=st.lists(st.tuples(TOKENS, st.floats(-5, 5)), max_size=2).map(tuple),
    bad_words=st.lists(st.lists(TOKENS, min_size=1, max_size=3).map(tuple), max_size=2).map(tuple),
    min_tokens=st.integers(0, 4),
    stop_token_ids=st.sampled_from([(), (3,)]),
)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.floats(-6, 6), min_size=VOCAB, max_size=VOCAB, unique=True),
    SAMPLINGS,
    st.lists(TOKENS, max_size=4),
    st.lists(TOKENS, max_size=4),
)
def test_every_combination_equals_the_slow_reference(
    logits: list[float], sampling: SamplingParams, output: list[int], path: list[int]
) -> None:
    expected = edited_logits(logits, sampling, PROMPT, [*output, *path], (5,))
    finite = sorted(value for value in expected if value > -INF)
    assume(finite)
    if sampling.temperature:
        # Where rounding decides, the two may differ: near-equal logits, and cuts within 1e-9 of a token.
        assume(all(high - low > 1e-9 for low, high in itertools.pairwise(finite)))
        edited, expected = expected, filtered_logits(expected, sampling)
        for nudge in (1 - 1e-9, 1 + 1e-9):
            top_p = sampling.top_p if sampling.top_p == 1.0 else sampling.top_p * nudge
            nudged = dataclasses.replace(sampling, top_p=top_p, min_p=sampling.min_p * nudge)
            assume(filtered_logits(edited, nudged) == expected)
    assert processed(logits, sampling, tuple(output), tuple(path), (5,)) == pytest.approx(expected, rel=1e-9, abs=1e-9)
