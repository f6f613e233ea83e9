"""The one verifier: walks every request's draft tree and emits the tokens that one forward pass has decided.

At each node, from the root on, a rule chooses the next token from the node's target row. If a drafted child carries
it, the walk steps into that child, else it ends. Every chosen token is emitted: the accepted ones and the last one,
which is recovered (a draft was refused) or bonus (the branch was used up).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch

from engine.config import VerifierName
from engine.errors import RequestFailedError
from engine.sampler.processing import RowContext, TargetRow, gather_rows, is_greedy, needs_processing, target_row
from engine.sampler.sample import Draw, gumbel_argmax
from engine.sampling_params import SamplingParams
from engine.spec_decode.rejection import RejectionRule
from engine.spec_decode.rule import Decision, MatchRule, Rule
from engine.spec_decode.tree import ROOT, DraftTree

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class VerifyItem:
    """One request's share of a step.

    token_ids: committed tokens, prompt first (live view). prompt_length: how many are the prompt.
    first_row: logits row of the root; node i has row first_row + 1 + i.
    eos_token_ids: the model's EOS ids (min_tokens bans them with the stop ids).
    """

    token_ids: Sequence[int]
    prompt_length: int
    sampling: SamplingParams
    eos_token_ids: tuple[int, ...]
    tree: DraftTree
    first_row: int


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """tokens[j] was chosen from logits row rows[j]; nodes are the accepted nodes, so len(tokens) == len(nodes) + 1.

    margins: one a token when sampling.return_margins, else None. error: the request's own fault (non-finite logits,
    an exception in its own processing); then the other fields are empty.
    """

    tokens: tuple[int, ...] = ()
    nodes: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()
    margins: tuple[float, ...] | None = None
    error: str | None = None


class Verifier(Protocol):
    """What the engine calls once a step."""

    def verify(self, items: Sequence[VerifyItem], logits: torch.Tensor) -> list[VerifyResult]:
        """Walks every item's tree. logits: [rows, vocab], raw, in the model's dtype."""
        ...


def make_verifier(name: VerifierName, draw: Draw = gumbel_argmax) -> Verifier:
    """The verifier that ``speculation.verifier`` names. draw: how sampled rows are drawn."""
    return TreeVerifier(MatchRule(draw) if name == "match" else RejectionRule(draw))


def verify(items: Sequence[VerifyItem], logits: torch.Tensor) -> list[VerifyResult]:
    """Walks every item's tree by the matching rule. logits: [rows, vocab], raw, in the model's dtype."""
    return make_verifier("match").verify(items, logits)


@dataclass(slots=True)
class _Walk:
    """Where one item's walk stands. ``node`` is None when it is over."""

    item: VerifyItem
    context: RowContext
    node: int | None = ROOT
    tokens: list[int] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    error: str | None = None

    @property
    def row(self) -> int:
        assert self.node is not None
        return self.item.first_row + 1 + self.node

    @contextmanager
    def isolated(self) -> Iterator[None]:
        """A fault inside ends this walk with an error and leaves the others alone."""
        try:
            yield
        except RequestFailedError as error:
            self.error, self.node = str(error), None
        except Exception as error:
            logger.exception("A request's own processing failed")
            self.error, self.node = f"{type(error).__name__}: {error}", None

    @property
    def is_plain(self) -> bool:
        """Its tokens are the largest logits themselves."""
        return is_greedy(self.item.sampling) and not needs_processing(self.item.sampling)

    def run_plain(self, rule: Rule, logits: torch.Tensor) -> None:
        """The whole of a plain walk, on the raw rows: nothing is copied, as nothing changes them. logits: on the CPU,
        in a dtype that numpy has."""
        with self.isolated():
            while self.node is not None:
                row = logits[self.row]
                token = int(row.numpy().argmax())  # the first maximum, or the first NaN
                _check_peak(float(row[token]))
                self.take(token, rule, self._decision(TargetRow(row, row)))

    def decision(self, row: torch.Tensor, peak: float) -> Decision:
        """Processes this walk's row [vocab] in place; ``peak`` is its raw maximum."""
        _check_peak(peak)
        # The tokens emitted so far are those on the path to the node.
        return self._decision(target_row(row, self.context, self.tokens))

    def _decision(self, target: TargetRow) -> Decision:
        assert self.node is not None
        position = len(self.item.token_ids) + len(self.tokens)
        return Decision(target, self.item.sampling, position, self.item.tree, self.node)

    def take(self, token: int, rule: Rule, decision: Decision) -> None:
        if self.item.sampling.return_margins:
            self.margins.append(rule.margin(decision, token))
        self.tokens.append(token)
        self.rows.append(self.row)
        self.node = rule.next_node(self.item.tree, decision.node, token)
        if self.node is not None:
            self.nodes.append(self.node)

    def result(self) -> VerifyResult:
        if self.error is not None:
            return VerifyResult(error=self.error)
        margins = tuple(self.margins) if self.item.sampling.return_margins else None
        return VerifyResult(tuple(self.tokens), tuple(self.nodes), tuple(self.rows), margins)


def _check_peak(peak: float) -> None:
    if not math.isfinite(peak):  # the maximum carries NaN, +inf, or -inf where all are
        raise RequestFailedError("The model's logits are not finite.")


@dataclass(frozen=True, slots=True)
class TreeVerifier:
    """Walks trees by one rule, all items' current nodes at once, so that only visited rows cost anything."""

    rule: Rule

    def verify(self, items: Sequence[VerifyItem], logits: torch.Tensor) -> list[VerifyResult]:
        """Walks every item's tree. logits: [rows, vocab], raw, in the model's dtype."""
        walks = [
            _Walk(item, RowContext(item.sampling, item.token_ids, item.prompt_length, item.eos_token_ids))
            for item in items
        ]
        is_numpys = logits.device.type == "cpu" and logits.dtype in (torch.float32, torch.float64)
        active = []
        with torch.no_grad():
            for walk in walks:
                if is_numpys and walk.is_plain:
                    walk.run_plain(self.rule, logits)
                else:
                    active.append(walk)
            while active:
                self._wave(active, logits)
                active = [walk for walk in active if walk.node is not None]
        return [walk.result() for walk in walks]

    def _wave(self, walks: Sequence[_Walk], logits: torch.Tensor) -> None:
        """Chooses one token for each walk."""
        rows = gather_rows(logits, [walk.row for walk in walks])
        peaks = rows.amax(dim=1).tolist()
        decisions: list[tuple[_Walk, Decision]] = []
        live: list[int] = []
        for index, walk in enumerate(walks):
            with walk.isolated():
                decisions.append((walk, walk.decision(rows[index], peaks[index])))
                live.append(index)
        if len(live) < len(walks):
            rows = rows[live]
        tokens = self.rule.choose(rows, [decision for _, decision in decisions]) if decisions else []
        for token, (walk, decision) in zip(tokens, decisions, strict=True):
            with walk.isolated():
                walk.take(token, self.rule, decision)
