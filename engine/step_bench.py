"""Steps outside any schedule: for the load-time check of attention and for measuring T(rows)."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from pathlib import Path

import torch

from engine.batch import build_batch
from engine.loading.cache import cache_root
from engine.model_runner import ModelRunner
from engine.request import Request
from engine.sampling_params import EngineRequest, SamplingParams
from engine.scheduler import ScheduledRequest
from engine.spec_decode.controller import StepCosts
from engine.spec_decode.tree import ROOT, DraftTree

log = logging.getLogger("headlong.engine")

_WARM_CONTEXT = 256
_REPEATS = 3  # where nothing is remembered; else one, since every start adds its own


class StepBench:
    """Only for use while the pool is idle: it writes to blocks that nobody allocated."""

    def __init__(self, runner: ModelRunner, block_size: int, num_blocks: int) -> None:
        self._runner = runner
        self._block_size = block_size
        self._num_blocks = num_blocks

    def _request(self, token_ids: list[int]) -> Request:
        # Asking for the prompt's log-probabilities keeps the logits of every row.
        source = EngineRequest("bench", tuple(token_ids), SamplingParams(max_tokens=1, prompt_logprobs=0))
        request = Request.from_source(source, ())
        request.block_ids = list(range(self._num_blocks))
        return request

    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """[tokens, vocab]: the first half as one chunk, then a chunk, then the last two as root and drafted node."""
        half, last = len(token_ids) // 2, len(token_ids) - 1
        request = self._request(token_ids)
        parts = []
        for start, end in ((0, half), (half, last - 1)):
            parts.append(self._forward(ScheduledRequest(request, start, end - start, DraftTree())))
        request.token_ids = token_ids[:last]
        tree = DraftTree()
        tree.add((token_ids[last] + 1) % 2, ROOT, 0.5, "check")
        tree.add(token_ids[last], ROOT, 0.5, "check")
        rows = self._forward(ScheduledRequest(request, last - 1, 1, tree))
        return torch.cat([*parts, rows[:1], rows[-1:]])

    def _forward(self, item: ScheduledRequest) -> torch.Tensor:
        # A runner may compute the next logits into the same memory.
        return self._runner.forward(build_batch([item], [None])).logits.clone()

    def time_step(self, rows: int) -> float:
        """Seconds of one verification forward of ``rows`` rows on a warm context."""
        length = min(_WARM_CONTEXT, (self._num_blocks - 1) * self._block_size - rows)
        request = self._request([1] * max(1, length))
        tree = DraftTree()
        for node in range(rows - 1):
            tree.add(1, node - 1, 1.0, "bench")
        item = ScheduledRequest(request, request.num_tokens - 1, 1, tree)
        began = time.perf_counter()
        batch = build_batch([item], [None])
        logits = self._runner.forward(batch).logits
        float(logits.flatten()[0])  # waits for an asynchronous device
        return time.perf_counter() - began


def measured_costs(bench: StepBench, max_rows: int, setting: str) -> StepCosts:
    """T(rows) up to ``max_rows``, remembered between starts: each adds a round, and the best of all rounds counts.

    setting: names everything a step's time depends on; another setting has figures of its own.
    """
    path = cache_root() / "steps" / f"{hashlib.sha256(f'{setting} {max_rows}'.encode()).hexdigest()[:24]}.json"
    known = _remembered(path)
    costs = StepCosts.measured(bench.time_step, max_rows, 1 if known else _REPEATS, known)
    _remember(path, costs)
    return costs


def _remembered(path: Path) -> dict[int, float]:
    try:
        seconds = {int(rows): float(value) for rows, value in json.loads(path.read_text(encoding="utf-8")).items()}
    except (OSError, ValueError, TypeError, AttributeError):  # none yet, or not ours
        return {}
    return seconds if all(value > 0 for value in seconds.values()) else {}


def _remember(path: Path, costs: StepCosts) -> None:
    partial = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(costs.as_dict()) + "\n", encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        log.info("step times are not remembered: %s", error)
