"""After the forward: verify, cut, move the accepted KV into place, commit, and word the outputs."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from engine.batch import Batch, RowSpan
from engine.model_runner import ForwardResult, ModelRunner
from engine.outputs import FinishReason, RequestOutput, TokenLogprob, TokenOutput
from engine.request import Request
from engine.sampler.logprobs import token_logprobs
from engine.sampling_params import EngineRequest
from engine.scheduler import Scheduler
from engine.spec_decode.drafter import CommittedRows, HiddenStates
from engine.spec_decode.tree import DraftTree
from engine.spec_decode.verifier import Verifier, VerifyItem, VerifyResult

log = logging.getLogger("headlong.engine")


@dataclass(slots=True)
class Emission:
    """What one step made of one request, before it is worded as a RequestOutput. committed: the rows whose KV is now in
    place."""

    tokens: tuple[TokenOutput, ...] = ()
    drafted: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    wasted: Counter[str] = field(default_factory=Counter)
    stop_token_id: int | None = None
    error: str | None = None
    was_decoding: bool = False
    ended: bool = False
    committed: CommittedRows | None = None

    @property
    def reports(self) -> bool:
        """There is something to tell: tokens, an end or a fault. A prompt chunk in the middle is silent."""
        return bool(self.tokens) or self.ended or self.error is not None


class Committer:
    """Turns logits into committed tokens; the one place where a request's list grows."""

    def __init__(
        self, scheduler: Scheduler, runner: ModelRunner, verifier: Verifier, eos_token_ids: tuple[int, ...]
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._verifier = verifier
        self._eos = eos_token_ids

    def new_request(self, source: EngineRequest) -> Request:
        return Request.from_source(source, self._eos)

    def commit(self, batch: Batch, result: ForwardResult, seconds: dict[str, float]) -> list[tuple[Request, Emission]]:
        """One emission a request of the batch. ``seconds`` receives the time of "sample" and "commit"."""
        began = time.perf_counter()
        for span in batch.spans:
            span.item.request.scheduled = span.item.request.scheduled or time.monotonic()
        emits = [span.item.completes and self._tokens_left(span) > 0 for span in batch.spans]
        items = [self._verify_item(span) for span, wanted in zip(batch.spans, emits, strict=True) if wanted]
        results = iter(self._verifier.verify(items, result.logits))
        steps = [(span, next(results) if wanted else None) for span, wanted in zip(batch.spans, emits, strict=True)]
        sampled = time.perf_counter()
        moves = _Moves([], [])
        emissions = [
            (span.item.request, self._guarded_advance(span, verified, result, moves)) for span, verified in steps
        ]
        if moves.source:
            self._runner.move_kv(moves.source, moves.target)
        for (span, verified), (_, emission) in zip(steps, emissions, strict=True):
            emission.committed = self._count_computed(span, verified)
        seconds["sample"], seconds["commit"] = sampled - began, time.perf_counter() - sampled
        return emissions

    def _tokens_left(self, span: RowSpan) -> int:
        return span.item.request.tokens_left(self._scheduler.limits.max_model_len)

    def _verify_item(self, span: RowSpan) -> VerifyItem:
        request = span.item.request
        return VerifyItem(
            token_ids=request.token_ids,
            prompt_length=request.prompt_length,
            sampling=request.sampling,
            eos_token_ids=self._eos,
            tree=span.item.tree,
            first_row=span.root_logits,
        )

    def _guarded_advance(
        self, span: RowSpan, verified: VerifyResult | None, result: ForwardResult, moves: _Moves
    ) -> Emission:
        """A fault in one request's own bookkeeping ends that request alone."""
        try:
            return self._advance(span, verified, result, moves)
        except Exception as error:
            log.exception("request %s failed", span.item.request.request_id)
            span.item.request.finish_reason = "error"
            return Emission(error=f"{type(error).__name__}: {error}")

    def _advance(self, span: RowSpan, verified: VerifyResult | None, result: ForwardResult, moves: _Moves) -> Emission:
        """Appends the emitted tokens up to the first end, and notes which KV entries must move."""
        request = span.item.request
        self._note_prompt_logprobs(span, result.logits)
        if verified is None:
            return self._end_of_prompt(span)
        if verified.error is not None:
            request.finish_reason = "error"
            return Emission(error=verified.error)
        decoding = request.is_decoding
        kept, finish, stop = self._cut(request, verified.tokens)
        root = request.num_tokens - 1
        tree = span.item.tree
        tokens = self._token_outputs(span, verified, kept, result.logits)
        self._note_moves(request, verified.nodes[: min(kept, len(verified.nodes))], root, moves)
        request.token_ids += verified.tokens[:kept]
        request.first_token = request.first_token or time.monotonic()
        request.finish_reason = finish
        self._keep_states(span, verified.rows[kept - 1], result.hidden)
        return Emission(
            tokens=tokens,
            drafted=tree.count_by_depth(),
            wasted=_wasted(tree, verified.nodes[:kept]),
            stop_token_id=stop,
            was_decoding=decoding,
            ended=finish is not None,
        )

    def _end_of_prompt(self, span: RowSpan) -> Emission:
        """A chunk without tokens to emit; with ``max_tokens`` 0 the last one ends the request."""
        request = span.item.request
        if not span.item.completes:
            return Emission()
        request.finish_reason = "length"
        return Emission(ended=True)

    def _cut(self, request: Request, tokens: Sequence[int]) -> tuple[int, FinishReason | None, int | None]:
        """(tokens to keep, finish reason, stop id): in order EOS or stop id, max_tokens, context."""
        left = request.tokens_left(self._scheduler.limits.max_model_len)
        for count, token in enumerate(tokens[:left], start=1):
            if token in request.stop_ids and request.num_output_tokens + count > request.sampling.min_tokens:
                return count, "stop", token
        if len(tokens) >= left:
            return left, "length", None
        return len(tokens), None, None

    def _token_outputs(
        self, span: RowSpan, verified: VerifyResult, kept: int, logits: torch.Tensor
    ) -> tuple[TokenOutput, ...]:
        request, tree = span.item.request, span.item.tree
        logprobs: Sequence[TokenLogprob | None] = [None] * kept
        if request.sampling.logprobs is not None:
            rows = logits[list(verified.rows[:kept])]
            logprobs = token_logprobs(rows, verified.tokens[:kept], request.sampling.logprobs)
        outputs = []
        for index in range(kept):
            accepted = index < len(verified.nodes)
            node = verified.nodes[index] if accepted else -1
            outputs.append(
                TokenOutput(
                    token_id=verified.tokens[index],
                    logprob=logprobs[index],
                    margin=None if verified.margins is None else verified.margins[index],
                    depth=tree.depths[node] if accepted else 0,
                    method=tree.methods[node] if accepted else None,
                )
            )
        return tuple(outputs)

    def _note_moves(self, request: Request, nodes: Sequence[int], root: int, moves: _Moves) -> None:
        for depth, node in enumerate(nodes, start=1):
            if node + 1 != depth:
                moves.source.append(self._slot(request, root + 1 + node))
                moves.target.append(self._slot(request, root + depth))

    def _slot(self, request: Request, position: int) -> int:
        size = self._scheduler.pool.block_size
        return request.block_ids[position // size] * size + position % size

    def _keep_states(self, span: RowSpan, logits_row: int, hidden: HiddenStates | None) -> None:
        if hidden is None:
            return
        # From the root on, rows lie in the same order in the batch and among the logits.
        request, row = span.item.request, span.root_row + logits_row - span.root_logits
        # Cloned: a view would keep the states of every row of the step alive.
        request.accepted = HiddenStates(
            hidden.final[row].clone(), {layer: states[row].clone() for layer, states in hidden.layers.items()}
        )
        rows = slice(span.extra_row, span.extra_row + span.num_extra)
        request.extra = None
        if span.num_extra:
            request.extra = HiddenStates(
                hidden.final[rows].clone(), {layer: states[rows].clone() for layer, states in hidden.layers.items()}
            )

    def _count_computed(self, span: RowSpan, verified: VerifyResult | None) -> CommittedRows:
        """Counts the KV that is now in place: the planned tokens and the accepted nodes that were kept."""
        request = span.item.request
        end = span.item.start + span.item.count
        accepted = () if verified is None else verified.nodes
        computed = min(end + len(accepted), request.num_tokens)
        self._scheduler.commit(request, computed)
        rows = [*range(span.first_row, span.root_row + 1)]
        rows += [span.root_row + 1 + node for node in accepted[: computed - end]]
        return CommittedRows(span.item.start, rows, request.token_ids, request.block_ids)

    @staticmethod
    def _note_prompt_logprobs(span: RowSpan, logits: torch.Tensor) -> None:
        """Row of token i holds the log-probability of token i + 1; a recomputed row is already known."""
        request = span.item.request
        wanted = request.sampling.prompt_logprobs
        if wanted is None or span.first_logits < 0:
            return
        known = request.prompt_logprobs
        if not known:
            known.append(None)
        end = min(span.item.start + span.item.count, request.prompt_length - 1)
        first = len(known) - 1
        if first < span.item.start or first >= end:
            return
        row = span.first_logits + first - span.item.start
        targets = request.token_ids[first + 1 : end + 1]
        known.extend(token_logprobs(logits[row : row + len(targets)], targets, wanted))

    def output(self, request: Request, emission: Emission) -> RequestOutput:
        first = len(emission.tokens) == request.num_output_tokens
        return RequestOutput(
            request_id=request.request_id,
            tokens=emission.tokens,
            drafted=emission.drafted,
            is_decode_step=bool(emission.tokens),
            finish_reason=request.finish_reason,
            stop_token_id=emission.stop_token_id,
            error=emission.error,
            num_cached_tokens=request.num_cached_tokens,
            prompt_logprobs=tuple(request.prompt_logprobs) if first and request.wants_prompt_logprobs else None,
            max_draft_depth=self._scheduler.limits.max_draft_tokens,
            times=request.times,
        )


@dataclass(slots=True)
class _Moves:
    source: list[int]
    target: list[int]


def _wasted(tree: DraftTree, accepted: Sequence[int]) -> Counter[str]:
    wasted = Counter(tree.methods)
    wasted.subtract(tree.methods[node] for node in accepted)
    return wasted
