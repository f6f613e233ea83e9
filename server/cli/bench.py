"""``headlong bench``: a running server with speculation and without, and other servers, interleaved, with a report."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from server.bench.client import Sampling
from server.bench.datasets import DATASETS, Dataset, load_dataset
from server.bench.figures import Bounds
from server.bench.folder import check_out, write_out
from server.bench.load import Load, LoadError, parse_clients, split_clients
from server.bench.markdown import ranged
from server.bench.run import Sides, Wanted, run_bench
from server.bench.side import PeerError, parse_peers
from server.cli.measuring import failures_in_one_line, measuring_bar

_DATASETS = ", ".join(DATASETS)
_ALL = "all"


# One parameter an option: that is how typer is told of them.
def bench(
    url: Annotated[str, typer.Option(help="The server to measure.")] = "http://127.0.0.1:8000",
    dataset: Annotated[
        list[str] | None,
        typer.Option(
            help=f"{_DATASETS}, {_ALL} of these, a file or a folder of code; may be given several times. "
            "NAME@1,8: with 1 and 8 clients, whatever --clients says.  \\[default: edits]",
            metavar="NAME|FILE",
        ),
    ] = None,
    n: Annotated[int | None, typer.Option(help="Prompts of each dataset.  \\[default: all]", min=1)] = None,
    rounds: Annotated[int, typer.Option(help="Times each side answers every prompt.", min=1)] = 3,
    clients: Annotated[
        list[str] | None,
        typer.Option(
            help="Requests in flight at once, or several such loads: 1,4,8; may be given several times.  "
            "\\[default: 1]",
            metavar="COUNT,...",
        ),
    ] = None,
    rate: Annotated[
        list[float] | None,
        typer.Option(
            help="Open loop: requests a second, arriving at random (Poisson) whatever is answered; "
            "may be given several times."
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens of an answer at most.", min=1)] = 128,
    temperature: Annotated[float, typer.Option(help="Sampling temperature.", min=0.0, max=2.0)] = 0.0,
    seed: Annotated[int, typer.Option(help="Sampling seed, and the seed of the arrivals.")] = 0,
    peer: Annotated[
        list[str] | None,
        typer.Option(
            help="Another OpenAI-compatible server, as a side of its own; may be given several times.",
            metavar="NAME=URL[#MODEL]",
        ),
    ] = None,
    off: Annotated[
        bool,
        typer.Option(
            "--off/--no-off",
            help="Whether the server also answers without speculation, to compare with.  \\[default: --off]",
            show_default=False,
        ),
    ] = True,
    goodput_ttft: Annotated[float, typer.Option(help="Goodput: most ms to the first text.", min=0.0)] = 1000.0,
    goodput_tpot: Annotated[float, typer.Option(help="Goodput: most ms a token after it.", min=0.0)] = 100.0,
    margins: Annotated[bool, typer.Option(help="Report margins, to tell near-ties from faults.")] = False,
    note: Annotated[
        list[str] | None, typer.Option(help="A line for the report, e.g. how a server was started.")
    ] = None,
    api_key: Annotated[str | None, typer.Option(help="API key of the server.", envvar="HEADLONG_API_KEY")] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Write the report here: as JSON, or with Markdown and plots.", metavar="FILE.json|FOLDER"),
    ] = None,
) -> None:
    """Measure a running server: every prompt answered with speculation, without it and by other servers, in turn."""
    # Details cost the server a few bytes a token, on both of its sides alike.
    sampling = Sampling(max_tokens, temperature, seed, margins=margins, detail=True)
    bounds = Bounds(goodput_ttft / 1000, goodput_tpot / 1000)
    with failures_in_one_line(url):
        check_out(out)
        try:
            plan = _plan(dataset or ["edits"], n, _loads(clients or [], rate or []))
            sides = Sides(url, api_key, off, parse_peers(peer or []))
        except (LoadError, PeerError) as error:
            raise typer.BadParameter(str(error)) from error
        report = asyncio.run(run_bench(sides, Wanted(plan, rounds, sampling, bounds, note or ()), measuring_bar))
        _print(Console(), report)
        if out is not None:
            write_out(out, report)
            typer.echo(f"report written to {out}")


def _loads(clients: Sequence[str], rates: Sequence[float]) -> list[Load]:
    """What ``--clients`` and ``--rate`` say; one client where neither does. Raises LoadError."""
    if any(not rate > 0 for rate in rates):
        raise LoadError("a rate must be above 0")
    loads = [load for text in clients for load in parse_clients(text)]
    loads += [Load(rate=rate) for rate in rates]
    return list(dict.fromkeys(loads)) or [Load(clients=1)]


def _plan(texts: Sequence[str], n: int | None, loads: Sequence[Load]) -> list[tuple[Dataset, Sequence[Load]]]:
    """Each dataset under its own loads, or else under ``loads``. Raises DatasetError or LoadError."""
    plan: dict[str, Sequence[Load]] = {}
    for text in texts:
        name, own = split_clients(text)
        for one in DATASETS if name == _ALL else (name,):
            plan[one] = list(dict.fromkeys([*plan.get(one, ()), *(own or loads)]))
    return [(load_dataset(name, n), chosen) for name, chosen in plan.items()]


def _print(console: Console, report: dict[str, Any]) -> None:
    console.print(_sides_table(report["rows"]))
    if report["ratios"]:
        console.print(_ratio_table(report["ratios"]))
    for row in report["rows"]:
        if row["errors"]:
            failed = f"{row['side']}: {row['errors']} of {row['requests']} requests failed, first: {row['first_error']}"
            console.print(failed, markup=False, soft_wrap=True)


def _new_table(title: str, *columns: str) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for index, name in enumerate(columns):
        table.add_column(name, justify="left" if index < 3 else "right")
    return table


def _sides_table(rows: Sequence[dict[str, Any]]) -> Table:
    columns = ("dataset", "load", "side", "tok/s", "decode", "TTFT", "TPOT", "tau", "errors")
    table = _new_table("sides, interleaved: tokens/s (median of rounds), ms (p50)", *columns)
    for row in rows:
        speeds = (row[name] for name in ("total_tokens_per_second", "decode_tokens_per_second"))
        times = (row[name]["p50"] for name in ("ttft_ms", "tpot_ms"))
        tau = row["acceptance"]["length"] if row["acceptance"] else None
        table.add_row(
            row["dataset"],
            row["load"],
            row["side"],
            *("-" if speed is None else f"{speed['median']:.1f}" for speed in speeds),
            *("-" if time is None else f"{time:.0f}" for time in times),
            "-" if tau is None else f"{tau:.2f}",
            str(row["errors"]),
        )
    return table


def _ratio_table(ratios: Sequence[dict[str, Any]]) -> Table:
    columns = ("dataset", "load", "on against", "tok/s (min-max)", "decode (min-max)", "same text")
    table = _new_table("speed of speculation on over the other sides", *columns)
    for row in ratios:
        speeds = (ranged(row[name], 2) for name in ("total_tokens_per_second", "decode_tokens_per_second"))
        table.add_row(row["dataset"], row["load"], row["against"], *speeds, f"{row['same_text']}/{row['pairs']}")
    return table
