"""An evaluation of heads to read: its figures as Markdown tables, each with what they mean."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from server.bench.acceptance import LOOP_REPEATS, LOOP_TOKENS
from server.bench.markdown import number, table

Row = dict[str, Any]

_SHAPES = """\
tau: answer tokens over decode forwards, every drafted node verified whatever it costs. Chain-4: the likeliest path,
four tokens deep, cut from a tree of 16 nodes. Tree-n: the n likeliest nodes; nodes: how many of them there were in a
forward in the mean, since hopeless ones are not drafted. Coupled: drafted with the noise that verification adds (at
temperature 0 there is none). Draft: the median time that drafting takes in a step of one request alone, and its share
of that step. Expected speed-up: tau x T(1) / (T(rows) + draft), with T(rows) the time of a forward of so many rows on
this machine; below 1, drafting with these heads alone would cost more than it saves, and a server drafts less."""
_BEST = "The shape with the highest expected speed-up over plain decoding, one request at a time."
_POSITIONS = "The share of all forwards that kept a drafted token at each position, with the largest tree."
_LOOPS = f"""\
A token is in a loop where it lies in a run of {LOOP_TOKENS} tokens that its answer holds {LOOP_REPEATS} times or more,
from time number {LOOP_REPEATS} on; any drafter predicts those. tau without loops leaves out every answer that has such
a token."""
_CALIBRATION = """\
Nodes whose parent was right, by the chance that the drafter gave them: what it expected in the mean, and how often they
were right, with the largest tree and over all datasets."""
_HELD_OUT = "How often the token was among the likeliest of each head, on answers kept from training (from run.yaml)."


def markdown(report: Row, plots: Sequence[str]) -> str:
    """plots: file names beside the report."""
    blocks = [
        "# headlong heads evaluate",
        _conditions(report),
        "## Best\n\n" + _BEST + "\n\n" + best_table(report["best"]),
        "\n\n".join(f"![{name}]({name})" for name in plots),
        "## Acceptance and cost\n\n" + _SHAPES,
        *(f"### {name}\n\n{_shape_table(report, name)}" for name in report["datasets"]),
        "## Acceptance by position\n\n" + _POSITIONS + "\n\n" + _position_table(report["rows"]),
        "## Loops\n\n" + _LOOPS + "\n\n" + _loop_table(report["loops"]),
        "## Calibration\n\n" + _CALIBRATION + "\n\n" + _calibration_table(report["calibration"]),
        _trained_calibration(report["heads"]["calibration"]),
        _held_out(report["heads"]),
        "## Time of a forward\n\n" + _step_table(report["step_ms"]),
    ]
    return "\n\n".join(block for block in blocks if block) + "\n"


def _conditions(report: Row) -> str:
    heads, model = report["heads"], report["model"]
    lines = [
        f"Command: `{shlex.join(report['command'])}`",
        f"Heads: {heads['method']}, {heads['num_heads']} deep, made for {heads['base_model']}; acceptance length "
        f"after training: {number(heads['held_out_length'], 2)} (held-out prompts, greedy, 16 nodes)",
        f"Model: {model['name']}, {model['runner']} step, quantization {model['quantization']}",
        f"Started {report['started']}; answers of up to {report['max_tokens']} tokens, seed {report['seed']}",
        f"headlong {report['headlong']}, Python {report['python']}, {report['machine']}, {report['cores']} cores; load "
        "average {:.1f} before and {:.1f} after".format(*report["load_average"]),
        *(f"{name}: {data['prompts']} prompts, sha256 {data['sha256']}" for name, data in report["datasets"].items()),
    ]
    return "\n".join(f"- {line}" for line in lines)


def coupling(row: Row) -> str:
    """Whether drafts are coupled, in a table's words."""
    return "-" if row["coupled"] is None else "yes" if row["coupled"] else "no"


def _way(row: Row) -> list[str]:
    return [f"{row['temperature']:g}", coupling(row)]


def best_table(rows: Sequence[Row]) -> str:
    def cells(row: Row) -> list[str]:
        figures = (number(row[name], 2) for name in ("tau", "draft_ms", "speedup"))
        return [row["dataset"], *_way(row), row["shape"], *figures]

    head = "dataset", "temperature", "coupled", "shape", "tau", "draft (ms)", "expected speed-up"
    return table(head, rows, cells)


def _shape_table(report: Row, dataset: str) -> str:
    def cells(row: Row) -> list[str]:
        drafting = f"{row['draft_ms']:.2f} ({row['draft_share']:.0%})"
        taus = (number(row[name], 2) for name in ("tau", "tau_without_looping_answers"))
        costs = number(row["mean_nodes"], 1), number(row["verify_ms"], 1), drafting, number(row["speedup"], 2)
        return [*_way(row), row["shape"], *taus, *costs]

    head = (
        "temperature",
        "coupled",
        "shape",
        "tau",
        "tau without loops",
        "nodes",
        "T(rows) (ms)",
        "draft (ms)",
        "expected speed-up",
    )
    return table(head, [row for row in report["rows"] if row["dataset"] == dataset], cells)


def _position_table(rows: Sequence[Row]) -> str:
    widest = max(row["nodes"] for row in rows)
    shown = [row for row in rows if row["nodes"] == widest]
    depth = max(len(row["accepted_by_position"]) for row in shown)

    def cells(row: Row) -> list[str]:
        shares = row["accepted_by_position"]
        return [row["dataset"], *_way(row), *(number(value, 3) for value in [*shares, *[0.0] * (depth - len(shares))])]

    return table(["dataset", "temperature", "coupled", *map(str, range(1, depth + 1))], shown, cells)


def _loop_table(rows: Sequence[Row]) -> str:
    def cells(row: Row) -> list[str]:
        looping = f"{row['looping_answers']}/{row['answers']}"
        return [row["dataset"], f"{row['temperature']:g}", f"{row['share_in_loops']:.1%}", looping]

    return table(("dataset", "temperature", "tokens in loops", "answers with loops"), rows, cells)


def _calibration_table(rows: Sequence[Row]) -> str:
    lines = [row | bucket for row in rows for bucket in row["buckets"]]
    if not lines:
        return "Nothing was drafted."

    def cells(line: Row) -> list[str]:
        rates = (number(line[name], 3) for name in ("expected", "measured"))
        return [*_way(line), f"{line['upto']:g}", *rates, str(line["nodes"])]

    return table(("temperature", "coupled", "chance up to", "expected", "measured", "nodes"), lines, cells)


def _trained_calibration(found: Row | None) -> str:
    if found is None:
        return ""
    rows = [{"upto": edge, "rates": [head[at] for head in found["rates"]]} for at, edge in enumerate(found["edges"])]

    def cells(row: Row) -> list[str]:
        return [f"{row['upto']:g}", *(number(rate, 3) for rate in row["rates"])]

    head = ["confidence up to", *(f"head {depth}" for depth in range(1, len(found["rates"]) + 1))]
    words = "As measured after training, on held-out answers: how often a candidate of some confidence was right."
    return f"{words}\n\n{table(head, rows, cells)}"


def _held_out(heads: Row) -> str:
    accuracy = heads["held_out_accuracy"]
    if not accuracy:
        return ""
    names = list(accuracy[0])
    rows = [{"depth": depth, **shares} for depth, shares in enumerate(accuracy, start=1)]

    def cells(row: Row) -> list[str]:
        return [str(row["depth"]), *(number(row.get(name), 3) for name in names)]

    head = ["head", *(name.replace("_", "-") for name in names)]
    return f"## Held-out accuracy\n\n{_HELD_OUT}\n\n{table(head, rows, cells)}"


def _step_table(step_ms: dict[str, float]) -> str:
    rows = [{"rows": rows, "ms": time} for rows, time in step_ms.items()]
    first = rows[0]["ms"]

    def cells(row: Row) -> list[str]:
        return [row["rows"], number(row["ms"], 1), number(row["ms"] / first, 2)]

    return table(("rows", "T(rows) (ms)", "over T(1)"), rows, cells)
