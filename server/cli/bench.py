"""``headlong bench``: speculation on against off on a running server, interleaved, with a report."""

from __future__ import annotations

import asyncio
import json
import platform
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import httpx
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table

from server.bench.client import Sampling, ServerFault
from server.bench.compare import Comparison, Pair, Plan, compare
from server.bench.datasets import Dataset, DatasetError, load_dataset
from server.version import VERSION


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
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    plan = Plan(rounds=rounds, clients=clients, headers=headers)
    sampling = Sampling(max_tokens, temperature, seed, margins)
    console = Console()
    try:
        datasets = [load_dataset(name, n) for name in dataset or ["edits"]]
        results = {data.name: _measured(url, data, sampling, plan) for data in datasets}
        server = _server(url, headers)
    except (DatasetError, ServerFault) as error:
        _fail(str(error))
    except httpx.HTTPError as error:
        _fail(f"{url} does not answer: {type(error).__name__} {error}")
    console.print(_table(results))
    if out is not None:
        out.write_text(json.dumps(_report(datasets, results, server), indent=1) + "\n")
        console.print(f"report written to {out}")


def _measured(url: str, data: Dataset, sampling: Sampling, plan: Plan) -> dict[str, Any]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Bar(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(data.name, total=len(data.prompts) * plan.rounds)

        def advance(_: Pair) -> None:
            bar.advance(task)

        comparison: Comparison = asyncio.run(compare(url, data.prompts, sampling, plan, advance))
    return comparison.summary()


def _server(url: str, headers: dict[str, str]) -> dict[str, Any]:
    """What the server says of itself."""
    version: dict[str, Any] = httpx.get(f"{url}/version", headers=headers).raise_for_status().json()
    models = httpx.get(f"{url}/v1/models", headers=headers).raise_for_status().json()
    return {"url": url, "version": version, "model": models["data"][0]}


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
            f"{summary['on']['tokens_per_forward'] or 0:.2f}",
            f"{summary['identical']}/{summary['pairs']}",
        )
    return table


def _report(datasets: list[Dataset], results: dict[str, dict[str, Any]], server: dict[str, Any]) -> dict[str, Any]:
    return {
        "command": ["headlong", *sys.argv[1:]],
        "headlong": VERSION,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "server": server,
        "datasets": {data.name: {"prompts": len(data.prompts), "sha256": data.digest} for data in datasets},
        "results": results,
    }


def _fail(message: str) -> NoReturn:
    print(f"headlong: {message}", file=sys.stderr, flush=True)
    raise typer.Exit(1)
