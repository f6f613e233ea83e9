"""A bench report to read: its figures as Markdown tables, with what is needed to run it again."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

from server.bench.acceptance import LOOP_REPEATS, LOOP_TOKENS
from server.bench.side import OFF, ON

Row = dict[str, Any]

_NOTE = "--note"

_METHOD = """\
Sides: `on` and `off` are the same headlong server with speculation and without it, each other one is a server of its
own. With one client the sides answer each prompt in turn; with more, or with arrivals by a clock, a whole round at a
time; which side goes first rotates. A round asks every prompt once, and again from the first until each client has one.
Tokens are those of the server's usage unless a row says otherwise. Total tokens a
second: all answer tokens of a round over its wall time; decode tokens a second: (answer tokens - 1) over the time after
the first text, median over prompts; both with median and range over rounds. TTFT: until the first chunk with text.
TPOT: time a token after that. Gap: between chunks with text. Latencies are over all rounds' requests. Goodput: requests
inside both bounds; a failed one is not. Ratios are of speeds, `on` over the other side, so above 1 `on` is the faster
one. No side finds a prompt of an earlier round in its cache: for `on` and `off` every round has a prefix cache of its
own, and where peers take part, each round's prompts begin with a line of their own, the same for all sides."""


def markdown(report: dict[str, Any], plots: Sequence[str]) -> str:
    """plots: file names beside the report."""
    blocks = [
        "# headlong bench",
        _conditions(report),
        _METHOD,
        "## Speculation on against the other sides\n\n" + _ratio_table(report["ratios"]),
        "## Sides\n\n" + _side_table(report["rows"]),
        "## Latency\n\n" + _latency_table(report["rows"]),
        "## Acceptance\n\n" + _acceptance_table(report["rows"]),
        _remarks(report),
        "\n\n".join(f"![{name}]({name})" for name in plots),
    ]
    return "\n\n".join(block for block in blocks if block) + "\n"


def _conditions(report: dict[str, Any]) -> str:
    sampling, server, bounds = report["sampling"], report["server"], report["goodput_bounds"]
    lines = [
        f"Command: `{shlex.join(_without_notes(report['command']))}`",
        f"Started {report['started']}; {report['rounds']} rounds; up to {sampling['max_tokens']} tokens at temperature "
        f"{sampling['temperature']:g}, seed {sampling['seed']}; goodput bounds: TTFT {bounds['ttft_ms']:g} ms, "
        f"TPOT {bounds['tpot_ms']:g} ms",
        f"headlong {report['headlong']}, Python {report['python']}, {report['machine']}, {report['cores']} cores; load "
        "average {:.1f} before and {:.1f} after".format(*report["load_average"]),
        f"`on`, `off`: {server['model']['id']} on {server['url']}, headlong {server['version']}, {_settings(report)}",
        *(f"`{name}`: {peer['model']} on {peer['url']}" for name, peer in report["peers"].items()),
        *(f"{name}: {data['prompts']} prompts, sha256 {data['sha256']}" for name, data in report["datasets"].items()),
        *report["notes"],
    ]
    return "\n".join(f"- {line}" for line in lines)


def _without_notes(command: Sequence[str]) -> list[str]:
    """They follow as lines of their own."""
    return [part for before, part in pairwise(["", *command]) if _NOTE not in (before, part)]


def _settings(report: dict[str, Any]) -> str:
    model = report["server"]["model"]
    known = [f"{name} {model[name]}" for name in ("runner", "quantization", "verifier") if model.get(name)]
    return ", ".join([*known, f"drafters {' '.join(model.get('methods') or ['none'])}"])


def _ratio_table(ratios: Iterable[Row]) -> str:
    def cells(row: Row) -> list[str]:
        same = f"{row['same_text']}/{row['pairs']}"
        speeds = (ranged(row[name], 2) for name in ("total_tokens_per_second", "decode_tokens_per_second", "ttft"))
        return [row["dataset"], row["load"], row["against"], *speeds, same]

    head = "dataset", "load", "on against", "total tokens/s", "decode tokens/s", "TTFT", "same text"
    return table(head, ratios, cells)


def _side_table(rows: Iterable[Row]) -> str:
    def cells(row: Row) -> list[str]:
        goodput = row["goodput"]
        good = f"{number(goodput['share'], 2)} ({number(goodput['requests_per_second'], 2)}/s)"
        speeds = (ranged(row[name], 1) for name in ("total_tokens_per_second", "decode_tokens_per_second"))
        return [row["dataset"], row["load"], row["side"], *speeds, good, f"{row['errors']}/{row['requests']}"]

    head = "dataset", "load", "side", "total tokens/s", "decode tokens/s", "goodput", "errors"
    return table(head, rows, cells)


def _latency_table(rows: Iterable[Row]) -> str:
    def cells(row: Row) -> list[str]:
        times = (" / ".join(number(value, 0) for value in row[n].values()) for n in ("ttft_ms", "tpot_ms", "gap_ms"))
        return [row["dataset"], row["load"], row["side"], *times]

    head = "dataset", "load", "side", "TTFT p50 / p90 / p99 (ms)", "TPOT (ms)", "gap (ms)"
    return table(head, rows, cells)


def _acceptance_table(rows: Iterable[Row]) -> str:
    def cells(row: Row) -> list[str]:
        found = row["acceptance"]
        lengths = (number(found[name], 2) for name in ("length", "length_without_loops", "loop_share"))
        drafters = (f"{name} {share['tokens_per_forward']:.2f}" for name, share in found["by_drafter"].items())
        return [row["dataset"], row["load"], *lengths, ", ".join(drafters)]

    head = "dataset", "load", "tau", "tau without loops", "share in loops", "tokens a forward by drafter"
    legend = (
        f"tau: answer tokens over decode forwards. In a loop: a run of {LOOP_TOKENS} tokens that an answer holds at "
        f"least {LOOP_REPEATS} times, from the last of these on; any drafter predicts those."
    )
    return table(head, (row for row in rows if row["acceptance"]), cells) + "\n\n" + legend


def _remarks(report: dict[str, Any]) -> str:
    """What a reader must know before comparing."""
    lines = []
    for row in report["rows"]:
        where = f"`{row['side']}`, {row['dataset']}, {row['load']}"
        if row["tokens_counted_from"] != "usage":
            lines.append(f"{where}: tokens counted from chunks, for the server told no usage")
        if row["errors"]:
            lines.append(f"{where}: {row['errors']} of {row['requests']} requests failed, first: {row['first_error']}")
    for row in report["ratios"]:
        if row["against"] == OFF and row["identical"] < row["pairs"]:
            changed = row["pairs"] - row["identical"]
            lines.append(f"`{ON}` and `{OFF}`, {row['dataset']}, {row['load']}: {changed} of {row['pairs']} differ")
    return "## Remarks\n\n" + "\n".join(f"- {line}" for line in lines) if lines else ""


def ranged(spread: dict[str, Any] | None, digits: int) -> str:
    """``median (min-max)`` of a spread."""
    if spread is None:
        return "-"
    return f"{spread['median']:.{digits}f} ({spread['min']:.{digits}f}-{spread['max']:.{digits}f})"


def number(value: float | None, digits: int) -> str:
    """``-`` where there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


def table(head: Sequence[str], rows: Iterable[Row], cells: Callable[[Row], list[str]]) -> str:
    """A Markdown table, one line a row."""
    lines = [list(head), ["---"] * len(head), *map(cells, rows)]
    if len(lines) == 2:
        return "None: there was no other side."
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
