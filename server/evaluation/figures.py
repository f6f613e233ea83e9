"""The figures of an evaluation of heads, from the answers that the engine wrote with them."""

from __future__ import annotations

import os
import platform
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from server.bench.acceptance import in_loop
from server.version import VERSION

if TYPE_CHECKING:
    from engine.heads_report import Cell, HeadsReport, Written

Row = dict[str, Any]


def figures(report: HeadsReport) -> Row:
    """The report but for what the command line knows. Times are in milliseconds."""
    plain = report.step_seconds[min(report.step_seconds)]
    rows = [row(cell, plain) for cell in report.cells]
    return {
        "headlong": VERSION,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "model": dict(report.model),
        "heads": dict(report.heads),
        "step_ms": {str(rows): 1e3 * seconds for rows, seconds in report.step_seconds.items()},
        "rows": rows,
        "best": best(rows),
        "loops": loops(report.cells),
        "calibration": calibration(report.cells),
    }


def row(cell: Cell, plain: float) -> Row:
    """plain: T(1) in seconds."""
    tokens, forwards = _counts(cell.answers)
    straight_tokens, straight_forwards = _counts([answer for answer in cell.answers if not _loops(answer)])
    tau = tokens / forwards if forwards else None
    times = cell.times
    draft = times.draft if times else 0.0
    return {
        "dataset": cell.dataset,
        "temperature": cell.temperature,
        "coupled": cell.is_coupled,
        "shape": cell.shape.name,
        "nodes": cell.shape.nodes,
        "tokens": tokens,
        "forwards": forwards,
        "tau": tau,
        "tau_without_looping_answers": straight_tokens / straight_forwards if straight_forwards else None,
        "accepted_by_position": by_position(cell.answers),
        "mean_nodes": sum(sum(answer.nodes) for answer in cell.answers) / forwards if forwards else None,
        "verify_ms": 1e3 * cell.verify_seconds,
        "draft_ms": 1e3 * draft,
        "draft_share": draft / times.step if times else 0.0,
        "speedup": None if tau is None else tau * plain / (cell.verify_seconds + draft),
    }


def _counts(answers: Iterable[Written]) -> tuple[int, int]:
    tokens = forwards = 0
    for answer in answers:
        tokens += len(answer.tokens)
        forwards += len(answer.nodes)
    return tokens, forwards


def _loops(answer: Written) -> bool:
    return any(in_loop(answer.tokens))


def by_position(answers: Sequence[Written]) -> list[float]:
    """The share of all forwards that kept a drafted token at depth 1, 2, ..."""
    kept = Counter(depth for answer in answers for depth in answer.depths if depth)
    _, forwards = _counts(answers)
    return [kept[depth] / forwards for depth in range(1, max(kept, default=0) + 1)]


def best(rows: Sequence[Row]) -> list[Row]:
    """Of each dataset, temperature and coupling the shape with the highest expected speed."""
    chosen: dict[tuple[str, float, bool | None], Row] = {}
    for one in rows:
        key = one["dataset"], one["temperature"], one["coupled"]
        if one["speedup"] is not None and (key not in chosen or one["speedup"] > chosen[key]["speedup"]):
            chosen[key] = one
    names = ("dataset", "temperature", "coupled", "shape", "tau", "draft_ms", "speedup")
    return [{name: one[name] for name in names} for one in chosen.values()]


def loops(cells: Sequence[Cell]) -> list[Row]:
    """By dataset and temperature; all cells of one hold the same text, so the first one tells."""
    firsts: dict[tuple[str, float], Cell] = {}
    for cell in cells:
        firsts.setdefault((cell.dataset, cell.temperature), cell)
    found = []
    for (dataset, temperature), cell in firsts.items():
        inside = [in_loop(answer.tokens) for answer in cell.answers]
        tokens = sum(map(len, inside))
        found.append(
            {
                "dataset": dataset,
                "temperature": temperature,
                "answers": len(inside),
                "looping_answers": sum(map(any, inside)),
                "share_in_loops": sum(map(sum, inside)) / tokens if tokens else 0.0,
            }
        )
    return found


def calibration(cells: Sequence[Cell]) -> list[Row]:
    """By temperature and coupling, over all datasets, of the largest trees, which try the most; empty buckets are left
    out. expected: what the drafter thought in the mean; measured: how often it was right."""
    widest = max((cell.shape.nodes for cell in cells), default=0)
    sums: dict[tuple[float, bool | None], dict[float, list[float]]] = {}
    for cell in cells:
        if cell.shape.nodes == widest:
            table = sums.setdefault((cell.temperature, cell.is_coupled), {})
            for bucket in cell.buckets:
                total = table.setdefault(bucket.upto, [0, 0.0, 0])
                for place, value in enumerate((bucket.nodes, bucket.expected, bucket.right)):
                    total[place] += value
    return [
        {
            "temperature": temperature,
            "coupled": is_coupled,
            "buckets": [
                {"upto": upto, "nodes": int(nodes), "expected": expected / nodes, "measured": right / nodes}
                for upto, (nodes, expected, right) in sorted(table.items())
                if nodes
            ],
        }
        for (temperature, is_coupled), table in sums.items()
    ]
