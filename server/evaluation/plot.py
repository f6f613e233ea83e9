"""The plot of an evaluation of heads: acceptance length, expected speed-up and calibration."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from server.bench.report import ReportError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Row = dict[str, Any]
PLOT = "plot.svg"


def write_plot(folder: Path, report: Row) -> str:
    """Draws into ``folder``; gives the file's name. Raises ReportError."""
    import matplotlib
    from matplotlib.figure import Figure

    # Equal figures give equal files, so that a repository shows only what changed.
    with matplotlib.rc_context({"svg.hashsalt": "headlong", "font.size": 9}):
        figure = Figure(figsize=(13, 4.2), layout="constrained")
        lengths, speeds, chances = figure.subplots(1, 3)
        _by_shape(lengths, report["rows"], "tau", "tau: tokens a forward")
        _by_shape(speeds, report["rows"], "speedup", "expected speed-up")
        speeds.axhline(1.0, color="grey", linewidth=0.8)
        _calibration(chances, report["calibration"])
        handles, labels = lengths.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=5)
        try:
            figure.savefig(folder / PLOT, metadata={"Date": None})
        except OSError as error:
            raise ReportError(f"cannot write {folder / PLOT}: {error.strerror}") from error
    return PLOT


def _way(row: Row) -> str:
    return f"T={row['temperature']:g}" + ("" if row["coupled"] is not False else " uncoupled")


def _by_shape(axes: Axes, rows: Sequence[Row], key: str, title: str) -> None:
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    lines: dict[str, list[Row]] = {}
    for row in rows:
        lines.setdefault(f"{row['dataset']}, {_way(row)}", []).append(row)
    for label, own in lines.items():
        known = [row for row in own if row[key] is not None]
        places = [shapes.index(row["shape"]) for row in known]
        axes.plot(places, [row[key] for row in known], marker="o", label=label)
    axes.set_xticks(range(len(shapes)), shapes)
    axes.set_title(title)


def _calibration(axes: Axes, rows: Sequence[Row]) -> None:
    axes.plot([0, 1], [0, 1], color="grey", linewidth=0.8)
    for row in rows:
        expected, measured = ([bucket[name] for bucket in row["buckets"]] for name in ("expected", "measured"))
        axes.plot(expected, measured, marker="o", label=_way(row))
    axes.set_title("calibration: measured over expected")
    axes.legend(loc="upper left")
