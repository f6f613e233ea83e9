"""A row's bits depend on the row alone: not on its neighbours, its chunk, its tree, its blocks or the threads."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from compiled_models import BLOCK, KERNELS, Bench, Part, chain, packed, random_model, random_tree, text
from transformers import PreTrainedModel

from engine.compiled.weights import PackedWeights
from engine.spec_decode.tree import ROOT, DraftTree

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "wide heads": ("llama", {"head_dim": 64, "hidden_size": 96, "num_attention_heads": 3, "num_key_value_heads": 1}),
    "qwen2": ("qwen2", {"num_attention_heads": 6, "hidden_size": 96}),
    "qwen3": ("qwen3", {"head_dim": 32, "num_key_value_heads": 4}),
    "mistral": ("mistral", {"sliding_window": 5}),  # shorter than a branch
}
LENGTH = 70


class Case:
    """A model packed for one set of kernels, a text, and the rows of that text computed one at a time."""

    def __init__(self, model: str, kernels: str, is_int8: bool) -> None:
        family, changes = MODELS[model]
        self.model: PreTrainedModel = random_model(family, **changes)
        self.kernels = kernels
        self.weights: PackedWeights = packed(self.model, is_int8=is_int8, kernels=kernels)
        self.tokens = text(LENGTH)
        bench = self.bench()
        self.expected = bench.prefill(bench.request(self.tokens), (1,))
        assert bool(self.expected.isfinite().all())

    def bench(self, threads: int = 1) -> Bench:
        return Bench(self.weights, kernels=self.kernels, threads=threads)


@pytest.fixture(scope="module", params=[False, True], ids=["float", "int8"])
def is_int8(request: pytest.FixtureRequest) -> bool:
    found: bool = request.param
    return found


@pytest.fixture(scope="module", params=KERNELS)
def kernels(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="module", params=MODELS)
def case(request: pytest.FixtureRequest, kernels: str, is_int8: bool) -> Case:
    return Case(request.param, kernels, is_int8)


@pytest.mark.parametrize("threads", [1, 2])
def test_chunks_change_nothing(case: Case, threads: int) -> None:
    bench = case.bench(threads)
    for sizes in ((), (2,), (5, 3), (16,), (17,), (15, 1), (31, 4)):
        request = bench.request(case.tokens, room=0)
        assert torch.equal(bench.prefill(request, sizes), case.expected), sizes
        bench.free(request)


def crowd(bench: Bench, seed: int) -> list[Part]:
    """Requests in every phase: prompts, chunks, lone tokens and trees."""
    draw, parts = random.Random(seed), []
    for index in range(draw.randint(1, 7)):
        request = bench.request(text(draw.randint(2, 40), seed=100 * seed + index))
        start = draw.choice([0, request.num_tokens // 2, request.num_tokens - 1])
        if start:
            bench.forward(Part(request, 0, start))
        parts.append(Part(request, start, request.num_tokens, random_tree(draw.choice([0, 1, 8]), seed=index)))
    return parts


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_neighbours_and_trees_change_nothing(case: Case, seed: int, threads: int) -> None:
    """The text's end is drafted, hidden in a tree of wrong branches, among other requests."""
    draw = random.Random(seed)
    bench = case.bench(threads)
    others = crowd(bench, seed + 1)
    first = draw.choice([1, 2, 15, 16, 17, 33, 60])
    depth = draw.randint(1, 9)
    request = bench.request(case.tokens[: first + depth])
    request.token_ids = case.tokens[:first]
    tree, right, node = DraftTree(), [], ROOT
    for token in case.tokens[first : first + depth]:
        for _ in range(draw.randint(0, 3)):
            tree.add(draw.randrange(60), draw.randrange(-1, len(tree)) if len(tree) else ROOT, 0.1, "test")
        node = tree.add(token, node, 0.5, "test")
        right.append(node)
    start = draw.choice([0, first - 1])
    if start:
        bench.forward(Part(request, 0, start))
    parts = [*others, Part(request, start, first, tree)]
    draw.shuffle(parts)
    rows = bench.logits(*parts)[[part.request is request for part in parts].index(True)]
    root = first - 1 - start
    assert torch.equal(rows[: root + 1], case.expected[start:first])
    assert torch.equal(rows[[root + 1 + node for node in right]], case.expected[first : first + depth])
    # The accepted branch becomes text: what follows is the same as if it had been computed as such.
    bench.runner.move_kv(
        bench.slots(request, [first + node for node in right]),
        bench.slots(request, range(first, first + depth)),
    )
    request.token_ids = case.tokens[: first + depth + 1]
    grown = bench.logits(Part(request, first + depth, first + depth + 1))[0]
    assert torch.equal(grown[-1], case.expected[first + depth])


def test_a_request_computed_again_in_other_blocks_is_the_same(case: Case) -> None:
    """And where blocks are shared with another, as the prefix cache does it."""
    bench = case.bench()
    request = bench.request(case.tokens, room=0)
    bench.prefill(request)
    for array in (bench.runner._kv.keys, bench.runner._kv.values):
        array.fill(-3.0)
    again = bench.request(case.tokens, room=0)
    assert not set(again.block_ids) & set(request.block_ids)
    assert torch.equal(bench.prefill(again, (13,)), case.expected)
    shared = bench.request(case.tokens, room=0)
    shared.block_ids[:3] = again.block_ids[:3]
    rows = bench.logits(Part(shared, 3 * BLOCK, LENGTH))[0]
    assert torch.equal(rows, case.expected[3 * BLOCK :])


def test_more_rows_than_any_tile_has(case: Case) -> None:
    """One request of each count of rows up to 40, so that the rows of a product are cut in every way."""
    bench = case.bench()
    request = bench.request(case.tokens, room=0)
    bench.prefill(request)
    for count in range(1, 41):
        assert torch.equal(bench.logits(Part(request, LENGTH - count, LENGTH))[0], case.expected[LENGTH - count :])


def test_the_rows_of_a_text_do_differ(case: Case) -> None:
    """Else all of the above would say nothing."""
    assert len({tuple(row.tolist()) for row in case.expected}) == LENGTH
    bench = case.bench()
    request = bench.request([*case.tokens[:30], 0])
    request.token_ids = case.tokens[:30]
    wrong = (case.tokens[30] + 1) % 60
    rows = bench.logits(Part(request, 0, 30, chain([wrong])))[0]
    assert not torch.equal(rows[-1], case.expected[30])
