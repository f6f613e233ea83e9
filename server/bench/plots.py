"""A bench report's plots, one SVG a dataset and kind of load. matplotlib is optional and imported when it draws."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from server.bench.report import ReportError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Row = dict[str, Any]

# Figure's name, and where a row has it: (median, least, most).
_PANELS = (
    ("total tokens/s", "total_tokens_per_second", ("median", "min", "max")),
    ("TTFT, ms (p50 to p99)", "ttft_ms", ("p50", "p50", "p99")),
    ("TPOT, ms (p50 to p99)", "tpot_ms", ("p50", "p50", "p99")),
)


def check_plots() -> None:
    """Asked before measuring. Raises ReportError where matplotlib is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ReportError(
            "the plots need matplotlib, which is not installed; run "
            f"`{sys.executable} -m pip install matplotlib`, "
            "or give --out a name that ends in .json for the report without plots"
        )


def write_plots(folder: Path, rows: Sequence[Row]) -> list[str]:
    """Draws into ``folder``; gives the names of the files. Raises ReportError."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        name = re.sub(r"[^\w.-]+", "-", Path(row["dataset"]).stem).strip("-") or "prompts"
        groups.setdefault(name if row["rate"] is None else f"{name}-open", []).append(row)
    for name, group in groups.items():
        try:
            _draw(folder / f"{name}.svg", group)
        except OSError as error:
            raise ReportError(f"cannot write {folder / name}.svg: {error.strerror}") from error
    return [f"{name}.svg" for name in groups]


def _draw(path: Path, rows: Sequence[Row]) -> None:
    import matplotlib
    from matplotlib.figure import Figure

    # Equal figures give equal files, so that a repository shows only what changed.
    with matplotlib.rc_context({"svg.hashsalt": "headlong", "font.size": 9}):
        figure = Figure(figsize=(4 * len(_PANELS), 3.4), layout="constrained")
        for axes, panel in zip(figure.subplots(1, len(_PANELS)), _PANELS, strict=True):
            _panel(axes, rows, *panel)
        figure.suptitle(rows[0]["dataset"])
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 6))
        figure.savefig(path, metadata={"Date": None})


def _panel(axes: Axes, rows: Sequence[Row], title: str, key: str, names: tuple[str, str, str]) -> None:
    """Bars where there is one load, else a line a side over the loads; the whiskers go from least to most."""
    loads = list(dict.fromkeys(row["load"] for row in rows))
    sides = list(dict.fromkeys(row["side"] for row in rows))
    for index, side in enumerate(sides):
        own = [row for row in rows if row["side"] == side and row[key] and row[key][names[0]] is not None]
        middle, least, most = ([row[key][name] for row in own] for name in names)
        below = [m - low for m, low in zip(middle, least, strict=True)]
        above = [high - m for m, high in zip(middle, most, strict=True)]
        if len(loads) == 1:
            axes.bar([index] * len(own), middle, yerr=[below, above] if own else None, capsize=3, label=side)
        else:
            places = [loads.index(row["load"]) for row in own]
            axes.errorbar(places, middle, yerr=[below, above], capsize=3, marker="o", label=side)
    if len(loads) == 1:
        axes.set_xticks([])
        axes.set_xlabel(loads[0])
    else:
        axes.set_xticks(range(len(loads)), loads)
    axes.set_ylim(bottom=0)
    axes.set_title(title)
