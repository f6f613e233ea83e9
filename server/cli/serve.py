"""``headlong serve``: the server."""

from __future__ import annotations

import logging
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from engine import threads
from engine.config import DEFAULT_MODEL
from engine.errors import ModelLoadError
from server.auth import ApiKeys
from server.cli.failure import BAD_CONFIGURATION, FAILED, fail
from server.cli.progress import Progress
from server.config import Config, load_config
from server.config_errors import ConfigError
from server.lifecycle import Launch, run
from server.listener import ListenError, listen, url_of
from server.operation import create_admin_app
from server.startup import LoadedModel, load_model

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from server.context import ServerContext


# One parameter an option: that is how typer is told of them.
def serve(
    model: Annotated[
        str | None,
        typer.Argument(help=f"A folder, a GGUF file, a hub id or package:NAME.  \\[default: {DEFAULT_MODEL}]"),
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="A YAML file such as configs/serve/default.yaml.", metavar="FILE")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.  \\[default: 127.0.0.1]")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 is any free one.  \\[default: 8000]")] = None,
    heads: Annotated[
        str | None,
        typer.Option(
            help="A folder of draft heads; default: those that come with headlong for the model, if any.", metavar="DIR"
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="Override a key of the file, e.g. engine.max_num_seqs=8; may be given several times.",
            metavar="KEY=VALUE",
        ),
    ] = None,
) -> None:
    """Serve a model over the OpenAI API."""
    flags = {"model.path": model, "server.host": host, "server.port": port, "speculation.heads": heads}
    try:
        settings = load_config(config, overrides or (), flags)
        _serve(settings)
    except ConfigError as error:
        fail(str(error), BAD_CONFIGURATION)
    except (ListenError, ModelLoadError) as error:
        fail(str(error), FAILED)
    except MemoryError:
        fail(f"not enough memory for {settings.model.path}; free some, or choose a smaller model or dtype", FAILED)


def _serve(config: Config) -> None:
    # Cheap refusals first: each would otherwise come after a minute of loading.
    if config.server.api_keys_file:
        ApiKeys.load(config.server.api_keys_file)
    listener = listen(config.server.host, config.server.port)
    admin_port = config.server.admin_port
    admin_listener = None if admin_port is None else listen(config.server.host, admin_port)
    threads.configure(config.engine.num_threads)  # before anything imports torch
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("headlong").setLevel(logging.INFO)
    with Progress() as progress:
        run(_launch(config, listener, admin_listener, progress))


def _launch(
    config: Config, listener: socket.socket, admin_listener: socket.socket | None, progress: Progress
) -> Launch:
    def load() -> LoadedModel:
        return load_model(config, progress)

    def announce(context: ServerContext) -> None:
        progress.stop()
        print(announcement(context, listener, admin_listener), flush=True)

    return Launch(
        config=config,
        listener=listener,
        load=load,
        build_app=_build_app,
        announce=announce,
        admin_listener=admin_listener,
        build_admin_app=None if admin_listener is None else create_admin_app,
    )


# It imports transformers and with it torch: only after ``threads.configure``, and only once a model is loaded.
def _build_app(context: ServerContext) -> ASGIApp:
    from server.app import create_app

    return create_app(context)


def announcement(context: ServerContext, listener: socket.socket, admin_listener: socket.socket | None = None) -> str:
    """The line that says the server answers, and a command to try it with."""
    url = url_of(listener)
    key = "-H 'Authorization: Bearer KEY' " if context.config.server.api_keys_file else ""
    path, body = "chat/completions", '{"messages":[{"role":"user","content":"Why is the sky blue?"}],"stream":true}'
    if not context.tokenizer.has_chat_template:
        path, body = "completions", '{"prompt":"The sky is blue because","max_tokens":64,"stream":true}'
    reachable = url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
    admin = "" if admin_listener is None else f", probes and metrics on {url_of(admin_listener)}"
    return (
        f"headlong serving {context.served_model_name} on {url}{admin}\n"
        f"  curl -N {reachable}/v1/{path} {key}-d '{body}'"
    )
