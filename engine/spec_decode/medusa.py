"""The ``medusa`` drafter: heads on the accepted node's state draft a best-first tree over calibrated probabilities.

At temperature 0 a head's candidates are ranked by log q. Above it they are ranked by log q + g, with g the very noise
that the verifier will add at that position ("coupled"): where q is near the target, the same token wins on both sides,
however flat the distribution. ``heads`` holds the model and its training.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from engine.errors import RequestFailedError
from engine.sampler.noise import NoiseKey
from engine.sampler.processing import RowContext, is_greedy, needs_processing, target_row
from engine.spec_decode.acceptance import AcceptanceTable, Buckets
from engine.spec_decode.candidates import Candidates, HeadCompute, PlainHeadCompute, Wish
from engine.spec_decode.drafter import DraftContext, DraftFeedback, ExtraRows
from engine.spec_decode.tree import ROOT, DraftTree
from heads.best_first import best_tree
from heads.config import CONFIDENCE_EDGES, Calibration
from heads.lm_head import DraftLmHead
from heads.medusa import MedusaHeads

log = logging.getLogger("headlong.engine")

MIN_SURVIVAL = 0.01
_PRIOR_WEIGHT = 30.0
_DECAY = 0.99


@dataclass(frozen=True, slots=True)
class _Offer(Candidates):
    """rates: how often each is right where its parent is, as calibrated; best first."""

    rates: list[float]


@dataclass(slots=True)
class _RequestState:
    """tables: acceptance by depth. offers: the candidates of each depth. asked: per depth the confidence of each
    candidate that was proposed."""

    tables: list[AcceptanceTable]
    offers: list[_Offer] = field(default_factory=list)
    asked: list[dict[int, float]] = field(default_factory=list)


class MedusaDrafter:
    """See the module's docstring. ``method`` is "medusa"."""

    method = "medusa"
    needs_hidden = True
    hidden_layers: tuple[int, ...] = ()
    max_extra_rows = 0

    def __init__(
        self,
        heads: MedusaHeads,
        lm_head: DraftLmHead,
        *,
        calibration: Calibration | None = None,
        coupling: bool = True,
        eos_token_ids: tuple[int, ...] = (),
    ) -> None:
        self._heads = heads
        self._lm_head = lm_head
        self._token_ids = lm_head.token_ids.numpy()
        self._coupling = coupling
        self._eos = eos_token_ids
        self._requests: dict[str, _RequestState] = {}
        self._compute: HeadCompute = PlainHeadCompute()
        # Greedy and sampled drafts are ranked by different scores, so they are calibrated apart.
        self._tables = {greedy: _tables(heads.num_heads, calibration) for greedy in (True, False)}

    def compute_with(self, compute: HeadCompute) -> None:
        """Packs the heads: afterwards they cannot be trained or saved any more."""
        self._compute = compute
        compute.pack(self._heads)
        compute.pack(self._lm_head)

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
        states = torch.stack([context.accepted.final for context in contexts if context.accepted is not None])
        logits: torch.Tensor = self._lm_head(self._heads(states.float())).transpose(0, 1).float().cpu().contiguous()
        wishes: list[Wish] = []
        for row, context in zip(logits, contexts, strict=True):
            sampling, first = context.sampling, len(context.token_ids)
            is_plain = is_greedy(sampling)
            if needs_processing(sampling):
                row.copy_(self._processed(context, row))
            elif not is_plain:
                row.div_(sampling.temperature)
            for depth in range(len(row)):
                is_noisy = self._coupling and not is_plain
                key = NoiseKey(sampling.seed, first + depth) if is_noisy else None
                wishes.append(Wish(context.max_nodes if depth < context.max_depth else 0, key))
        found = self._compute.candidates(logits.flatten(0, 1), self._token_ids, wishes)
        depths = logits.shape[1]
        return [found[at : at + depths] for at in range(0, len(found), depths)]

    def _grow(self, context: DraftContext, candidates: Sequence[Candidates]) -> DraftTree:
        state = self._state(context)
        depths = min(len(candidates), context.max_depth)
        state.offers = [
            _by_rate(found, table.rates(found.confidences))
            for found, table in zip(candidates[:depths], state.tables, strict=False)
        ]
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
            shared_tables = self._tables[is_greedy(context.sampling)]
            state = _RequestState([shared.child() for shared in shared_tables])
            self._requests[context.request_id] = state
        return state

    def _processed(self, context: DraftContext, logits: torch.Tensor) -> torch.Tensor:
        """Bias, penalties, bans, temperature and filters, by the function that makes the target's rows.

        The tokens between the root and a deeper candidate are not known to the heads, so the path is left out.
        """
        rows = RowContext(context.sampling, context.token_ids, context.prompt_length, self._eos)
        whole = torch.full((len(logits), self._lm_head.vocab_size), -torch.inf)
        whole[:, self._lm_head.token_ids] = logits
        for row in whole:
            try:
                target_row(row, rows)
            except RequestFailedError:  # the draft vocabulary holds nothing the request allows
                row[self._lm_head.token_ids] = 0.0
        return whole[:, self._lm_head.token_ids]

    def extra_rows(self, context: DraftContext, tree: DraftTree) -> ExtraRows | None:
        return None

    def observe(self, feedback: DraftFeedback) -> None:
        """Counts the candidates of each depth that was reached: those are the depths whose parents were right."""
        state = self._requests.get(feedback.request_id)
        if state is None:
            return
        for table, asked, token in zip(state.tables, state.asked, feedback.emitted, strict=False):
            for candidate, confidence in asked.items():
                table.record(confidence, candidate == token)
        state.asked = []

    def release(self, request_id: str) -> None:
        self._requests.pop(request_id, None)


def _tables(num_heads: int, calibration: Calibration | None) -> list[AcceptanceTable]:
    """One table a depth, resting on what was measured after training, else on the heads' word."""
    if calibration is None:
        rates: Sequence[tuple[float, ...]] = [CONFIDENCE_EDGES] * num_heads
        edges: tuple[float, ...] = CONFIDENCE_EDGES
    else:
        rates, edges = calibration.rates, calibration.edges
    return [AcceptanceTable(Buckets(edges, depth, _PRIOR_WEIGHT, _DECAY)) for depth in rates]


def _by_rate(found: Candidates, rates: list[float]) -> _Offer:
    """Best calibrated rate first; buckets may disagree with the heads' own order."""
    order = sorted(range(len(rates)), key=lambda rank: -rates[rank])
    return _Offer(
        [found.tokens[rank] for rank in order],
        [found.confidences[rank] for rank in order],
        [rates[rank] for rank in order],
    )
