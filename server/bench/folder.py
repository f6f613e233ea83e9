"""Where a report goes: one JSON file, or a folder with JSON, Markdown and plots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from server.bench.markdown import markdown
from server.bench.plots import check_plots, write_plots
from server.bench.report import ReportError, check_report_path, check_writable, write_report


def check_out(out: Path | None) -> None:
    """Asked before measuring, so that no result is lost. Raises ReportError."""
    if out is None or _is_file(out):
        check_report_path(out)
        return
    if out.exists() and not out.is_dir():
        raise ReportError(f"cannot write {out}: it is neither a folder nor a name that ends in .json")
    if not out.absolute().parent.is_dir():
        raise ReportError(f"cannot write {out}: its folder does not exist")
    check_writable(out if out.is_dir() else out.absolute().parent)
    check_plots()


def _bench_plots(folder: Path, report: dict[str, Any]) -> list[str]:
    return write_plots(folder, report["rows"])


def write_out(
    out: Path,
    report: dict[str, Any],
    draw: Callable[[Path, dict[str, Any]], Sequence[str]] = _bench_plots,
    words: Callable[[dict[str, Any], Sequence[str]], str] = markdown,
) -> None:
    """``out`` itself where it ends in .json; else report.json, report.md and the plots in it. Raises ReportError.

    draw: draws plots into a folder and gives their names. words: the Markdown, given those. Both are bench's own unless
    another kind of report brings its own.
    """
    if _is_file(out):
        write_report(out, report)
        return
    try:
        out.mkdir(exist_ok=True)
        write_report(out / "report.json", report)
        plots = draw(out, report)
        (out / "report.md").write_text(words(report, plots), encoding="utf-8")
    except OSError as error:
        raise ReportError(f"cannot write {out}: {error.strerror}") from error


def _is_file(out: Path) -> bool:
    return out.suffix == ".json"
