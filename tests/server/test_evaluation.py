"""The figures and the report of ``headlong heads evaluate``, from answers whose tokens and forwards are known."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from server.evaluation.figures import best, calibration, figures, loops, row
from server.evaluation.markdown import markdown
from server.evaluation.plot import write_plot


@dataclass(frozen=True)
class Shape:
    name: str
    nodes: int


@dataclass(frozen=True)
class Written:
    tokens: list[int]
    depths: list[int]
    nodes: list[int]


@dataclass(frozen=True)
class Times:
    draft: float
    step: float


@dataclass(frozen=True)
class Bucket:
    upto: float
    nodes: int
    expected: float
    right: int


@dataclass(frozen=True)
class Cell:
    answers: list[Written]
    dataset: str = "a|b"
    temperature: float = 0.0
    is_coupled: bool | None = None
    shape: Shape = Shape("tree-8", 8)
    buckets: tuple[Bucket, ...] = (Bucket(0.5, 4, 1.0, 2), Bucket(1.0, 0, 0.0, 0))
    verify_seconds: float = 0.06
    times: Times | None = Times(0.02, 0.1)


@dataclass(frozen=True)
class Report:
    cells: list[Any]
    heads: dict[str, Any]
    model: dict[str, Any]
    step_seconds: dict[int, float]


STRAIGHT = Written([1, 2, 3, 4, 5, 6], [0, 1, 2, 0, 1, 0], [0, 8, 4])
LOOPING = Written([7] * 10, [0, 1, 2, 3, 4] * 2, [8, 8])
HEADS = {
    "method": "medusa",
    "num_heads": 2,
    "base_model": "tiny",
    "held_out_length": 1.5,
    "held_out_accuracy": [{"top_1": 0.25, "top_3": 0.5}],
    "calibration": {"edges": [0.5, 1.0], "rates": [[0.2, 0.8], [0.1, 0.7]]},
}
MODEL = {"name": "tiny", "digest": "0", "runner": "compiled", "quantization": "int8"}


def whole(cells: list[Any], **heads: Any) -> dict[str, Any]:
    """A report as the command makes it."""
    conditions = {
        "command": ["headlong", "heads", "evaluate", "some folder"],
        "started": "now",
        "load_average": [0.0, 1.0],
        "max_tokens": 64,
        "seed": 0,
        "datasets": {"a|b": {"prompts": 2, "sha256": "f00"}},
    }
    found: Any = Report(cells, HEADS | heads, MODEL, {1: 0.05, 8: 0.06})
    return conditions | figures(found)


def test_the_figures_of_a_cell() -> None:
    cell: Any = Cell([STRAIGHT, LOOPING])
    found = row(cell, 0.05)
    assert (found["tokens"], found["forwards"]) == (16, 5)
    assert found["tau"] == pytest.approx(16 / 5)
    assert found["tau_without_looping_answers"] == pytest.approx(6 / 3)
    assert found["mean_nodes"] == pytest.approx(28 / 5)
    assert found["accepted_by_position"] == pytest.approx([4 / 5, 3 / 5, 2 / 5, 2 / 5])
    assert (found["draft_ms"], found["draft_share"]) == (pytest.approx(20), pytest.approx(0.2))
    assert found["speedup"] == pytest.approx(3.2 * 0.05 / (0.06 + 0.02))


def test_a_cell_in_which_nothing_was_drafted_or_all_loops() -> None:
    cell: Any = Cell([LOOPING], times=None)
    found = row(cell, 0.05)
    assert found["tau_without_looping_answers"] is None
    assert (found["draft_ms"], found["draft_share"]) == (0.0, 0.0)
    empty: Any = Cell([])
    found = row(empty, 0.05)
    assert (found["tau"], found["speedup"]) == (None, None)


def test_the_best_shape_of_each_way() -> None:
    slow: Any = Cell([STRAIGHT], verify_seconds=0.2)
    fast: Any = Cell([STRAIGHT], shape=Shape("tree-16", 16))
    other: Any = Cell([STRAIGHT], temperature=1.0, is_coupled=False)
    found = best([row(cell, 0.05) for cell in (slow, fast, other)])
    assert [(one["temperature"], one["shape"]) for one in found] == [(0.0, "tree-16"), (1.0, "tree-8")]


def test_loops_are_told_once_a_text() -> None:
    cells: Any = [Cell([STRAIGHT, LOOPING]), Cell([STRAIGHT, LOOPING], shape=Shape("tree-16", 16))]
    (found,) = loops(cells)
    assert (found["answers"], found["looping_answers"]) == (2, 1)
    assert found["share_in_loops"] == pytest.approx(8 / 16)


def test_calibration_is_of_the_largest_trees_over_all_datasets() -> None:
    buckets = (Bucket(0.5, 6, 1.5, 3), Bucket(1.0, 0, 0.0, 0))
    cells: Any = [
        Cell([STRAIGHT]),
        Cell([STRAIGHT], dataset="c", buckets=buckets),
        Cell([STRAIGHT], shape=Shape("s", 4)),
    ]
    (found,) = calibration(cells)
    assert found["buckets"] == [{"upto": 0.5, "nodes": 10, "expected": 0.25, "measured": 0.5}]


def test_the_report_can_be_read() -> None:
    report = whole([Cell([STRAIGHT, LOOPING]), Cell([STRAIGHT], temperature=0.8, is_coupled=True)])
    text = markdown(report, ["plot.svg"])
    assert "| 0 | - | tree-8 | 3.20 | 2.00 | 5.6 | 60.0 | 20.00 (20%) | 2.00 |" in text
    assert "| a\\|b | 0.8 | yes | tree-8 | 2.00 | 20.00 | 1.25 |" in text
    assert "| a\\|b | 0 | - | 0.800 | 0.600 | 0.400 | 0.400 |" in text
    assert "| a\\|b | 0.8 | yes | 0.667 | 0.333 | 0.000 | 0.000 |" in text
    assert "| a\\|b | 0 | 50.0% | 1/2 |" in text
    assert "| 0 | - | 0.5 | 0.250 | 0.500 | 4 |" in text
    assert "| 1 | 0.800 | 0.700 |" in text
    assert "| 1 | 0.250 | 0.500 |" in text
    assert "| 8 | 60.0 | 1.20 |" in text
    assert "![plot.svg](plot.svg)" in text
    assert "`headlong heads evaluate 'some folder'`" in text
    json.dumps(report)


def test_what_heads_do_not_say_is_left_out() -> None:
    report = whole([Cell([STRAIGHT], buckets=())], held_out_accuracy=[], calibration=None, held_out_length=None)
    text = markdown(report, [])
    assert "Held-out accuracy" not in text
    assert "after training, on held-out" not in text
    assert "acceptance length after training: -" in text
    assert "Nothing was drafted." in text


def test_equal_figures_give_equal_plots(tmp_path: Path) -> None:
    report = whole([Cell([STRAIGHT, LOOPING]), Cell([STRAIGHT], temperature=0.8, is_coupled=False)])
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        assert write_plot(tmp_path / name, report) == "plot.svg"
    drawn = (tmp_path / "one" / "plot.svg").read_bytes()
    assert drawn == (tmp_path / "two" / "plot.svg").read_bytes()
    assert b"T=0.8 uncoupled" in drawn or len(drawn) > 10_000  # letters may be drawn as paths
