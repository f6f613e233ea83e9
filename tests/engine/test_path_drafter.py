"""The mtp drafter: how its tree grows, what it spends, what it learns."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tiny_engine import tiny_core, tiny_model
from tiny_heads import mtp_drafter

from engine.sampler.noise import NoiseKey, gumbel_rows
from engine.sampling_params import EngineRequest, SamplingParams
from engine.spec_decode.candidates import PlainHeadCompute
from engine.spec_decode.draft_block import Committed, DepthRows
from engine.spec_decode.drafter import DraftContext, DraftFeedback, HiddenStates
from engine.spec_decode.path_drafter import MtpDrafter
from engine.spec_decode.tree import DraftTree
from heads.config import MtpSizes
from heads.lm_head import DraftLmHead, OutputHead
from heads.mtp import MtpModule

VOCAB = 8
GREEDY = SamplingParams(temperature=0.0)


class TableBlock:
    """What follows a token is looked up: a bigram model. Remembers what it was asked."""

    def __init__(self, table: dict[int, dict[int, float]]) -> None:
        self.table = table
        self.asked: list[DepthRows] = []
        self.requests: list[Committed] = []

    def begin(self, requests: Sequence[Committed]) -> TableBlock:
        self.requests = list(requests)
        return self

    def run(self, rows: DepthRows) -> tuple[torch.Tensor, torch.Tensor]:
        self.asked.append(rows)
        logits = torch.full((len(rows.tokens), VOCAB), 1e-6)
        for row, token in enumerate(rows.tokens):
            for following, share in self.table.get(token, {}).items():
                logits[row, following] = share
        states = torch.tensor([[float(token)] * VOCAB for token in rows.tokens])
        return states, logits.log()


TABLE = {3: {5: 0.6, 2: 0.3}, 5: {7: 0.9}, 2: {1: 0.5, 6: 0.4}, 7: {0: 0.8}}


def drafter(
    table: dict[int, dict[int, float]] = TABLE, depths: int = 3, **options: Any
) -> tuple[MtpDrafter, TableBlock]:
    module = MtpModule(VOCAB, MtpSizes("base", 8, 2, 1, 4, 1e-5), depths)
    made, block = MtpDrafter(module, DraftLmHead(OutputHead(torch.eye(VOCAB)), None), **options), TableBlock(table)

    class Runner:
        def make_block(self, *_: Any) -> TableBlock:
            return block

    made.prepare(PlainHeadCompute(), Runner())  # type: ignore[arg-type]
    return made, block


def context(sampling: SamplingParams = GREEDY, *, max_depth: int = 8, max_nodes: int = 6, **more: Any) -> DraftContext:
    return DraftContext(
        request_id=more.get("name", "r"),
        token_ids=more.get("token_ids", [1, 2, 3]),
        prompt_length=2,
        sampling=sampling,
        max_depth=max_depth,
        max_nodes=max_nodes,
        accepted=HiddenStates(torch.zeros(VOCAB)),
        least=more.get("least", 0.0),
        token_seconds=more.get("token_seconds", 0.0),
        block_ids=[4, 9],
    )


def paths(tree: DraftTree) -> dict[tuple[int, ...], float]:
    return {tuple(tree.path_tokens(node)): round(tree.survival[node], 3) for node in range(len(tree))}


def test_children_follow_from_their_own_parents() -> None:
    made, block = drafter()
    (tree,) = made.propose([context(max_nodes=8)])
    found = paths(tree)
    # Confidences are shares of the table, in buckets no finer than their edges.
    assert {(5,), (2,), (5, 7), (2, 1), (2, 6), (5, 7, 0)} <= set(found)
    assert (2, 7) not in found
    assert (5, 1) not in found
    assert set(tree.methods) == {"mtp"}
    assert block.requests == [Committed([4, 9], 2)]


def test_each_row_gets_the_state_and_the_path_of_its_parent() -> None:
    made, block = drafter()
    made.propose([context(max_nodes=8)])
    first, second, third = block.asked
    assert (list(first.tokens), list(first.paths), first.depth) == ([3], [[0]], 1)
    assert float(first.states[0, 0]) == 0.0, "the base model's own state"
    assert sorted(second.tokens) == [2, 5]
    assert sorted(map(tuple, second.paths)) == [(0, 1), (0, 2)]
    assert {float(state[0]) for state in second.states} == {3.0}, "of the row that proposed them"
    for token, path, state in zip(third.tokens, third.paths, third.states, strict=True):
        above = second.tokens[path[1] - 1]
        assert token in TABLE[above]
        assert float(state[0]) == above


def test_depth_and_nodes_are_bounded_by_the_context() -> None:
    made, block = drafter()
    (tree,) = made.propose([context(max_depth=1)])
    assert tree.max_depth == 1
    assert len(block.asked) == 1
    (tree,) = made.propose([context(max_depth=8)])
    assert tree.max_depth == 3, "as deep as it was trained for"
    assert [len(tree) for tree in made.propose([context(max_nodes=0), context(max_depth=0, name="s")])] == [0, 0]


def test_without_a_state_nothing_is_drafted_for_a_request_and_others_keep_their_trees() -> None:
    made, block = drafter()
    bare = dataclasses.replace(context(), accepted=None)
    none, first, second = made.propose(
        [bare, context(name="s", token_ids=[1, 3]), context(name="t", token_ids=[1, 2, 2, 2])]
    )
    assert len(none) == 0
    assert first.tokens[0] == 5
    assert set(second.tokens[:2]) == {1, 6}
    assert [request.length for request in block.requests] == [1, 3]
    assert [list(rows.owners) for rows in block.asked] == [sorted(rows.owners) for rows in block.asked]


def test_what_could_not_pay_is_not_proposed() -> None:
    made, _ = drafter()
    (tree,) = made.propose([context(max_nodes=8, least=0.3)])
    assert min(tree.survival) >= 0.3
    assert (5, 7) in paths(tree)


def test_a_depth_that_costs_more_than_it_yields_is_not_gone_into() -> None:
    made, block = drafter()
    made._seconds = {1: 1.0, 2: 1.0}
    made.propose([context(token_seconds=0.5)])
    assert len(block.asked) == 1
    made.propose([context(token_seconds=1e6)])
    assert len(block.asked) == 4
    made.propose([context(token_seconds=0.0)])
    assert len(block.asked) == 7, "where time does not matter"


def test_penalties_know_the_drafted_tokens_before() -> None:
    """5 is followed by 5 again, unless it was drafted already and may not be repeated."""
    table = {3: {5: 0.9}, 5: {5: 0.6, 7: 0.4}}
    never_twice = SamplingParams(temperature=0.0, presence_penalty=2.0)
    (free,) = drafter(table)[0].propose([context()])
    (bound,) = drafter(table)[0].propose([context(never_twice)])
    assert max(paths(free), key=lambda path: (len(path) == 2, paths(free)[path]))[1] == 5
    assert max(paths(bound), key=lambda path: (len(path) == 2, paths(bound)[path]))[1] == 7


@pytest.mark.parametrize("depth", [1, 2])
def test_coupled_drafts_rank_by_the_noise_of_the_verification(depth: int) -> None:
    table = {3: {5: 0.99}, 5: {7: 0.3, 1: 0.25, 2: 0.2, 4: 0.25}} if depth == 2 else {3: {7: 0.4, 1: 0.35, 2: 0.25}}
    hits = {True: 0, False: 0}
    for seed in range(100):
        sampling = SamplingParams(temperature=0.7, seed=seed)
        shares = torch.full((VOCAB,), 1e-6, dtype=torch.float64)
        for token, share in table[5 if depth == 2 else 3].items():
            shares[token] = share
        noise = gumbel_rows([NoiseKey(seed, 3 + depth - 1)], VOCAB, torch.device("cpu"))[0]
        chosen = int((shares.log() / 0.7 + noise).argmax())
        for coupling in (True, False):
            (tree,) = drafter(table, coupling=coupling)[0].propose([context(sampling, max_nodes=8, max_depth=depth)])
            mine = [
                n
                for n in range(len(tree))
                if tree.depths[n] == depth and (depth == 1 or tree.tokens[tree.parents[n]] == 5)
            ]
            hits[coupling] += bool(mine) and tree.tokens[max(mine, key=lambda n: tree.survival[n])] == chosen
    assert hits[True] >= 95  # the first token is drawn too, and 5 is not always among the likeliest
    assert hits[False] < 70


def test_it_learns_at_every_node_of_the_way_that_the_text_took() -> None:
    made, _ = drafter()
    (tree,) = made.propose([context(max_nodes=8)])
    before = paths(tree)
    for _ in range(60):
        (tree,) = made.propose([context(max_nodes=8)])
        made.observe(DraftFeedback("r", tree, [2, 6]))
    (tree,) = made.propose([context(max_nodes=8)])
    after = paths(tree)
    assert after[2,] > after.get((5,), 0.0)
    assert after[2, 6] / after[2,] > before[2, 6] / before[2,]
    assert after[2, 6] > after.get((2, 1), 0.0)


def test_a_released_request_leaves_nothing() -> None:
    made, _ = drafter()
    made.propose([context()])
    made.release("r")
    made.release("r")
    assert made._requests == {}
    made.observe(DraftFeedback("r", DraftTree(), [5]))


def test_a_real_module_drafts_inside_an_engine() -> None:
    """Not only does nothing break: drafts are made at every step and some are right."""
    made = mtp_drafter(tiny_model("llama"))
    core = tiny_core("llama", [made])
    proposed: list[int] = []
    propose = made.propose

    def spy(contexts: Sequence[DraftContext]) -> list[DraftTree]:
        trees = propose(contexts)
        proposed.extend(len(tree) for tree in trees)
        return trees

    made.propose = spy  # type: ignore[method-assign]
    core.add(EngineRequest("r", (1, 2, 3), SamplingParams(temperature=1.0, seed=1, max_tokens=30, ignore_eos=True)))
    while core.has_work:
        core.step()
    assert len(proposed) > 5
    assert min(proposed) > 0
    assert made._requests == {}
