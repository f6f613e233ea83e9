"""The command line's root: options of ``headlong`` itself and the list of its commands."""

from __future__ import annotations

from typing import Annotated

import typer

from server.cli.bench import bench
from server.cli.heads import heads
from server.cli.serve import serve
from server.cli.train import train
from server.cli.verify import verify
from server.version import VERSION

app = typer.Typer(
    help="OpenAI-compatible inference with self-speculative decoding.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("serve")(serve)
app.command("bench")(bench)
app.command("verify")(verify)
app.command("train")(train)
app.add_typer(heads, name="heads")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"headlong {VERSION}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """OpenAI-compatible inference with self-speculative decoding."""


def main() -> None:
    """The entry point of the ``headlong`` command."""
    app()
