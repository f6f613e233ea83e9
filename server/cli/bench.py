"""``headlong bench``: speculation on against off on a running server, interleaved, with a report."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from server.bench.client import Sampling, ServerInfo, connect, server_info
from server.bench.compare import Plan, compare
from server.bench.datasets import Dataset, load_dataset
from server.bench.report import check_report_path, report_head, write_report
from server.cli.measuring import failures_in_one_line, measuring_bar


# One parameter an option: that is how typer is told of them.
def bench(
    url: Annotated[str, typer.Option(help="The server to measure.")] = "http://127.0.0.1:8000",
    dataset: Annotated[
        list[str] | None,
        typer.Option(help="mt-bench, humaneval, edits or a file; may be given several times.  \\[default: edits]"),
    ] = None,
    n: Annotated[int | None, typer.Option(help="Prompts of each dataset.  \\[default: all]", min=1)] = None,
    rounds: Annotated[int, typer.Option(help="Times each prompt is answered both ways.", min=1)] = 3,
    clients: Annotated[int, typer.Option(help="Requests in flight at once.", min=1)] = 1,
    max_tokens: Annotated[int, typer.Option(help="Tokens of an answer at most.", min=1)] = 128,
    temperature: Annotated[float, typer.Option(help="Sampling temperature.", min=0.0, max=2.0)] = 0.0,
    seed: Annotated[int, typer.Option(help="Sampling seed.")] = 0,
    margins: Annotated[bool, typer.Option(help="Ask for margins, to tell near-ties from faults.")] = False,
    api_key: Annotated[str | None, typer.Option(help="API key of the server.", envvar="HEADLONG_API_KEY")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the report here, as JSON.", metavar="FILE")] = None,
) -> None:
    """Measure what speculation gives: every prompt with it and without, in one run."""
    sampling = Sampling(max_tokens, temperature, seed, margins=margins)
    console = Console()
    with failures_in_one_line(url):
        check_report_path(out)
        datasets = [load_dataset(name, n) for name in dataset or ["edits"]]
        server, results = asyncio.run(_measured(url, api_key, datasets, sampling, Plan(rounds, clients)))
        console.print(_table(results))
        if out is not None:
            write_report(out, report_head(server, datasets) | {"results": results})
            console.print(f"report written to {out}")


async def _measured(
    url: str, api_key: str | None, datasets: list[Dataset], sampling: Sampling, plan: Plan
) -> tuple[ServerInfo, dict[str, dict[str, Any]]]:
    results = {}
    async with connect(url, api_key) as client:
        server = await server_info(client)
        for data in datasets:
            with measuring_bar(data.name, len(data.prompts) * plan.rounds) as advance:
                comparison = await compare(client, data.prompts, sampling, plan, advance)
            results[data.name] = comparison.summary()
    return server, results


def _table(results: dict[str, dict[str, Any]]) -> Table:
    table = Table(title="speculation on against off, interleaved")
    columns = ("dataset", "time off/on", "(min-max)", "tok/s on", "off", "tok/forward", "same")
    for name in columns:
        table.add_column(name, justify="left" if name == "dataset" else "right")
    for name, summary in results.items():
        ratio = summary["time_ratio_off_over_on"]
        table.add_row(
            name,
            f"{ratio['median']:.2f}x",
            f"{ratio['min']:.2f}-{ratio['max']:.2f}",
            *(f"{summary[side]['decode_tokens_per_second'] or 0:.1f}" for side in ("on", "off")),
            f"{summary['on']['acceptance_length'] or 0:.2f}",
            f"{summary['identical']}/{summary['pairs']}",
        )
    return table
