"""``headlong train``: draft heads for a model, from answers that the model writes itself."""

from __future__ import annotations

import functools
import logging
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from engine import threads
from engine.errors import HeadTrainingError, ModelLoadError
from server.cli.failure import BAD_CONFIGURATION, FAILED, fail
from server.config import load_settings
from server.config_errors import ConfigError
from server.training.config import TrainConfig
from server.training.prompts import Prompt, PromptError
from server.training.selection import training_prompts
from server.version import VERSION

if TYPE_CHECKING:
    from engine.train_job import TrainReport


# One parameter an option: that is how typer is told of them.
def train(
    out: Annotated[Path, typer.Option(help="Folder for the heads; a killed run goes on in it.", metavar="DIR")],
    model: Annotated[
        str | None, typer.Argument(help="A folder, a GGUF file, a hub id or package:NAME; default: the embedded model.")
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(help="Kind of heads: medusa, markov, mtp or streaming.  \\[default: that of --from, or medusa]"),
    ] = None,
    start_from: Annotated[
        str | None, typer.Option("--from", help="Heads to train further instead of new ones.", metavar="DIR")
    ] = None,
    prompts: Annotated[
        str | None,
        typer.Option(help="JSON lines, text or a folder of code; default: the built-in recipe.", metavar="PATH"),
    ] = None,
    tokens: Annotated[int | None, typer.Option(help="Answer tokens to train on.  \\[default: 300000]")] = None,
    config: Annotated[Path | None, typer.Option("--config", help="A YAML file.", metavar="FILE")] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="Override a key, e.g. training.epochs=2.", metavar="KEY=VALUE")
    ] = None,
) -> None:
    """Train draft heads for a model; started again after a kill, it goes on where it stood."""
    flags = {
        "model.path": model,
        "method": method,
        "start_from": start_from,
        "prompts.file": prompts,
        "answers.tokens": tokens,
    }
    try:
        settings = load_settings(TrainConfig, config, overrides or (), flags)
        report = _train(settings, out)
    except ConfigError as error:
        fail(str(error), BAD_CONFIGURATION)
    except (ModelLoadError, HeadTrainingError, PromptError) as error:
        fail(str(error), FAILED)
    except MemoryError:
        fail(f"not enough memory to train on {settings.model.path}", FAILED)
    console = Console()
    console.print(_table(report))
    console.print(f"heads written to {out}; serve them with: headlong serve {settings.model.path} --heads {out}")


def _train(settings: TrainConfig, out: Path) -> TrainReport:
    prompts = training_prompts(settings.prompts)
    threads.configure(settings.engine.num_threads)  # before anything imports torch
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    from engine.head_training import train_heads
    from engine.train_job import TrainJob
    from server.training.material import make_material

    model, engine, training = settings.to_engine_settings()
    material = functools.partial(make_material, prompts)
    with Bars() as bars:
        run = _run(settings, prompts)
        start = None if settings.start_from is None else Path(settings.start_from).expanduser()
        job = TrainJob(model, out, material, engine, training, run, settings.method, start)
        return train_heads(job, bars)


def _run(settings: TrainConfig, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """What run.yaml says beside the engine's own facts."""
    sources = Counter((prompt.source, prompt.licence) for prompt in prompts)
    return {
        "command": ["headlong", *sys.argv[1:]],
        "headlong": VERSION,
        "git_commit": _git_commit(),
        "start_from": settings.start_from,
        "prompts": [
            {"source": source, "licence": licence, "prompts": count} for (source, licence), count in sources.items()
        ],
    }


def _git_commit() -> str | None:
    """The commit of the checkout this runs from; None elsewhere."""
    here = Path(__file__).parent
    try:
        head = ["git", "-C", str(here), "rev-parse", "HEAD"]
        return subprocess.run(head, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


class Bars:
    """A bar with the time left for each stage; ``engine.head_training.Watch``."""

    def __init__(self) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
        )
        self._progress = Progress(*columns, console=Console(stderr=True))
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Bars:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def line(self, text: str) -> None:
        self._progress.console.print(text, markup=False)

    def advance(self, stage: str, done: int, total: int, note: str) -> None:
        if stage not in self._tasks:
            # A resumed stage starts where it stood, so that the time left counts this run's own speed.
            self._tasks[stage] = self._progress.add_task(stage, total=total, completed=done, note=note)
        task = self._tasks[stage]
        self._progress.update(task, completed=done, total=total)
        if note:
            self._progress.update(task, note=note)


def _table(report: TrainReport) -> Table:
    table = Table(title=f"held-out answers, {report.positions} positions")
    for name in ("head", "top-1", "top-3", "top-5", "top-10"):
        table.add_column(name, justify="right")
    for head, accuracy in enumerate(report.accuracy, start=1):
        table.add_row(str(head), *(f"{share:.3f}" for share in accuracy.values()))
    table.caption = f"acceptance length of the heads alone, greedy: {report.acceptance_length:.2f}"
    return table
