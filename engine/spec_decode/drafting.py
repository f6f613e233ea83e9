"""All drafters of an engine as one: proposals merged into one tree a request, feedback handed to each."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from engine.scheduler import ScheduledRequest, SchedulerLimits
from engine.spec_decode.controller import StepCosts
from engine.spec_decode.drafter import (
    CommittedRows,
    DraftContext,
    Drafter,
    DraftFeedback,
    ExtraRows,
    HiddenStates,
    KvOwner,
    TextReader,
)
from engine.spec_decode.pacing import DraftPace
from engine.spec_decode.tree import DraftTree, merged

if TYPE_CHECKING:
    from engine.commit import Emission
    from engine.request import Request

log = logging.getLogger("headlong.engine")


class Drafting:
    """Runs the drafters after each step. A drafter that raises loses its proposals of that step, never a request."""

    def __init__(
        self,
        drafters: Sequence[Drafter],
        limits: SchedulerLimits,
        *,
        vocab_size: int,
        block_size: int,
        costs: StepCosts | None = None,
    ) -> None:
        """costs: of a step, by its rows; None asks every drafter at every step."""
        self.drafters = tuple(drafters)
        self._owners = [(drafter, drafter) for drafter in drafters if isinstance(drafter, KvOwner)]
        self._readers = {drafter.method: drafter for drafter in drafters if isinstance(drafter, TextReader)}
        self._pace = DraftPace(costs)
        self._limits = limits
        self._vocab_size = vocab_size
        self._block_size = block_size

    @contextmanager
    def unsparing(self) -> Iterator[None]:
        """Inside, every drafter is asked at every step for all it has, whatever that costs."""
        pace, self._pace = self._pace, DraftPace()
        try:
            yield
        finally:
            self._pace = pace

    def release(self, request_id: str) -> None:
        for drafter in self.drafters:
            drafter.release(request_id)

    def extra_rows(self, scheduled: Sequence[ScheduledRequest]) -> list[ExtraRows | None]:
        """Rows that drafters add below the last token; at most one drafter may add some to a request."""
        return [self._extra_rows(item) for item in scheduled]

    def _extra_rows(self, item: ScheduledRequest) -> ExtraRows | None:
        request = item.request
        if not item.completes:
            return None
        room = len(request.block_ids) * self._block_size - request.num_tokens - len(item.tree)
        for drafter in self._chosen(request):
            if 0 < drafter.max_extra_rows <= room:
                extra = self._asked(drafter, request, item.tree)
                if extra is not None:
                    return extra
        return None

    def _asked(self, drafter: Drafter, request: Request, tree: DraftTree) -> ExtraRows | None:
        try:
            return drafter.extra_rows(self._context(request), tree)
        except Exception:
            log.exception("drafter %s could not add its rows", drafter.method)
            return None

    def settle(self, scheduled: Sequence[ScheduledRequest]) -> None:
        """Tells what became of the last proposals: which of their nodes are verified in the coming step."""
        self._pace.settle(scheduled)

    def store(self, hidden: HiddenStates, committed: Sequence[CommittedRows]) -> None:
        """Hands a step's verified rows to the drafters that keep something of them. One that fails drafts worse."""
        for drafter, owner in self._owners:
            try:
                owner.store(hidden, committed)
            except Exception:
                log.exception("drafter %s could not store what a step verified", drafter.method)

    def learn_and_propose(self, emissions: Sequence[tuple[Request, Emission]]) -> None:
        """Gives feedback on what was proposed before this step, then proposes for the next one."""
        pending = []
        for request, emission in emissions:
            if not emission.tokens or not request.source.speculation.enabled:
                continue
            if len(request.proposal):
                emitted = [token.token_id for token in emission.tokens]
                self._observe(DraftFeedback(request.request_id, request.proposal, emitted))
            request.proposal = DraftTree()
            if request.finish_reason is None and request.tokens_left(self._limits.max_model_len) > 1:
                pending.append(request)
        # Those whose prompts are not done yet will decode beside these.
        self._propose(pending, sum(request.finish_reason is None for request, _ in emissions))

    def _observe(self, feedback: DraftFeedback) -> None:
        for drafter in self.drafters:
            try:
                drafter.observe(feedback)
            except Exception:
                log.exception("drafter %s could not learn from its feedback", drafter.method)

    def _propose(self, requests: Sequence[Request], batch: int) -> None:
        asking = [
            drafter
            for drafter in self.drafters
            if any(drafter in self._chosen(request) for request in requests) and self._pace.asks(drafter.method, batch)
        ]
        if not asking:
            return
        trees: dict[str, list[DraftTree]] = {request.request_id: [] for request in requests}
        least = self._pace.least_survival(batch, batch * self._limits.max_draft_tokens)
        worth = self._pace.token_seconds(batch)
        contexts_of = {request.request_id: self._context(request, least, worth) for request in requests}
        for drafter in asking:
            contexts = [contexts_of[request.request_id] for request in requests if drafter in self._chosen(request)]
            try:
                if (reader := self._readers.get(drafter.method)) is not None:
                    reader.read(contexts)
                began = time.perf_counter()
                proposals = drafter.propose(contexts)
            except Exception:
                log.exception("drafter %s failed; this step has none of its drafts", drafter.method)
                continue
            for context, tree in zip(contexts, proposals, strict=True):
                if self._is_in_vocabulary(tree):
                    trees[context.request_id].append(tree)
                else:
                    log.error("drafter %s proposed a token outside the vocabulary", drafter.method)
            self._pace.spend(drafter.method, batch, time.perf_counter() - began)
        for request in requests:
            found = trees[request.request_id]
            request.proposal = found[0] if len(found) == 1 else merged(found)
            if len(found) > 1:
                self._extend(request, contexts_of[request.request_id])

    def _extend(self, request: Request, context: DraftContext) -> None:
        """Lets each drafter go on below what the others expect. A fault leaves the tree as it was."""
        whole = request.proposal.copy()
        try:
            for drafter in self._chosen(request):
                drafter.extend(context, whole)
        except Exception:
            log.exception("a drafter could not extend the others' drafts")
            return
        if self._is_in_vocabulary(whole):
            request.proposal = whole

    def _is_in_vocabulary(self, tree: DraftTree) -> bool:
        return all(0 <= token < self._vocab_size for token in tree.tokens)

    def _chosen(self, request: Request) -> list[Drafter]:
        wish = request.source.speculation
        if not wish.enabled:
            return []
        return [drafter for drafter in self.drafters if wish.method in ("auto", drafter.method)]

    def _context(self, request: Request, least: float = 0.0, token_seconds: float = 0.0) -> DraftContext:
        wish = request.source.speculation.max_draft_tokens
        limit = self._limits.max_draft_tokens
        return DraftContext(
            request_id=request.request_id,
            token_ids=request.token_ids,
            prompt_length=request.prompt_length,
            sampling=request.sampling,
            max_depth=max(0, request.tokens_left(self._limits.max_model_len) - 1),
            max_nodes=limit if wish is None else min(limit, wish),
            accepted=request.accepted,
            extra=request.extra,
            least=least,
            token_seconds=token_seconds,
            block_ids=request.block_ids,
        )
