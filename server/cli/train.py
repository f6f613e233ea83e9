"""``headlong train``: draft heads for a model, from answers that the model writes itself."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import logging
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from engine import threads
from engine.config import DEFAULT_MODEL
from engine.errors import HeadTrainingError, ModelLoadError
from server.cli.failure import BAD_CONFIGURATION, FAILED, fail
from server.config import load_settings
from server.config_errors import ConfigError
from server.training.config import TrainConfig
from server.training.prompts import PromptError
from server.training.recipe import CHAT_PACKAGE
from server.training.selection import Selection, training_prompts
from server.version import VERSION

if TYPE_CHECKING:
    from engine.train_job import TrainReport


# One parameter an option: that is how typer is told of them.
def train(
    out: Annotated[Path, typer.Option(help="Folder for the heads; a killed run goes on in it.", metavar="DIR")],
    model: Annotated[
        str | None,
        typer.Argument(help=f"A folder, a GGUF file, a hub id or package:NAME.  \\[default: {DEFAULT_MODEL}]"),
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
    train_base: Annotated[
        str | None,
        typer.Option(help="lora: train the base model with the heads; the result is a new model.", metavar="lora"),
    ] = None,
    tokens: Annotated[int | None, typer.Option(help="Answer tokens to train on.  \\[default: 300000]")] = None,
    estimate: Annotated[
        bool, typer.Option("--estimate", help="Tell what the run would cost from where it stands, and stop.")
    ] = False,
    config: Annotated[
        Path | None, typer.Option("--config", help="A YAML file such as configs/train/default.yaml.", metavar="FILE")
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="Override a key of the file, e.g. training.epochs=2; may be given several times.",
            metavar="KEY=VALUE",
        ),
    ] = None,
) -> None:
    """Train draft heads for a model; started again after a kill, it goes on where it stood."""
    flags = {
        "model.path": model,
        "method": method,
        "start_from": start_from,
        "prompts.file": prompts,
        "answers.tokens": tokens,
        "training.base": train_base,
    }
    try:
        settings = load_settings(TrainConfig, config, overrides or (), flags)
        report = _train(settings, out, estimate)
    except ConfigError as error:
        fail(str(error), BAD_CONFIGURATION)
    except (ModelLoadError, HeadTrainingError, PromptError) as error:
        fail(str(error), FAILED)
    except MemoryError:
        fail(f"not enough memory to train on {settings.model.path}", FAILED)
    if report is None:
        return
    console = Console()
    console.print(_table(report))
    if report.change is None:
        _show_command(console, f"heads written to {out}", f"{settings.model.path} --heads {out}")
    else:
        _tell_of(report, settings, out, console)


def _tell_of(report: TrainReport, settings: TrainConfig, out: Path, console: Console) -> None:
    """What became of the base model, and how it is served."""
    from engine.train_job import MODEL

    change, model = report.change, out / MODEL
    assert change is not None
    found = change.held_out
    console.print(
        f"{change.name} is a new model, not {change.original}. On {found.tokens} held-out tokens: KL {found.kl:.4f} "
        f"nats, the same likeliest token at {found.agreement:.1%}, perplexity {found.perplexity_before:.3f} before, "
        f"{found.perplexity_after:.3f} after"
    )
    # Its file is not quantised, so what came from one that is must be said.
    quantized = settings.model.quantization == "auto" and report.quantization == "int8"
    option = " --set model.quantization=int8" if quantized else ""
    _show_command(console, f"model written to {model}, heads to {out}", f"{model} --heads {out}{option}")


def _show_command(console: Console, done: str, arguments: str) -> None:
    # Not wrapped: the command is there to be copied.
    console.print(
        f"{done}; serve them with: headlong serve {arguments}",
        markup=False,
        soft_wrap=True,
    )


def _train(settings: TrainConfig, out: Path, estimates: bool) -> TrainReport | None:
    """None when the run is only to be estimated."""
    selection = training_prompts(settings.prompts)
    threads.configure(settings.engine.num_threads)  # before anything imports torch
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    from engine.head_training import estimate, train_heads
    from engine.train_job import TrainJob
    from server.training.material import make_material

    model, engine, training = settings.to_engine_settings()
    material = functools.partial(make_material, selection.prompts)
    with Bars() as bars:
        run = _run(settings, selection)
        start = None if settings.start_from is None else Path(settings.start_from).expanduser()
        job = TrainJob(model, out, material, engine, training, run, settings.method, start)
        if estimates:
            estimate(job, bars)
            return None
        return train_heads(job, bars)


def _run(settings: TrainConfig, selection: Selection) -> dict[str, Any]:
    """What run.yaml says beside the engine's own facts."""
    return {
        "command": ["headlong", *map(_without_place, sys.argv[1:])],
        "headlong": VERSION,
        "git_commit": _git_commit(),
        "start_from": None if settings.start_from is None else _without_place(settings.start_from),
        "packages": _packages(settings),
        **selection.facts,
    }


def _without_place(argument: str) -> str:
    """An absolute path in it shortened to the last name: heads are given on, and need not tell of a machine."""
    return re.sub(r"(^|=)(?:~|/|[A-Za-z]:[\\/]).*[\\/](?=[^\\/])", r"\1", argument)


def _packages(settings: TrainConfig) -> dict[str, str]:
    """Versions of the packages that model and prompts came from."""
    names = [settings.model.path.removeprefix("package:")] if settings.model.path.startswith("package:") else []
    names += [CHAT_PACKAGE] if settings.prompts.file is None else []
    found = {}
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


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
    table = Table(title=f"accuracy on held-out answers, {report.positions} tokens")
    for name in ("head", "top-1", "top-3", "top-5", "top-10"):
        table.add_column(name, justify="right")
    for head, accuracy in enumerate(report.accuracy, start=1):
        table.add_row(str(head), *(f"{share:.3f}" for share in accuracy.values()))
    table.caption = f"acceptance length of the heads alone, greedy: {report.acceptance_length:.2f}"
    return table
