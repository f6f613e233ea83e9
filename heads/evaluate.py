"""How good heads are on answers they were not trained on: accuracy by depth, and what their confidence is worth."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from heads.batch import make_batch
from heads.config import CONFIDENCE_EDGES, Calibration
from heads.data import Answer
from heads.lm_head import DraftLmHead
from heads.loss import DraftHeads

TOP = (1, 3, 5, 10)
_CANDIDATES = 16
_ROWS = 1024
_PRIOR = 20.0  # observations that the heads' own confidence is worth in a bucket


@dataclass(frozen=True, slots=True)
class Evaluation:
    """accuracy[k][n]: how often the token was among the n likeliest of head k + 1, over ``positions`` answer tokens."""

    positions: int
    accuracy: tuple[dict[int, float], ...]
    calibration: Calibration


@torch.no_grad()
def evaluate(heads: DraftHeads, lm_head: DraftLmHead, answers: Sequence[Answer]) -> Evaluation:
    """A token outside the draft vocabulary counts as missed. Head k's calibration counts the positions at which all
    heads before it had the right token among their candidates, since only there its own candidates are verified."""
    device = lm_head.linear.weight.device
    edges = torch.tensor(CONFIDENCE_EDGES, device=device)
    buckets = len(edges)
    tried = torch.zeros(heads.num_heads, buckets, device=device)
    right, confidence = torch.zeros_like(tried), torch.zeros_like(tried)
    hits = torch.zeros(heads.num_heads, len(TOP), device=device)
    seen = torch.zeros(heads.num_heads, device=device)
    for part in _parts(answers):
        batch = make_batch(part, lm_head)
        reached = torch.ones(len(batch.states), dtype=torch.bool, device=device)
        for depth, output in enumerate(heads.outputs(batch), start=1):
            rows = batch.rows(depth)
            truth = batch.targets[rows + depth]
            probability = torch.softmax(heads.logits(lm_head, output, depth), dim=-1)
            top = probability.topk(min(_CANDIDATES, probability.shape[1]), dim=-1)
            matches = (top.indices == truth[:, None]) & (truth >= 0)[:, None]
            for column, count in enumerate(TOP):
                hits[depth - 1, column] += matches[:, :count].any(dim=1).sum()
            seen[depth - 1] += len(rows)
            counted = reached[rows]
            bucket = torch.bucketize(top.values[counted], edges).clamp_max(buckets - 1).flatten()
            tried[depth - 1] += torch.bincount(bucket, minlength=buckets)
            right[depth - 1] += torch.bincount(bucket, matches[counted].flatten().float(), minlength=buckets)
            confidence[depth - 1] += torch.bincount(bucket, top.values[counted].flatten(), minlength=buckets)
            reached[rows] &= matches.any(dim=1)
    middle = (edges + torch.cat([edges.new_zeros(1), edges[:-1]])) / 2
    assumed = torch.where(tried > 0, confidence / tried.clamp_min(1), middle)
    rates = (right + _PRIOR * assumed) / (tried + _PRIOR)
    share = hits / seen.clamp_min(1)[:, None]
    return Evaluation(
        positions=int(seen[0]),
        accuracy=tuple(dict(zip(TOP, row, strict=True)) for row in share.tolist()),
        calibration=Calibration(
            CONFIDENCE_EDGES, tuple(tuple(round(rate, 4) for rate in row) for row in rates.tolist())
        ),
    )


def _parts(answers: Sequence[Answer]) -> Iterator[list[Answer]]:
    part: list[Answer] = []
    size = 0
    for answer in answers:
        part.append(answer)
        size += len(answer.tokens)
        if size >= _ROWS:
            yield part
            part, size = [], 0
    if part:
        yield part
