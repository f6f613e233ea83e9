"""The medusa drafter: which tokens at which depth, in what order, how sure, and what it learns."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from engine.sampler.noise import NoiseKey, gumbel_rows
from engine.sampling_params import SamplingParams
from engine.spec_decode.drafter import DraftContext, DraftFeedback, HiddenStates
from engine.spec_decode.medusa import MedusaDrafter
from engine.spec_decode.suffix import SuffixDrafter
from engine.spec_decode.tree import ROOT, DraftTree, merged
from heads.config import Calibration
from heads.lm_head import DraftLmHead, OutputHead
from heads.medusa import MedusaHeads

VOCAB = 8
GREEDY = SamplingParams(temperature=0.0)


class FixedHeads(MedusaHeads):
    """Heads whose logits are given: lm_head is the identity, head k puts out row k whatever the state is."""

    def __init__(self, logits: list[list[float]]) -> None:
        super().__init__(VOCAB, len(logits))
        self.rows = torch.tensor(logits)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.rows[:, None].expand(-1, len(states), -1)


def log_rows(*rows: dict[int, float]) -> list[list[float]]:
    """Logits that give the named tokens the named probabilities."""
    result = []
    for row in rows:
        rest = (1 - sum(row.values())) / (VOCAB - len(row))
        result.append([torch.tensor(row.get(token, rest)).log().item() for token in range(VOCAB)])
    return result


def drafter(logits: list[list[float]], **options: Any) -> MedusaDrafter:
    token_ids = options.pop("token_ids", None)
    lm_head = DraftLmHead(OutputHead(torch.eye(VOCAB)), None if token_ids is None else torch.tensor(token_ids))
    return MedusaDrafter(FixedHeads(logits), lm_head, **options)


def context(sampling: SamplingParams = GREEDY, *, max_depth: int = 8, max_nodes: int = 6, **more: Any) -> DraftContext:
    return DraftContext(
        request_id=more.get("name", "r"),
        token_ids=more.get("token_ids", [1, 2, 3]),
        prompt_length=2,
        sampling=sampling,
        max_depth=max_depth,
        max_nodes=max_nodes,
        accepted=HiddenStates(torch.zeros(VOCAB)),
    )


def paths(tree: DraftTree) -> list[tuple[int, ...]]:
    return [tuple(tree.path_tokens(node)) for node in range(len(tree))]


def test_the_likeliest_paths_come_first_and_form_a_tree() -> None:
    (tree,) = drafter(log_rows({5: 0.6, 2: 0.3}, {7: 0.8})).propose([context(max_nodes=4)])
    assert paths(tree) == [(5,), (5, 7), (2,), (2, 7)]
    assert tree.survival == sorted(tree.survival, reverse=True)
    assert set(tree.methods) == {"medusa"}


def test_depth_and_nodes_are_bounded_by_the_context() -> None:
    made = drafter(log_rows({5: 0.6}, {7: 0.8}, {1: 0.9}))
    (tree,) = made.propose([context(max_depth=1, max_nodes=3)])
    assert tree.max_depth == 1
    assert len(tree) == 3
    (tree,) = made.propose([context(max_depth=0)])
    assert len(tree) == 0
    (tree,) = made.propose([context(max_nodes=0)])
    assert len(tree) == 0


def test_without_a_state_nothing_is_drafted() -> None:
    made = drafter(log_rows({5: 0.6}))
    bare = DraftContext("r", [1, 2], 1, GREEDY, 4, 4, accepted=None)
    (tree, other) = made.propose([bare, context(name="s")])
    assert len(tree) == 0
    assert len(other) > 0


def test_a_reduced_vocabulary_drafts_the_models_own_ids() -> None:
    (tree,) = drafter(log_rows({5: 0.6, 2: 0.3}), token_ids=[2, 4, 6]).propose([context(max_nodes=8)])
    assert tree.tokens[0] == 2
    assert set(tree.tokens) <= {2, 4, 6}


def test_what_could_not_pay_is_not_proposed() -> None:
    (whole,) = drafter(log_rows({5: 0.6, 2: 0.3})).propose([context(max_nodes=8)])
    least = sorted(whole.survival)[len(whole) // 2]
    (tree,) = drafter(log_rows({5: 0.6, 2: 0.3})).propose([dataclasses.replace(context(max_nodes=8), least=least)])
    assert sorted(tree.survival) == [survival for survival in sorted(whole.survival) if survival >= least]


def test_the_requests_own_bias_and_bans_hold_for_drafts_too() -> None:
    made = drafter(log_rows({5: 0.6, 2: 0.3}))
    (tree,) = made.propose([context(SamplingParams(temperature=0.0, logit_bias=((5, -100.0),)))])
    assert tree.tokens[0] == 2
    (tree,) = made.propose([context(SamplingParams(temperature=0.0, bad_words=((2,), (5,))), name="b")])
    assert not {2, 5} & set(tree.tokens)
    filtered = SamplingParams(temperature=1.0, top_k=2, seed=4)
    (tree,) = made.propose([context(filtered, name="k")])
    assert set(tree.tokens) <= {2, 5}


def test_a_request_that_allows_nothing_of_the_draft_vocabulary_is_not_an_error() -> None:
    bans = tuple((token,) for token in (2, 4, 6))
    (tree,) = drafter(log_rows({5: 0.6}), token_ids=[2, 4, 6]).propose(
        [context(SamplingParams(temperature=0.0, bad_words=bans))]
    )
    assert set(tree.tokens) <= {2, 4, 6}


@pytest.mark.parametrize("depth", [1, 2])
def test_coupled_drafts_rank_by_the_noise_of_the_verification(depth: int) -> None:
    """Where the draft's distribution is the target's, the first child is the very token that will be chosen."""
    rows = log_rows({5: 0.3, 2: 0.2}, {7: 0.3, 1: 0.25})
    hits = {True: 0, False: 0}
    for seed in range(200):
        sampling = SamplingParams(temperature=0.7, seed=seed)
        target = torch.tensor(rows[depth - 1], dtype=torch.float64) / 0.7
        noise = gumbel_rows([NoiseKey(seed, 3 + depth - 1)], VOCAB, torch.device("cpu"))[0]
        chosen = int((target + noise).argmax())
        for coupling in (True, False):
            (tree,) = drafter(rows, coupling=coupling).propose([context(sampling, max_nodes=8, max_depth=depth)])
            best = max((n for n in range(len(tree)) if tree.depths[n] == depth), key=lambda n: tree.survival[n])
            hits[coupling] += tree.tokens[best] == chosen
    assert hits[True] == 200
    assert hits[False] < 140


def test_calibration_replaces_the_heads_own_confidence() -> None:
    flat = Calibration(edges=(0.5, 1.0), rates=((0.05, 0.9), (0.05, 0.4)))
    made = drafter(log_rows({5: 0.6, 2: 0.3}, {7: 0.8}), calibration=flat)
    (tree,) = made.propose([context(max_nodes=2)])
    assert tree.survival == pytest.approx([0.9, 0.36])


def test_it_learns_from_what_was_emitted_only_as_deep_as_that_went() -> None:
    made = drafter(log_rows({5: 0.6, 2: 0.3}, {7: 0.8}))
    before = made.propose([context(max_nodes=4)])[0].survival
    for _ in range(60):
        (tree,) = made.propose([context(max_nodes=4)])
        made.observe(DraftFeedback("r", tree, [2]))
    (tree,) = made.propose([context(max_nodes=4)])
    assert tree.tokens[0] == 2
    second = tree.child(tree.child(ROOT, 2) or 0, 7)
    assert second is not None
    assert tree.survival[second] / tree.survival[0] == pytest.approx(before[1] / before[0]), "depth 2 was never seen"
    (other,) = made.propose([context(name="new", max_nodes=4)])
    assert other.tokens[0] == 2, "a new request starts from what others taught"


def test_greedy_and_sampled_requests_are_calibrated_apart() -> None:
    made = drafter(log_rows({5: 0.6}), coupling=False)
    sampled = SamplingParams(temperature=1.0, seed=1)
    before = made.propose([context(sampled, name="s")])[0].survival[0]
    for _ in range(60):
        (tree,) = made.propose([context()])
        made.observe(DraftFeedback("r", tree, [0]))
    (tree,) = made.propose([context(sampled, name="t")])
    assert tree.survival[0] == pytest.approx(before)


def test_a_released_request_leaves_nothing() -> None:
    made = drafter(log_rows({5: 0.6}))
    made.propose([context()])
    made.release("r")
    made.release("r")
    assert made._requests == {}
    made.observe(DraftFeedback("r", DraftTree(), [5]))


def test_a_head_is_the_identity_until_it_is_trained() -> None:
    heads = MedusaHeads(VOCAB, 3, num_layers=2)
    states = torch.randn(5, VOCAB)
    assert torch.equal(heads(states), states.expand(3, -1, -1))
    parameters = [parameter for parameter in heads.parameters() if isinstance(parameter, nn.Parameter)]
    assert len({parameter.data_ptr() for parameter in parameters}) == len(parameters) == 12


def test_candidates_go_on_below_the_nodes_of_others() -> None:
    """Suffix expects 4, which the heads do not; what the second head says holds below it all the same."""
    made = drafter(log_rows({5: 0.6, 2: 0.3}, {7: 0.8}))
    asked = context(max_nodes=5)
    (own,) = made.propose([asked])
    other = DraftTree()
    other.add(4, ROOT, 0.7, "suffix")
    whole = merged([other, own])
    made.extend(asked, whole)
    below = whole.child(whole.child(ROOT, 4) or 0, 7)
    assert below is not None
    assert whole.methods[below] == "medusa"
    assert whole.survival[below] == pytest.approx(0.7 * own.survival[1] / own.survival[0])
    made.observe(DraftFeedback("r", whole, [4, 7]))
    made.release("r")
    made.extend(asked, whole)


def test_suffix_goes_on_below_the_nodes_of_heads() -> None:
    """The text has 1 2 3 4 5 and ends in 1 2; no match follows, but below a drafted 3 there is one."""
    suffix = SuffixDrafter()
    tokens = [1, 2, 3, 4, 5, 6, 7, 9, 8]
    asked = dataclasses.replace(context(), token_ids=tokens)
    (own,) = suffix.propose([asked])
    assert len(own) == 0
    heads = DraftTree()
    heads.add(3, ROOT, 0.9, "medusa")
    whole = merged([own, heads])
    suffix.extend(asked, whole)
    assert paths(whole)[:3] == [(3,), (3, 4), (3, 4, 5)]
    assert whole.methods[:3] == ["medusa", "suffix", "suffix"]
    before = whole.survival[1]
    for _ in range(20):
        suffix.observe(DraftFeedback("r", whole, [3, 4, 5]))
    again = merged([heads])
    suffix.extend(asked, again)
    assert again.survival[1] > before
