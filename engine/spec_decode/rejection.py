"""The classic chain rule, kept for comparison: accept the drafted x with probability min(1, p(x) / q(x)), else sample
from the normalised positive part of p - q (Leviathan, Kalman and Matias, arXiv 2211.17192, section 2.3).

A drafter here hands over definite tokens, so q is one-hot: x is accepted with probability p(x), and the positive part
of p - q is p without x. Uniforms and residual noise come from streams of their own, so a seed reproduces the output
for the same drafts, but not the output of plain decoding. At temperature 0 it equals the matching rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.sampler.filters import active_filters
from engine.sampler.margins import boundary_distance, choice_margin, log_odds_distance
from engine.sampler.noise import NoiseKey, uniforms
from engine.sampler.processing import TargetRow, is_greedy
from engine.sampler.sample import Draw, gumbel_argmax, sample
from engine.spec_decode.rule import Decision
from engine.spec_decode.tree import DraftTree

_ACCEPT_STREAM = 2
_SAMPLE_STREAM = 3


@dataclass(frozen=True, slots=True)
class RejectionRule:
    """Verifies a chain; of a tree, the first branch (each node's first child). draw: how residuals are sampled."""

    draw: Draw = gumbel_argmax

    def choose(self, logits: torch.Tensor, decisions: Sequence[Decision]) -> list[int]:
        drafted = {
            index: token
            for index, decision in enumerate(decisions)
            if not is_greedy(decision.sampling) and (token := _drafted_token(decision)) is not None
        }
        draws = uniforms([_accept_key(decisions[index]) for index in drafted])
        accepted: dict[int, int] = {}
        residual = logits.clone() if drafted else logits
        for (index, token), draw in zip(drafted.items(), draws, strict=True):
            if draw < _probability(logits[index], token):
                accepted[index] = token
            else:
                residual[index, token] = -torch.inf
        rest = [index for index in range(len(decisions)) if index not in accepted]
        keys = [_sample_key(decisions[i]) for i in rest]
        sampled = sample(residual[rest], [decisions[i].sampling for i in rest], keys, self.draw)
        accepted.update(zip(rest, sampled, strict=True))
        return [accepted[index] for index in range(len(decisions))]

    def margin(self, decision: Decision, token: int) -> float:
        """The margin of the acceptance and, where the token was sampled, of that sample too."""
        target, sampling, key = decision.target, decision.sampling, _sample_key(decision)
        drafted = None if is_greedy(sampling) else _drafted_token(decision)
        if drafted is None:
            return choice_margin(target, sampling, key, token)
        margin = log_odds_distance(_probability(target.logits, drafted), uniforms([_accept_key(decision)])[0])
        filters = active_filters(sampling)
        if filters and target.unfiltered[drafted] > -torch.inf:
            margin = min(margin, boundary_distance(target, filters, drafted))
        if token == drafted:
            return margin
        residual = TargetRow(_without(target.logits, drafted), _without(target.unfiltered, drafted))
        return min(margin, choice_margin(residual, sampling, key, token))

    def next_node(self, tree: DraftTree, node: int, token: int) -> int | None:
        child = tree.child(node, token)
        return child if child == _first_child(tree, node) else None


def _first_child(tree: DraftTree, node: int) -> int | None:
    return next((child for child, parent in enumerate(tree.parents) if parent == node), None)


def _drafted_token(decision: Decision) -> int | None:
    """The token to test, or None. One outside the vocabulary could never be accepted, so it counts as no draft."""
    child = _first_child(decision.tree, decision.node)
    if child is None or not 0 <= decision.tree.tokens[child] < len(decision.target.logits):
        return None
    return decision.tree.tokens[child]


def _accept_key(decision: Decision) -> NoiseKey:
    return NoiseKey(decision.sampling.seed, decision.position, _ACCEPT_STREAM)


def _sample_key(decision: Decision) -> NoiseKey:
    return NoiseKey(decision.sampling.seed, decision.position, _SAMPLE_STREAM)


def _probability(row: torch.Tensor, token: int) -> float:
    """The token's probability under the target row; exactly 1 when nothing else is left."""
    weights = (row.double() - row.max()).exp_()
    return float(weights[token] / weights.sum())


def _without(row: torch.Tensor, token: int) -> torch.Tensor:
    rest = row.clone()
    rest[token] = -torch.inf
    return rest
