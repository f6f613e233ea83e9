"""Drafters whose heads know the accepted node alone: a best-first tree over calibrated probabilities.

The depths' distributions do not depend on one another, so one pass of the heads gives them all, and each node of a
depth has the same children.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic

import torch

from engine.spec_decode.acceptance import AcceptanceTable
from engine.spec_decode.candidates import Candidates
from engine.spec_decode.drafter import DraftContext, DraftFeedback
from engine.spec_decode.drafter_base import HeadDrafter, HeadsT
from engine.spec_decode.head_ranking import MIN_SURVIVAL, Offer, RankedRow, offer_of
from engine.spec_decode.tree import ROOT, DraftTree
from heads.best_first import best_tree


@dataclass(slots=True)
class _RequestState:
    """tables: acceptance by depth. offers: the candidates of each depth. asked: per depth the confidence of each
    candidate that was proposed."""

    tables: list[AcceptanceTable]
    offers: list[Offer] = field(default_factory=list)
    asked: list[dict[int, float]] = field(default_factory=list)


class IndependentDrafter(HeadDrafter[HeadsT, _RequestState], Generic[HeadsT]):
    """See the module's docstring. One kind of heads is a ``method`` and its ``_logits``."""

    @abstractmethod
    def _logits(self, contexts: Sequence[DraftContext]) -> torch.Tensor:
        """[heads, contexts, draft vocabulary]; every context has accepted states."""

    def propose(self, contexts: Sequence[DraftContext]) -> list[DraftTree]:
        ready = [context for context in contexts if context.accepted is not None and context.max_nodes > 0]
        candidates = iter(self._candidates(ready)) if ready else iter(())
        return [
            self._grow(context, next(candidates))
            if context.accepted is not None and context.max_nodes > 0
            else DraftTree()
            for context in contexts
        ]

    @torch.inference_mode()
    def _candidates(self, contexts: Sequence[DraftContext]) -> list[list[Candidates]]:
        """Of each context and depth, from one pass of the heads for all of them."""
        logits = self._logits(contexts).transpose(0, 1).float().cpu().contiguous()
        # The tokens between the root and a deeper candidate are not known to the heads, so the path is left out.
        rows = [
            RankedRow(context, depth, context.max_nodes if depth <= context.max_depth else 0)
            for context in contexts
            for depth in range(1, logits.shape[1] + 1)
        ]
        found = self._ranking.candidates(logits.flatten(0, 1), rows)
        depths = logits.shape[1]
        return [found[at : at + depths] for at in range(0, len(found), depths)]

    def _grow(self, context: DraftContext, candidates: Sequence[Candidates]) -> DraftTree:
        state = self._state(context)
        depths = min(len(candidates), context.max_depth)
        state.offers = [offer_of(found, table) for found, table in zip(candidates[:depths], state.tables, strict=False)]
        tree = DraftTree()
        state.asked = [{} for _ in range(depths)]
        least = max(MIN_SURVIVAL, context.least)
        for node in best_tree([offer.rates for offer in state.offers], context.max_nodes, least):
            # Nodes are added in the order of the list, so indices agree.
            self._add(tree, state, node.parent, node.rank, node.probability)
        return tree

    def _add(self, tree: DraftTree, state: _RequestState, parent: int, rank: int, survival: float) -> None:
        depth = 1 if parent == ROOT else tree.depths[parent] + 1
        offer = state.offers[depth - 1]
        token = offer.tokens[rank]
        tree.add(token, parent, survival, self.method)
        state.asked[depth - 1][token] = offer.confidences[rank]

    def extend(self, context: DraftContext, tree: DraftTree) -> None:
        """The same candidates below the others' nodes: a head looks at the state alone, not at the tokens between."""
        state = self._requests.get(context.request_id)
        if state is None or not state.offers:
            return
        least = tree.cutoff(context.max_nodes, max(MIN_SURVIVAL, context.least))
        node = 0
        while node < len(tree):  # the nodes added here get children too
            depth = tree.depths[node]
            for rank, rate in enumerate(state.offers[depth].rates if depth < len(state.offers) else ()):
                survival = tree.survival[node] * rate
                if survival <= least:
                    break
                self._add(tree, state, node, rank, survival)
            node += 1

    def _state(self, context: DraftContext) -> _RequestState:
        state = self._requests.get(context.request_id)
        if state is None:
            state = _RequestState(self._calibrations.of_request(context.sampling))
            self._requests[context.request_id] = state
        return state

    def observe(self, feedback: DraftFeedback) -> None:
        """Counts the candidates of each depth that was reached: those are the depths whose parents were right."""
        state = self._requests.get(feedback.request_id)
        if state is None:
            return
        for table, asked, token in zip(state.tables, state.asked, feedback.emitted, strict=False):
            for candidate, confidence in asked.items():
                table.record(confidence, candidate == token)
        state.asked = []
