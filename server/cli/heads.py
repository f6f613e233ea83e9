"""``headlong heads``: what draft heads are worth, before a server drafts with them."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from engine import threads
from engine.config import DEFAULT_MODEL, ModelConfig
from engine.errors import HeadTrainingError, ModelLoadError
from server.bench.datasets import DATASETS, Dataset, DatasetError, load_dataset
from server.bench.folder import check_out, write_out
from server.bench.report import ReportError
from server.cli.failure import FAILED, fail
from server.cli.train import Bars
from server.evaluation.figures import figures
from server.evaluation.markdown import coupling, markdown
from server.evaluation.plot import write_plot
from server.training.prompts import Prompt, PromptError

_DEFAULT_DATASETS = ("mt-bench", "humaneval")

heads = typer.Typer(help="Measure draft heads.", no_args_is_help=True, pretty_exceptions_enable=False)


# One parameter an option: that is how typer is told of them.
@heads.command("evaluate")
def evaluate(
    folder: Annotated[Path, typer.Argument(help="A folder of heads.", metavar="DIR")],
    model: Annotated[
        str, typer.Option(help="What they draft for: a folder, a GGUF file, a hub id or package:NAME.")
    ] = DEFAULT_MODEL,
    out: Annotated[
        Path | None,
        typer.Option(help="Write the report here: as JSON, or with Markdown and a plot.", metavar="FILE.json|FOLDER"),
    ] = None,
    n: Annotated[int, typer.Option(help="Prompts of each dataset.", min=1)] = 24,
    max_tokens: Annotated[int, typer.Option(help="Tokens of an answer at most.", min=2)] = 64,
    dataset: Annotated[
        list[str] | None,
        typer.Option(
            help=f"{', '.join(DATASETS)}, a file or a folder of code; may be given several times.  "
            f"\\[default: {', '.join(_DEFAULT_DATASETS)}]",
            metavar="NAME|FILE",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Sampling seed of the first answer.", min=0)] = 0,
) -> None:
    """Measure what draft heads are worth: acceptance by shape of draft and temperature, cost, expected speed-up."""
    try:
        check_out(out)
        datasets = [load_dataset(name, n) for name in dict.fromkeys(dataset or _DEFAULT_DATASETS)]
        report = _measured(_Wanted(folder, model, max_tokens, seed), datasets)
        console = Console()
        console.print(_table(report["best"]))  # first, so that a disk that is full by now does not cost the result
        if out is not None:
            write_out(out, report, lambda folder, made: [write_plot(folder, made)], markdown)
    except (ModelLoadError, HeadTrainingError, PromptError, DatasetError, ReportError) as error:
        fail(str(error))
    except MemoryError:
        fail(f"not enough memory to draft for {model}", FAILED)
    if out is not None:
        console.print(f"report written to {out}", markup=False, soft_wrap=True)


@dataclass(frozen=True, slots=True)
class _Wanted:
    folder: Path
    model: str
    max_tokens: int
    seed: int


def _measured(wanted: _Wanted, datasets: Sequence[Dataset]) -> dict[str, Any]:
    threads.configure(None)  # before anything imports torch
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    from engine.heads_report import EvaluationJob, evaluate_heads

    started, load_before = datetime.now(UTC), psutil.getloadavg()[0]
    prompts = functools.partial(_prompts, datasets)
    job = EvaluationJob(
        ModelConfig(wanted.model), wanted.folder, prompts, max_tokens=wanted.max_tokens, seed=wanted.seed
    )
    with Bars() as bars:
        found = evaluate_heads(job, bars)
    return {
        "command": ["headlong", *sys.argv[1:]],
        "started": started.isoformat(timespec="seconds"),
        "load_average": [load_before, psutil.getloadavg()[0]],
        "max_tokens": wanted.max_tokens,
        "seed": wanted.seed,
        "datasets": {data.name: {"prompts": len(data.prompts), "sha256": data.digest} for data in datasets},
        **figures(found),
    }


def _prompts(datasets: Sequence[Dataset], folder: Path) -> dict[str, Sequence[tuple[int, ...]]]:
    """Each dataset in the chat template of the model in ``folder``."""
    from server.training.material import make_material

    return {
        data.name: make_material([Prompt(text, data.name, "") for text in data.prompts], folder).prompts
        for data in datasets
    }


def _table(best: Sequence[dict[str, Any]]) -> Table:
    table = Table(title="the best shape of each", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for index, name in enumerate(("dataset", "temp.", "coupled", "shape", "tau", "draft ms", "speed-up")):
        table.add_column(name, justify="left" if index < 4 else "right")
    for row in best:
        numbers = (f"{row[name]:.2f}" for name in ("tau", "draft_ms", "speedup"))
        table.add_row(row["dataset"], f"{row['temperature']:g}", coupling(row), row["shape"], *numbers)
    return table
