"""How a token is chosen at a node of the draft tree: the one thing in which verifiers differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from engine.sampler.margins import choice_margin
from engine.sampler.noise import NoiseKey
from engine.sampler.processing import TargetRow
from engine.sampler.sample import Draw, gumbel_argmax, sample
from engine.sampling_params import SamplingParams
from engine.spec_decode.tree import DraftTree


@dataclass(frozen=True, slots=True)
class Decision:
    """One visited node. ``position``: index, in the whole sequence, of the token to choose there."""

    target: TargetRow
    sampling: SamplingParams
    position: int
    tree: DraftTree
    node: int


class Rule(Protocol):
    """Chooses the emitted token at each node; each must leave it distributed as the target row, whatever the tree."""

    def choose(self, logits: torch.Tensor, decisions: Sequence[Decision]) -> list[int]:
        """The token of each decision. logits: their target rows stacked, [len(decisions), vocab]."""
        ...

    def margin(self, decision: Decision, token: int) -> float:
        """How far ``token``, just chosen, was from losing (``engine.sampler.margins``)."""
        ...

    def next_node(self, tree: DraftTree, node: int, token: int) -> int | None:
        """The drafted child that ``token`` accepts, or None: then the walk ends."""
        ...


@dataclass(frozen=True, slots=True)
class MatchRule:
    """y = argmax(log p + g), with Gumbel noise g keyed by (seed, position): the draft never enters the choice.

    The output is a function of the prompt, the parameters and the seed alone. Idea: drafter-invariant speculative
    decoding, arXiv 2408.07978. draw: how sampled rows are drawn (``engine.sampler.sample``).
    """

    draw: Draw = gumbel_argmax

    def choose(self, logits: torch.Tensor, decisions: Sequence[Decision]) -> list[int]:
        keys = [NoiseKey(decision.sampling.seed, decision.position) for decision in decisions]
        return sample(logits, [decision.sampling for decision in decisions], keys, self.draw)

    def margin(self, decision: Decision, token: int) -> float:
        key = NoiseKey(decision.sampling.seed, decision.position)
        return choice_margin(decision.target, decision.sampling, key, token)

    def next_node(self, tree: DraftTree, node: int, token: int) -> int | None:
        return tree.child(node, token)
