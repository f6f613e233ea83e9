"""Exact enumeration: every outcome of a rule with its probability, on vocabularies of at most five tokens.

The right rules emit the target distribution exactly. The wrong ones, each of which somebody has used, do not, and are
kept as negative controls with the figures they produce for the target (.4 .3 .2 .1).
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_sampler import distribution
from scipy import integrate

from engine.sampler.noise import NoiseKey
from engine.sampler.processing import TargetRow
from engine.sampling_params import SamplingParams
from engine.spec_decode import rejection
from engine.spec_decode.rejection import RejectionRule
from engine.spec_decode.rule import Decision, MatchRule
from engine.spec_decode.tree import ROOT, DraftTree
from engine.spec_decode.verifier import TreeVerifier, VerifyItem

TARGET = (0.4, 0.3, 0.2, 0.1)
HEAD = (0.1, 0.5, 0.1, 0.3)  # a draft head's distribution
TOKENS = range(4)
EXACT = 1e-9
VOCAB = 3
PROMPT = (1,)

Outcome = tuple[float, ...]


def deviation(emitted: Sequence[float], target: Sequence[float] = TARGET) -> float:
    return max(abs(a - b) for a, b in zip(emitted, target, strict=True))


def positive_part(p: Sequence[float], q: Sequence[float]) -> Outcome:
    parts = [max(a - b, 0.0) for a, b in zip(p, q, strict=True)]
    return tuple(part / sum(parts) for part in parts)


def ratio(p: float, q: float) -> float:
    return min(1.0, p / q)


# --- the right rules ---------------------------------------------------------------------------------------------


def gumbel_max(p: Sequence[float]) -> Outcome:
    """P(v = argmax log p + g): the density of v's score times the chance that every other stays below it."""

    def density(score: float, winner: int) -> float:
        others = sum(math.exp(math.log(p[v]) - score) for v in range(len(p)) if v != winner)
        own = math.log(p[winner]) - score
        return math.exp(own - math.exp(own) - others)

    return tuple(integrate.quad(density, -12, 45, args=(v,), epsabs=1e-12, limit=300)[0] for v in range(len(p)))


def test_the_matching_rule_emits_the_target_whatever_was_drafted() -> None:
    """The choice does not see the draft, so the draft only splits each outcome into accepted and recovered."""
    assert deviation(gumbel_max(TARGET)) < EXACT


def classic_rejection(p: Sequence[float], q: Sequence[float]) -> Outcome:
    """x ~ q, accepted with min(1, p/q), else the positive part of p - q."""
    refused = sum(b * (1 - ratio(a, b)) for a, b in zip(p, q, strict=True) if b)
    rest = positive_part(p, q) if refused else (0.0,) * len(p)
    return tuple((b * ratio(a, b) if b else 0.0) + refused * r for a, b, r in zip(p, q, rest, strict=True))


@pytest.mark.parametrize("drafted", TOKENS)
def test_the_classic_rule_with_a_one_hot_draft_emits_the_target(drafted: int) -> None:
    one_hot = tuple(float(token == drafted) for token in TOKENS)
    assert deviation(classic_rejection(TARGET, one_hot)) < EXACT
    assert deviation(classic_rejection(TARGET, HEAD)) < EXACT


# --- the wrong rules ---------------------------------------------------------------------------------------------


def argmax_draft_with_softmax_q() -> Outcome:
    """The head's best token, verified as if it had been drawn from the head."""
    drafted = HEAD.index(max(HEAD))
    accepted = ratio(TARGET[drafted], HEAD[drafted])
    rest = positive_part(TARGET, HEAD)
    return tuple(accepted * (token == drafted) + (1 - accepted) * rest[token] for token in TOKENS)


def independent_paths() -> Outcome:
    """Two paths drawn and tested independently; the longest accepted one is kept."""
    accepted = [min(p, q) for p, q in zip(TARGET, HEAD, strict=True)]
    refused = 1 - sum(accepted)
    rest = positive_part(TARGET, HEAD)
    return tuple(a * (1 + refused) + refused**2 * r for a, r in zip(accepted, rest, strict=True))


def shared_noise_ratio_test() -> Outcome:
    """x = argmax(log q + g), a ratio test, and on refusal argmax(log residual + g) with the same g.

    As an exponential race: x finished first, at time T ~ Exp(1), so token v's own clock has already run q_v T.
    """
    emitted = [min(p, q) for p, q in zip(TARGET, HEAD, strict=True)]
    rest = positive_part(TARGET, HEAD)
    rivals = [token for token in TOKENS if rest[token]]
    assert len(rivals) == 2
    first, second = rivals
    a, b, wait = rest[first], rest[second], HEAD[first]
    assert HEAD[first] == HEAD[second]
    # P(first wins) = P((s + E1)/a < (s + E2)/b), s = wait * T: one less P(E1 > (a/b - 1) s + (a/b) E2).
    k = a / b
    first_wins = 1 - 1 / (1 + (k - 1) * wait) / (1 + k)
    for drafted in TOKENS:
        refused = HEAD[drafted] * (1 - ratio(TARGET[drafted], HEAD[drafted]))
        emitted[first] += refused * first_wins
        emitted[second] += refused * (1 - first_wins)
    return tuple(emitted)


def without_replacement_as_if_independent() -> Outcome:
    """A second draft, drawn from the head without the first, but tested against the head's own probabilities."""
    emitted = [min(p, q) for p, q in zip(TARGET, HEAD, strict=True)]
    rest = positive_part(TARGET, HEAD)
    last = positive_part(rest, HEAD)
    for first in TOKENS:
        refused = HEAD[first] * (1 - ratio(TARGET[first], HEAD[first]))
        for second in TOKENS:
            if second == first:
                continue
            reach = refused * HEAD[second] / (1 - HEAD[first])
            accepted = ratio(rest[second], HEAD[second])
            emitted[second] += reach * accepted
            for token in TOKENS:
                emitted[token] += reach * (1 - accepted) * last[token]
    return tuple(emitted)


def typical_acceptance() -> Outcome:
    """Medusa's: the likeliest token is taken outright where its probability passes a threshold."""
    entropy = -sum(p * math.log(p) for p in TARGET)
    threshold = min(0.09, 0.3 * math.exp(-entropy))
    drafted = TARGET.index(max(TARGET))
    accepted = float(TARGET[drafted] > threshold)
    return tuple(accepted * (token == drafted) + (1 - accepted) * TARGET[token] for token in TOKENS)


WRONG = {
    argmax_draft_with_softmax_q: (0.3, 0.6, 0.1, 0.0),
    independent_paths: (0.26, 0.42, 0.18, 0.14),
    shared_noise_ratio_test: (0.416, 0.300, 0.184, 0.100),
    without_replacement_as_if_independent: (0.382, 0.300, 0.218, 0.100),
}


@pytest.mark.parametrize("rule", WRONG, ids=lambda rule: rule.__name__)
def test_wrong_rules_give_the_known_wrong_figures_and_fail_the_check(rule: object) -> None:
    emitted = rule()  # type: ignore[operator]
    assert sum(emitted) == pytest.approx(1.0)
    assert emitted == pytest.approx(WRONG[rule], abs=1e-3)  # type: ignore[index]
    assert deviation(emitted) > 0.01 > EXACT


def test_typical_acceptance_collapses_entropy() -> None:
    emitted = typical_acceptance()
    assert deviation(emitted) > 0.1
    assert emitted == (1.0, 0.0, 0.0, 0.0)


def test_the_shared_noise_figures_agree_with_a_simulation() -> None:
    """The closed form above is easy to get wrong, so it is checked once against the rule itself."""
    generator = np.random.default_rng(1)
    noise = generator.gumbel(size=(400_000, 4))
    drafted = (np.log(HEAD) + noise).argmax(1)
    accepted = generator.random(len(noise)) < np.minimum(1, np.array(TARGET) / HEAD)[drafted]
    with np.errstate(divide="ignore"):
        recovered = (np.log(positive_part(TARGET, HEAD)) + noise).argmax(1)
    emitted = np.bincount(np.where(accepted, drafted, recovered), minlength=4) / len(noise)
    assert shared_noise_ratio_test() == pytest.approx(emitted, abs=4e-3)


# --- the real walker, every outcome ------------------------------------------------------------------------------


def toy_logits(tokens: Sequence[int]) -> list[float]:
    return [math.sin(7.0 * token + 3.0 * sum((i + 1) * t for i, t in enumerate(tokens))) * 2 for token in range(VOCAB)]


class ScriptedDraw:
    """Takes its tokens from a script instead of from noise, and notes the probability each had under its row."""

    def __init__(self, script: Sequence[int]) -> None:
        self.script = script
        self.probability = 1.0
        self.steps = 0

    def __call__(self, logits: torch.Tensor, keys: Sequence[NoiseKey]) -> list[int]:
        assert len(keys) == 1
        token = self.script[self.steps]
        self.steps += 1
        self.probability *= float(logits[0].softmax(0)[token])
        return [token]


def walk_law(tree: DraftTree, sampling: SamplingParams, depth: int) -> dict[tuple[int, ...], float]:
    """The law of the tokens one step emits: every script of choices, run through the real verifier."""
    rows = [toy_logits(PROMPT)]
    rows += [toy_logits([*PROMPT, *tree.path_tokens(node)]) for node in range(len(tree))]
    logits = torch.tensor(rows, dtype=torch.float64)
    law: dict[tuple[int, ...], float] = {}
    for script in itertools.product(range(VOCAB), repeat=depth + 1):
        draw = ScriptedDraw(script)
        result = TreeVerifier(MatchRule(draw)).verify([VerifyItem(PROMPT, 1, sampling, (), tree, 0)], logits)[0]
        assert result.error is None
        assert result.tokens == script[: len(result.tokens)]
        law[result.tokens] = draw.probability
    return law


def completed(law: dict[tuple[int, ...], float], sampling: SamplingParams, length: int) -> dict[tuple[int, ...], float]:
    """The law of the first ``length`` tokens when plain sampling goes on where the step stopped."""
    joint: dict[tuple[int, ...], float] = defaultdict(float)
    for emitted, mass in law.items():
        for rest in itertools.product(range(VOCAB), repeat=max(0, length - len(emitted))):
            tokens = (*emitted, *rest)[:length]
            joint[tokens] += mass * plain_probability(tokens, sampling, len(emitted))
    return joint


def plain_probability(tokens: Sequence[int], sampling: SamplingParams, start: int = 0) -> float:
    mass = 1.0
    for index in range(start, len(tokens)):
        row = distribution(toy_logits([*PROMPT, *tokens[:index]]), sampling, PROMPT, tokens[:index])
        mass *= row[tokens[index]]
    return mass


def trees() -> st.SearchStrategy[DraftTree]:
    def build(nodes: list[tuple[int, int]]) -> DraftTree:
        tree = DraftTree()
        for parent_choice, token in nodes:
            parent = parent_choice % (len(tree) + 1) - 1
            if parent == ROOT or tree.depths[parent] < 3:
                tree.add(token, parent, 0.5, "test")
        return tree

    return st.lists(st.tuples(st.integers(0, 12), st.integers(0, VOCAB - 1)), max_size=10).map(build)


SAMPLINGS = [
    SamplingParams(),
    SamplingParams(temperature=0.7, top_k=2),
    SamplingParams(top_p=0.8),
    SamplingParams(min_p=0.3),
    SamplingParams(repetition_penalty=1.6, presence_penalty=0.5, frequency_penalty=0.9),
    SamplingParams(logit_bias=((0, 1.5),), bad_words=((2, 0),)),
]


@settings(max_examples=40, deadline=None)
@given(trees(), st.sampled_from(SAMPLINGS))
def test_the_walk_emits_the_plain_law_on_every_tree(tree: DraftTree, sampling: SamplingParams) -> None:
    depth = tree.max_depth
    joint = completed(walk_law(tree, sampling, depth), sampling, depth + 1)
    assert sum(joint.values()) == pytest.approx(1.0)
    for tokens in itertools.product(range(VOCAB), repeat=depth + 1):
        assert joint[tokens] == pytest.approx(plain_probability(tokens, sampling), abs=1e-9)


def test_acceptance_is_the_probability_of_the_children() -> None:
    tree = DraftTree()
    for token in (0, 2):
        tree.add(token, ROOT, 0.5, "test")
    law = walk_law(tree, SamplingParams(), 1)
    accepted = sum(mass for tokens, mass in law.items() if len(tokens) == 2)
    row = distribution(toy_logits(PROMPT), SamplingParams(), PROMPT, [])
    assert accepted == pytest.approx(row[0] + row[2])


def test_penalties_once_a_step_would_fail_this_check() -> None:
    """Control: leaving the drafted tokens out of the penalties gives another law."""
    sampling = SamplingParams(presence_penalty=1.0)
    tree = DraftTree()
    tree.add(1, tree.add(0, ROOT, 1.0, "test"), 1.0, "test")
    honest = completed(walk_law(tree, sampling, 2), sampling, 3)
    stale = completed(walk_law(tree, SamplingParams(), 2), SamplingParams(), 3)
    truth = {tokens: plain_probability(tokens, sampling) for tokens in honest}
    assert max(abs(honest[tokens] - truth[tokens]) for tokens in truth) < EXACT
    assert max(abs(stale[tokens] - truth[tokens]) for tokens in truth) > 0.01


# --- the rejection rule's code, every outcome --------------------------------------------------------------------


@pytest.mark.parametrize("drafted", TOKENS)
def test_the_rejection_rule_emits_the_target_exactly(drafted: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten equal shares of the uniform resolve the acceptance exactly; the recovered token is enumerated."""
    logits = torch.tensor([TARGET], dtype=torch.float64).log()
    tree = DraftTree()
    tree.add(drafted, ROOT, 1.0, "test")
    residuals: list[torch.Tensor] = []

    def keep(rows: torch.Tensor, keys: Sequence[NoiseKey]) -> list[int]:
        residuals.extend(row.softmax(0) for row in rows)
        return [-1] * len(rows)

    emitted = torch.zeros(4, dtype=torch.float64)
    shares = 10
    for share in range(shares):
        draw = (share + 0.5) / shares
        monkeypatch.setattr(rejection, "uniforms", lambda keys, draw=draw: [draw] * len(keys))
        residuals.clear()
        decision = Decision(TargetRow(logits[0], logits[0]), SamplingParams(), 1, tree, ROOT)
        token = RejectionRule(keep).choose(logits, [decision])[0]
        if token == -1:
            emitted += residuals[0] / shares
        else:
            emitted[token] += 1 / shares
    assert deviation(emitted.tolist()) < EXACT
