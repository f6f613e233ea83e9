"""One rule: each step every request gets the tokens it lacks, running ones first, until the budget is spent.

Chunked prefill, prefix-cache hits, plain decode and verification are the same case: a request catches up from
``num_computed_tokens`` to ``num_tokens`` plus its draft. When blocks run out the youngest running request is preempted:
its blocks are freed and it waits, first in line, to compute its tokens again.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from engine.kv_cache import BlockPool
from engine.request import Request
from engine.spec_decode.controller import Controller, DraftChoice, DraftRoom
from engine.spec_decode.tree import DraftTree


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """max_num_batched_tokens: rows of one step. max_draft_tokens: tree nodes of one request. max_extra_rows: rows that
    a drafter may add beside a request's tree; they get blocks only while some are free."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_draft_tokens: int
    max_extra_rows: int = 0


@dataclass(slots=True)
class ScheduledRequest:
    """One request's rows in a step: tokens [start, start + count) of its list, then the nodes of ``tree``."""

    request: Request
    start: int
    count: int
    tree: DraftTree

    @property
    def completes(self) -> bool:
        """The last known token is among the rows, so the step can emit."""
        return self.start + self.count == self.request.num_tokens


@dataclass(slots=True)
class Plan:
    """What one step computes, and the counts that metrics want of how it was decided."""

    scheduled: list[ScheduledRequest] = field(default_factory=list)
    num_decoding: int = 0
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    modes: Counter[tuple[str, str]] = field(default_factory=Counter)


class Scheduler:
    """Decides which requests run, with which rows, on which blocks."""

    def __init__(self, pool: BlockPool, limits: SchedulerLimits, controller: Controller) -> None:
        self.pool = pool
        self.limits = limits
        self.controller = controller
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    @property
    def waiting_tokens(self) -> int:
        return sum(request.num_uncomputed_tokens for request in list(self.waiting))

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        """Takes a request out and frees its blocks; it must be waiting or running."""
        if request in self.running:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        self._free_blocks(request)

    def schedule(self) -> Plan:
        plan = Plan()
        choices = self._choose_drafts(plan)
        budget = self._schedule_running(plan, choices)
        if not plan.preemptions:
            self._admit_waiting(plan, budget)
        return plan

    def _choose_drafts(self, plan: Plan) -> dict[str, DraftChoice]:
        decoding = [request for request in self.running if request.is_decoding]
        plan.num_decoding = len(decoding)
        catching_up = sum(request.num_uncomputed_tokens for request in self.running if not request.is_decoding)
        budget = self.limits.max_num_batched_tokens
        room = max(0, budget - len(self.running))
        other_rows = min(room, catching_up + self.waiting_tokens)
        limits = {request.request_id: self._draft_limits(request) for request in decoding}
        batch = min(self.limits.max_num_seqs, len(self.running) + len(self.waiting))
        return self.controller.choose(decoding, limits, DraftRoom(other_rows, room, batch - len(decoding)))

    def _draft_limits(self, request: Request) -> tuple[int, int]:
        """(nodes, depth) allowed: a draft of depth d emits up to d + 1 tokens, and none may lie past a limit."""
        depth = max(0, request.tokens_left(self.limits.max_model_len) - 1)
        wish = request.source.speculation
        if not wish.enabled:
            return 0, 0
        nodes = self.limits.max_draft_tokens
        if wish.max_draft_tokens is not None:
            nodes = min(nodes, wish.max_draft_tokens)
        return (nodes if depth else 0), depth

    def _schedule_running(self, plan: Plan, choices: dict[str, DraftChoice]) -> int:
        budget = self.limits.max_num_batched_tokens
        index = 0
        while index < len(self.running) and budget > 0:
            request = self.running[index]
            # A row stays for each request behind this one: nobody's tokens wait for another's prompt or draft.
            free = max(1, budget - (len(self.running) - index - 1))
            count = min(request.num_uncomputed_tokens, free)
            choice = choices.get(request.request_id)
            tree = choice.tree if choice is not None and len(choice.tree) <= free - count else DraftTree()
            tree = self._fit_draft(request, count, tree)
            if not self._reserve_running(request, count + len(tree), plan):
                break
            if choice is not None:
                self._count_mode(plan, choice, tree)
            self._reserve_extra(request, count + len(tree))
            plan.scheduled.append(ScheduledRequest(request, request.num_computed_tokens, count, tree))
            budget -= count + len(tree)
            index += 1
        return budget

    def _fit_draft(self, request: Request, count: int, tree: DraftTree) -> DraftTree:
        """A draft is worth no preemption: without room for it, the step is plain."""
        missing = self._missing_blocks(request, count + len(tree))
        return tree if missing <= self.pool.num_free else DraftTree()

    @staticmethod
    def _count_mode(plan: Plan, choice: DraftChoice, tree: DraftTree) -> None:
        if len(tree):
            plan.modes["spec", ""] += 1
        else:
            plan.modes["plain", "load" if len(choice.tree) else choice.reason] += 1

    def _missing_blocks(self, request: Request, count: int) -> int:
        return self.pool.blocks_for(request.num_computed_tokens + count) - len(request.block_ids)

    def _reserve_running(self, request: Request, count: int, plan: Plan) -> bool:
        """Blocks for ``count`` more rows, preempting younger requests; False if the request itself was preempted."""
        while (missing := self._missing_blocks(request, count)) > self.pool.num_free:
            youngest = self.running[-1]
            self._preempt(youngest)
            plan.preemptions += 1
            if youngest is request:
                return False
        request.block_ids += self.pool.allocate(max(0, missing))
        return True

    def _reserve_extra(self, request: Request, count: int) -> None:
        """Room for a drafter's extra rows behind ``count`` rows, if it costs nobody anything."""
        missing = self._missing_blocks(request, count + self.limits.max_extra_rows)
        if self.limits.max_extra_rows and 0 < missing <= self.pool.num_free:
            request.block_ids += self.pool.allocate(missing)

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._free_blocks(request)
        request.num_computed_tokens = 0
        self.waiting.appendleft(request)

    def _free_blocks(self, request: Request) -> None:
        self.pool.release(request.block_ids)
        request.block_ids = []
        request.num_published_blocks = 0

    def _admit_waiting(self, plan: Plan, budget: int) -> None:
        while self.waiting and budget > 0 and len(self.running) < self.limits.max_num_seqs:
            request = self.waiting[0]
            self._match_prefix(request)
            count = min(request.num_uncomputed_tokens, budget)
            # Room for the whole sequence, not just the first chunk: else it would soon preempt or be preempted.
            if self._missing_blocks(request, request.num_uncomputed_tokens) > self.pool.num_free:
                self._free_blocks(request)
                request.num_computed_tokens = 0
                break
            request.block_ids += self.pool.allocate(max(0, self._missing_blocks(request, count)))
            self.waiting.popleft()
            self.running.append(request)
            self._count_prefix(request, plan)
            self._reserve_extra(request, count)
            plan.scheduled.append(ScheduledRequest(request, request.num_computed_tokens, count, DraftTree()))
            budget -= count

    def _match_prefix(self, request: Request) -> None:
        """Starts a request behind the blocks it shares. At least one token stays to be computed: its logits are
        needed. Log-probabilities of the prompt need every row, so they take no shortcut."""
        if not self.pool.prefix_caching or request.wants_prompt_logprobs:
            return
        full = (request.num_tokens - 1) // self.pool.block_size
        request.block_ids = self.pool.acquire_prefix(request.block_digests(full, self.pool.block_size))
        request.num_published_blocks = len(request.block_ids)
        request.num_computed_tokens = len(request.block_ids) * self.pool.block_size

    def _count_prefix(self, request: Request, plan: Plan) -> None:
        """A request's first start alone counts as a query: a resumed one finds its own blocks."""
        if request.scheduled is None and self.pool.prefix_caching and not request.wants_prompt_logprobs:
            request.num_cached_tokens = min(request.num_computed_tokens, request.prompt_length)
            plan.prefix_queries += request.num_tokens
            plan.prefix_hits += request.num_computed_tokens

    def commit(self, request: Request, num_computed_tokens: int) -> None:
        """Records verified tokens and publishes the blocks they fill."""
        assert request.num_computed_tokens <= num_computed_tokens <= request.num_tokens
        request.num_computed_tokens = num_computed_tokens
        if not self.pool.prefix_caching:
            return
        full = num_computed_tokens // self.pool.block_size
        if full > request.num_published_blocks:
            digests = request.block_digests(full, self.pool.block_size)
            for block in range(request.num_published_blocks, full):
                self.pool.publish(request.block_ids[block], digests[block])
            request.num_published_blocks = full
