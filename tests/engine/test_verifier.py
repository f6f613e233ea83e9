"""The verifier: the same tokens for every tree, rows and nodes that fit them, and faults that stay with their owner."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_sampler import next_token

from engine.config import VerifierName
from engine.sampling_params import SamplingParams
from engine.spec_decode import rejection
from engine.spec_decode.tree import ROOT, DraftTree
from engine.spec_decode.verifier import VerifyItem, VerifyResult, make_verifier, verify

VOCAB = 7
EOS = (6,)
PROMPT = (3, 1, 4)
TABLE = torch.randn(211, VOCAB, generator=torch.Generator().manual_seed(3), dtype=torch.float64) * 1.5


def model(tokens: Sequence[int]) -> torch.Tensor:
    """A toy language model: logits [VOCAB] that depend on the length and the last three tokens."""
    state = len(tokens)
    for token in tokens[-3:]:
        state = (state * 31 + token + 1) % len(TABLE)
    return TABLE[state]


def rows_of(tokens: Sequence[int], tree: DraftTree) -> torch.Tensor:
    """The logits of root and nodes; NaN under a token that is none, since no walk may get there."""
    rows = [model(tokens)]
    for node in range(len(tree)):
        path = tree.path_tokens(node)
        is_real = all(0 <= token < VOCAB for token in path)
        rows.append(model([*tokens, *path]) if is_real else torch.full((VOCAB,), math.nan, dtype=torch.float64))
    return torch.stack(rows)


def chain(*tokens: int) -> DraftTree:
    tree, node = DraftTree(), ROOT
    for token in tokens:
        node = tree.add(token, node, 1.0, "test")
    return tree


def one_step(
    tokens: Sequence[int], sampling: SamplingParams, tree: DraftTree, verifier: VerifierName = "match"
) -> VerifyResult:
    item = VerifyItem(tokens, len(PROMPT), sampling, EOS, tree, 0)
    return make_verifier(verifier).verify([item], rows_of(tokens, tree))[0]


def generate(sampling: SamplingParams, count: int, draft: Callable[[list[int]], DraftTree]) -> list[int]:
    tokens = list(PROMPT)
    while len(tokens) < len(PROMPT) + count:
        result = one_step(tokens, sampling, draft(tokens))
        assert result.error is None
        tokens += result.tokens
    return tokens[len(PROMPT) : len(PROMPT) + count]


def plain(sampling: SamplingParams, count: int) -> list[int]:
    """Step by step, by the slow reference."""
    output: list[int] = []
    while len(output) < count:
        logits = model([*PROMPT, *output]).tolist()
        output.append(next_token(logits, sampling, PROMPT, output, EOS))
    return output


SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "sampled": SamplingParams(seed=2**64 - 5),
    "cool": SamplingParams(temperature=0.3, seed=9),
    "top_k": SamplingParams(top_k=3, seed=2),
    "top_p": SamplingParams(top_p=0.7, seed=3),
    "min_p": SamplingParams(min_p=0.2, seed=4),
    "repetition": SamplingParams(repetition_penalty=1.8, seed=5),
    "presence": SamplingParams(presence_penalty=1.1, seed=6),
    "frequency": SamplingParams(frequency_penalty=-0.9, seed=7),
    "greedy penalties": SamplingParams(temperature=0.0, repetition_penalty=1.4, frequency_penalty=0.8),
    "bias": SamplingParams(logit_bias=((2, 3.0), (5, -4.0)), seed=8),
    "bad_words": SamplingParams(bad_words=((2,), (0, 1), (5, 5, 0)), seed=10),
    "min_tokens": SamplingParams(min_tokens=5, stop_token_ids=(0,), logit_bias=((6, 4.0), (0, 4.0)), seed=11),
    "everything": SamplingParams(
        temperature=0.8,
        top_k=5,
        top_p=0.95,
        min_p=0.02,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=0.2,
        logit_bias=((1, 1.0),),
        bad_words=((2, 3),),
        min_tokens=3,
        seed=12,
    ),
}
COUNT = 8


@pytest.mark.parametrize("name", SAMPLINGS)
def test_every_parameter_gives_the_plain_tokens_under_every_kind_of_draft(name: str) -> None:
    sampling = SAMPLINGS[name]
    expected = plain(sampling, COUNT)
    right = [*expected, *plain(sampling, COUNT + 6)[COUNT:]]

    def at(tokens: Sequence[int]) -> list[int]:
        return right[len(tokens) - len(PROMPT) :]

    def bushy(tokens: Sequence[int]) -> DraftTree:
        tree = chain(*at(tokens)[:3])
        for node in range(-1, 3):
            for token in range(VOCAB):
                tree.add(token, node, 0.5, "bushy")
        return tree

    drafts: dict[str, Callable[[list[int]], DraftTree]] = {
        "none": lambda tokens: DraftTree(),
        "right chain": lambda tokens: chain(*at(tokens)[:4]),
        "wrong chain": lambda tokens: chain(*[(token + 1) % VOCAB for token in at(tokens)[:3]]),
        "chain that goes wrong": lambda tokens: chain(at(tokens)[0], (at(tokens)[1] + 1) % VOCAB, 2),
        "bushy": bushy,
        "hostile": lambda tokens: chain(at(tokens)[0], 10**9, -7),
    }
    for kind, draft in drafts.items():
        assert generate(sampling, COUNT, draft) == expected, kind


CHOICES = st.lists(st.tuples(st.integers(0, 20), st.integers(-2, VOCAB + 3)), max_size=14)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(SAMPLINGS)), st.integers(0, 2**64 - 1), st.lists(CHOICES, min_size=1, max_size=4))
def test_any_tree_gives_the_plain_tokens(name: str, seed: int, shapes: list[list[tuple[int, int]]]) -> None:
    sampling = dataclasses.replace(SAMPLINGS[name], seed=seed)
    right = plain(sampling, COUNT + 15)
    steps = 0

    def draft(tokens: list[int]) -> DraftTree:
        """Random parents and tokens, duplicates among them; VOCAB + 3 stands for the token that will be chosen."""
        nonlocal steps
        tree = DraftTree()
        for parent_choice, token in shapes[steps % len(shapes)]:
            parent = parent_choice % (len(tree) + 1) - 1
            depth = 0 if parent == ROOT else tree.depths[parent]
            is_right = token == VOCAB + 3
            tree.add(right[len(tokens) - len(PROMPT) + depth] if is_right else token, parent, 0.5, "random")
        steps += 1
        return tree

    assert generate(sampling, COUNT, draft) == right[:COUNT]


def test_rows_and_nodes_belong_to_the_tokens() -> None:
    sampling = SAMPLINGS["sampled"]
    right = plain(sampling, 4)
    tree = DraftTree()
    tree.add((right[0] + 1) % VOCAB, ROOT, 0.9, "wrong")
    first = tree.add(right[0], ROOT, 0.5, "right")
    tree.add((right[1] + 1) % VOCAB, first, 0.4, "wrong")
    second = tree.add(right[1], first, 0.3, "right")
    offset = 5
    rows = torch.cat([torch.full((offset, VOCAB), math.nan).double(), rows_of(PROMPT, tree)])
    result = verify([VerifyItem(PROMPT, 3, sampling, EOS, tree, offset)], rows)[0]
    assert result == VerifyResult(
        tuple(right[:3]), (first, second), (offset, offset + 1 + first, offset + 1 + second), None, None
    )


def test_margins_come_one_a_token_and_change_no_token() -> None:
    for name, sampling in SAMPLINGS.items():
        right = plain(sampling, 4)
        asked = dataclasses.replace(sampling, return_margins=True)
        result = one_step(PROMPT, asked, chain(*right[:3]))
        assert result.tokens == tuple(right), name
        assert result.margins is not None
        assert len(result.margins) == 4
        assert all(0.0 <= margin <= 1e9 for margin in result.margins)
        # A margin belongs to its own row: drafted or not, it is the same.
        singles = []
        for count in range(4):
            single = one_step((*PROMPT, *right[:count]), asked, DraftTree())
            assert single.margins is not None
            singles += single.margins
        assert result.margins == tuple(singles)
        assert one_step(PROMPT, sampling, chain(*right[:3])).margins is None


def batch() -> tuple[list[VerifyItem], torch.Tensor]:
    """Requests of every kind, each with its own tree, their rows one after the other."""
    items, rows, start = [], [], 0
    for name, sampling in SAMPLINGS.items():
        right = plain(sampling, 6)
        for length in (0, 2, 5):
            tree = chain(*right[:length])
            tree.add((right[0] + 1) % VOCAB, ROOT, 0.1, name)
            asked = dataclasses.replace(sampling, return_margins=length == 2)
            items.append(VerifyItem(PROMPT, 3, asked, EOS, tree, start))
            rows.append(rows_of(PROMPT, tree))
            start += len(tree) + 1
    return items, torch.cat(rows)


@pytest.mark.parametrize("verifier", ["match", "rejection"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_batch_order_and_neighbours_change_no_bit(verifier: VerifierName, dtype: torch.dtype) -> None:
    items, rows = batch()
    rows = rows.to(dtype)
    together = make_verifier(verifier).verify(items, rows)
    assert all(result.error is None for result in together)
    assert [make_verifier(verifier).verify([item], rows)[0] for item in items] == together
    order = torch.randperm(len(items), generator=torch.Generator().manual_seed(4)).tolist()
    assert make_verifier(verifier).verify([items[i] for i in order], rows) == [together[i] for i in order]


def test_a_large_vocabulary_is_batch_independent_too() -> None:
    vocab = 50_001
    rows = torch.randn(8, vocab, generator=torch.Generator().manual_seed(5)) * 4
    samplings = [
        SamplingParams(temperature=t, top_p=p, seed=9, return_margins=True) for t in (0, 0.7) for p in (0.9, 1)
    ]
    items = [VerifyItem([1, 2], 1, samplings[row % 4], (), DraftTree(), row) for row in range(8)]
    together = verify(items, rows)
    assert together == [verify([item], rows)[0] for item in items]
    assert [result.tokens for result in verify(items[::-1], rows)] == [result.tokens for result in together[::-1]]


def test_logits_are_left_as_they_were() -> None:
    items, rows = batch()
    before = rows.clone()
    verify(items, rows)
    assert torch.equal(rows, before)


@pytest.mark.parametrize("value", [math.nan, math.inf, "all -inf"])
@pytest.mark.parametrize("verifier", ["match", "rejection"])
@pytest.mark.parametrize("depth", [0, 2])
def test_a_row_that_is_not_finite_fails_its_item_alone(value: float | str, verifier: VerifierName, depth: int) -> None:
    items, rows = batch()
    expected = make_verifier(verifier).verify(items, rows)
    victim = next(i for i, result in enumerate(expected) if len(result.rows) > depth)
    row = expected[victim].rows[depth]
    rows[row] = -math.inf if value == "all -inf" else rows[row]
    if isinstance(value, float):
        rows[row, 4] = value
    results = make_verifier(verifier).verify(items, rows)
    assert results[victim] == VerifyResult(error="The model's logits are not finite.")
    assert [*results[:victim], *results[victim + 1 :]] == [*expected[:victim], *expected[victim + 1 :]]


def test_a_fault_in_one_item_s_processing_is_its_own(caplog: pytest.LogCaptureFixture) -> None:
    items, rows = batch()
    expected = verify(items, rows)
    broken = dataclasses.replace(items[4], sampling=SamplingParams(logit_bias=((VOCAB, 1.0),)))
    with caplog.at_level(logging.ERROR):
        results = verify([*items[:4], broken, *items[5:]], rows)
    assert results[4].error == f"ValueError: A token id is outside the vocabulary of {VOCAB}."
    assert results[4].tokens == results[4].nodes == results[4].rows == ()
    assert [*results[:4], *results[5:]] == [*expected[:4], *expected[5:]]
    assert any(record.exc_info for record in caplog.records)


def test_bans_that_leave_nothing_fail_the_item_alone() -> None:
    sampling = SamplingParams(bad_words=tuple((token,) for token in range(VOCAB)))
    good = VerifyItem(PROMPT, 3, SAMPLINGS["sampled"], EOS, DraftTree(), 0)
    bad = dataclasses.replace(good, sampling=sampling)
    results = verify([bad, good], model(PROMPT)[None])
    assert results[0].error == "Bias, penalties and bans left no token to choose."
    assert results[1].tokens == tuple(plain(SAMPLINGS["sampled"], 1))


def test_no_items() -> None:
    assert verify([], torch.empty(0, VOCAB)) == []


def test_all_items_may_fail() -> None:
    rows = torch.full((2, VOCAB), math.nan)
    items = [VerifyItem(PROMPT, 3, SamplingParams(), EOS, DraftTree(), row) for row in range(2)]
    assert all(result.error for result in verify(items, rows))


def test_rejection_equals_match_at_temperature_zero() -> None:
    sampling = dataclasses.replace(SAMPLINGS["greedy penalties"], return_margins=True)
    right = plain(sampling, 6)
    for drafted in (right[:4], [right[0], (right[1] + 1) % VOCAB, 2], [], [9]):
        assert one_step(PROMPT, sampling, chain(*drafted), "rejection") == one_step(PROMPT, sampling, chain(*drafted))


def test_rejection_walks_the_first_branch_only() -> None:
    """Every token is drafted at the root; only the first child may be accepted."""
    tree = DraftTree()
    for token in range(VOCAB):
        tree.add(token, ROOT, 0.5, "test")
    accepted = set()
    for seed in range(300):
        result = one_step(PROMPT, SamplingParams(seed=seed), tree, "rejection")
        accepted.add(result.nodes)
        assert result.nodes == ((0,) if result.tokens[0] == 0 else ())
    assert accepted == {(0,), ()}


def test_rejection_repeats_for_a_seed_and_draft_and_differs_from_plain() -> None:
    samplings = [dataclasses.replace(SAMPLINGS["sampled"], seed=seed) for seed in range(60)]
    first = [one_step(PROMPT, sampling, chain(2, 3), "rejection") for sampling in samplings]
    assert first == [one_step(PROMPT, sampling, chain(2, 3), "rejection") for sampling in samplings]
    assert [result.tokens for result in first] != [
        one_step(PROMPT, sampling, chain(2, 3)).tokens for sampling in samplings
    ]


def test_rejection_accepts_a_certain_token_and_refuses_an_impossible_one() -> None:
    sampling = SamplingParams(top_k=1)
    winner = int(model(PROMPT).argmax())
    for seed in range(50):
        seeded = dataclasses.replace(sampling, seed=seed)
        assert one_step(PROMPT, seeded, chain(winner), "rejection").nodes == (0,)
        for wrong in ((winner + 1) % VOCAB, VOCAB, -1):
            result = one_step(PROMPT, seeded, chain(wrong), "rejection")
            assert (result.tokens, result.nodes) == ((winner,), ())


def test_rejection_margins_tell_how_near_the_draw_was(monkeypatch: pytest.MonkeyPatch) -> None:
    sampling = SamplingParams(return_margins=True)
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]] * 2, dtype=torch.float64).log()
    item = VerifyItem([0], 1, sampling, (), chain(1), 0)
    for draw, is_accepted in ((0.29, True), (0.1, True), (0.31, False), (0.9, False)):
        monkeypatch.setattr(rejection, "uniforms", lambda keys, draw=draw: [draw] * len(keys))
        result = make_verifier("rejection").verify([item], logits)[0]
        assert (result.nodes == (0,)) is is_accepted
        assert result.margins is not None
        bound = abs(math.log(0.3 / 0.7) - math.log(draw / (1 - draw)))
        assert result.margins[0] == pytest.approx(bound) if is_accepted else result.margins[0] <= bound + 1e-12


def test_rejection_margin_sees_a_draft_at_the_filter_s_edge() -> None:
    logits = torch.tensor([[1.0, 0.5, 0.499]], dtype=torch.float64).expand(2, 3)
    sampling = SamplingParams(top_k=2, return_margins=True)
    for drafted in (1, 2):
        result = make_verifier("rejection").verify([VerifyItem([0], 1, sampling, (), chain(drafted), 0)], logits)[0]
        assert result.margins is not None
        assert result.margins[0] <= 0.001 + 1e-12
