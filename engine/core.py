"""One engine step: take what came in, plan, compute, commit and report."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.batch import Batch, build_batch
from engine.commit import Committer, Emission
from engine.model_runner import ForwardResult, ModelRunner
from engine.outputs import RequestOutput, StepOutput, StepStats
from engine.request import Request
from engine.sampling_params import EngineRequest
from engine.scheduler import Plan, Scheduler
from engine.spec_decode.drafter import ExtraRows
from engine.spec_decode.drafting import Drafting

log = logging.getLogger("headlong.engine")


@dataclass(slots=True)
class Execution:
    """What computing a plan gave: a batch and its result (None when there was nothing to compute), the requests that
    a fault took out, and the wall time by phase."""

    batch: Batch | None = None
    result: ForwardResult | None = None
    failed: list[tuple[Request, str]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)


class EngineCore:
    """Owns the live requests. Everything runs on the engine thread, but for ``add`` and ``abort``, which only append
    to the inbox."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        drafting: Drafting,
        committer: Committer,
    ) -> None:
        self.scheduler = scheduler
        self._runner = runner
        self.drafting = drafting
        self._committer = committer
        self._inbox: deque[EngineRequest | str] = deque()
        self._requests: dict[str, Request] = {}

    def add(self, request: EngineRequest) -> None:
        """Hands in a request; any thread."""
        self._inbox.append(request)

    def abort(self, request_id: str) -> None:
        """Asks for a request to be freed at the start of the next step; any thread."""
        self._inbox.append(request_id)

    @property
    def has_work(self) -> bool:
        return bool(self._inbox or self._requests)

    @property
    def inbox_tokens(self) -> int:
        """Prompt tokens handed in and not yet taken; any thread."""
        return sum(len(item.prompt_token_ids) for item in list(self._inbox) if isinstance(item, EngineRequest))

    def step(self) -> StepOutput:
        """Runs one step and returns what became of every request it touched."""
        started = time.perf_counter()
        aborted = self._take_inbox()
        plan = self.scheduler.schedule()
        planned = time.perf_counter()
        execution = self._execute(plan)
        return self._update(plan, execution, aborted, (started, planned))

    def _take_inbox(self) -> list[RequestOutput]:
        """Admits new requests and frees aborted ones; an abort of an unknown id is late, not wrong."""
        outputs = []
        while self._inbox:
            message = self._inbox.popleft()
            if isinstance(message, EngineRequest):
                request = self._committer.new_request(message)
                self._requests[request.request_id] = request
                self.scheduler.add(request)
            elif (found := self._requests.get(message)) is not None:
                found.finish_reason = "abort"
                outputs.append(self._committer.output(found, Emission()))
                self._forget(found)
        return outputs

    def _forget(self, request: Request) -> None:
        self.scheduler.remove(request)
        self.drafting.release(request.request_id)
        del self._requests[request.request_id]

    def _execute(self, plan: Plan) -> Execution:
        """Computes the plan. A failing forward costs the newest of its requests, then the rest is tried again."""
        execution = Execution()
        scheduled = list(plan.scheduled)
        self.drafting.settle(scheduled)
        while scheduled:
            started = time.perf_counter()
            try:
                extras: Sequence[ExtraRows | None] = self.drafting.extra_rows(scheduled)
                execution.batch = build_batch(scheduled, extras)
                execution.result = self._runner.forward(execution.batch)
            except Exception as error:
                newest = max(scheduled, key=lambda item: item.request.arrived)
                log.exception("forward failed; request %s is given up", newest.request.request_id)
                execution.failed.append((newest.request, f"{type(error).__name__}: {error}"))
                scheduled.remove(newest)
                execution.batch = execution.result = None
                continue
            execution.seconds["verify"] = time.perf_counter() - started
            break
        return execution

    def _update(
        self, plan: Plan, execution: Execution, aborted: list[RequestOutput], clock: tuple[float, float]
    ) -> StepOutput:
        """Verifies, commits, drafts for the next step and frees what has ended."""
        began, planned = clock
        execution.seconds["schedule"] = planned - began
        emissions: list[tuple[Request, Emission]] = []
        if execution.batch is not None and execution.result is not None:
            emissions = self._committer.commit(execution.batch, execution.result, execution.seconds)
        for request, reason in execution.failed:
            request.finish_reason = "error"
            emissions.append((request, Emission(error=reason)))
        drafting_from = time.perf_counter()
        if execution.result is not None and execution.result.hidden is not None:
            rows = [emission.committed for _, emission in emissions if emission.committed is not None]
            self.drafting.store(execution.result.hidden, rows)
        self.drafting.learn_and_propose(emissions)
        execution.seconds["draft"] = time.perf_counter() - drafting_from
        outputs = [self._committer.output(request, emission) for request, emission in emissions if emission.reports]
        for request, _ in emissions:
            if request.finish_reason is not None:
                self._forget(request)
        stats = self._stats(plan, execution, emissions, time.perf_counter() - began)
        return StepOutput((*aborted, *outputs), stats)

    def _stats(
        self, plan: Plan, execution: Execution, emissions: Sequence[tuple[Request, Emission]], seconds: float
    ) -> StepStats:
        scheduler, spans = self.scheduler, execution.batch.spans if execution.batch is not None else ()
        wasted: Counter[str] = Counter()
        for _, emission in emissions:
            wasted.update(emission.wasted)
        return StepStats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            kv_usage=scheduler.pool.usage,
            rows=execution.batch.num_rows if execution.batch is not None else 0,
            preemptions=plan.preemptions,
            prefix_queries=plan.prefix_queries,
            prefix_hits=plan.prefix_hits,
            step_seconds=seconds if spans else 0.0,
            phase_seconds=execution.seconds,
            wasted=wasted,
            modes=plan.modes,
            speedup_estimate=self._speedup(plan, execution, emissions),
        )

    def _speedup(self, plan: Plan, execution: Execution, emissions: Sequence[tuple[Request, Emission]]) -> float | None:
        costs, batch = self.scheduler.controller.costs, execution.batch
        if costs is None or batch is None or not plan.num_decoding:
            return None
        decoding = [emission for _, emission in emissions if emission.was_decoding]
        nodes = sum(len(span.item.tree) for span in batch.spans)
        measured = execution.seconds["verify"]
        if not decoding or measured <= 0:
            return None
        tokens = sum(len(emission.tokens) for emission in decoding)
        return tokens / len(decoding) * costs(batch.num_rows - nodes) / measured
