"""The ``headlong`` command: answers fast, refuses in one line, exits with the right status."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest
from rich.console import Console

from server.cli.progress import Progress
from server.cli.serve import announcement
from server.context import ServerContext
from server.listener import ListenError, listen, url_of

# What only a loaded model needs; a refused command line must not wait seconds for it.
HEAVY = ("torch", "transformers", "jsonschema", "heads.medusa", "server.app", "server.tokenizer", "engine.async_engine")


def headlong(*arguments: str, timeout: float = 120.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "server", *arguments], capture_output=True, text=True, timeout=timeout, check=False
    )


def assert_refused(result: subprocess.CompletedProcess[str], status: int, *parts: str) -> None:
    """One line on stderr that has all ``parts``, nothing on stdout."""
    assert result.stdout == ""
    assert result.stderr.startswith("headlong: ")
    assert result.stderr.count("\n") == 1, result.stderr
    assert [part for part in parts if part not in result.stderr] == []
    assert result.returncode == status


def test_version() -> None:
    result = headlong("--version")
    assert result.stdout == f"headlong {version('headlong')}\n"
    assert result.returncode == 0


def test_help_names_serve_and_its_options() -> None:
    assert "serve" in headlong("--help").stdout
    text = headlong("serve", "--help").stdout
    for option in ("--config", "--host", "--port", "--heads", "--set"):
        assert option in text


def test_the_command_line_loads_nothing_heavy() -> None:
    code = f"import sys; import server.cli.main; print([name for name in {HEAVY!r} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert result.stdout == "[]\n"


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("--set", "engine.block_siz=8"), ("engine.block_siz: unknown key", "engine.block_size")),
        (("--port", "70000"), ("server.port", "70000", "65535")),
        (("--set", "model.quantization=int4"), ("model.quantization", "'int4'", "int8")),
        (("--set", "speculation.drafters=[poetry]"), ("speculation.drafters", "unknown drafter", "suffix, medusa")),
        (("--config", "/absent/serve.yaml"), ("/absent/serve.yaml", "No such file")),
        (("--set", "server.api_keys_file=/absent/keys"), ("server.api_keys_file", "/absent/keys")),
    ],
)
def test_a_bad_configuration_is_one_line(arguments: tuple[str, ...], parts: tuple[str, ...]) -> None:
    assert_refused(headlong("serve", *arguments), 2, *parts)


def test_a_port_in_use_is_told_before_the_model_is_looked_at() -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        result = headlong("serve", "/absent/model", "--port", str(port))
    assert_refused(result, 1, f"port {port} on 127.0.0.1 is in use")


def test_an_admin_port_in_use_is_told_too() -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        result = headlong("serve", "/absent/model", "--port", "0", "--set", f"server.admin_port={port}")
    assert_refused(result, 1, f"port {port} on 127.0.0.1 is in use")


def test_a_host_that_is_not_ours_is_told() -> None:
    assert_refused(headlong("serve", "--host", "192.0.2.1", "--port", "0"), 1, "192.0.2.1")


def test_a_missing_model_is_one_line(tmp_path: Path) -> None:
    result = headlong("serve", str(tmp_path / "absent"), "--port", "0", timeout=200)
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("headlong: ")
    assert "absent" in last
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
    assert result.returncode == 1


def test_the_socket_listens_from_the_start() -> None:
    with listen("127.0.0.1", 0) as sock:
        host, port = sock.getsockname()
        assert url_of(sock) == f"http://127.0.0.1:{port}"
        socket.create_connection((host, port), timeout=5).close()
        with pytest.raises(ListenError, match=f"port {port} on 127.0.0.1 is in use"):
            listen("127.0.0.1", port)


@pytest.mark.parametrize(("chat", "path"), [(True, "/v1/chat/completions"), (False, "/v1/completions")])
def test_the_announced_command_is_one_the_model_answers(
    still_context: Callable[[], ServerContext], chat: bool, path: str
) -> None:
    context = still_context()
    context.tokenizer.has_chat_template = chat  # type: ignore[misc]
    with contextlib.closing(listen("127.0.0.1", 0)) as listener:
        told = announcement(context, listener)
    body = json.loads(told.partition("-d '")[2].removesuffix("'"))
    assert f"{path} -d" in told
    assert ("messages" in body, "prompt" in body) == (chat, not chat)


def test_progress_in_a_file_is_plain_lines(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as file, Progress(Console(file=file)) as progress:
        progress("reading [a/b] 1")
        progress("reading 2")
    assert (tmp_path / "log").read_text() == "reading [a/b] 1\nreading 2\n"


def _read_to_the_end(master: int) -> bytes:
    """One read may return a part; a terminal whose other side is closed ends in an error (Linux) or in nothing."""
    parts = []
    with contextlib.suppress(OSError):
        while part := os.read(master, 65536):
            parts.append(part)
    return b"".join(parts)


def test_progress_on_a_terminal_is_one_live_line() -> None:
    master, slave = pty.openpty()
    with os.fdopen(slave, "w") as terminal:
        console = Console(file=terminal, force_terminal=True, _environ={"TERM": "xterm"})
        with Progress(console) as progress:
            progress("reading [a/b] 1")
            time.sleep(0.3)
    shown = _read_to_the_end(master).decode()
    os.close(master)
    assert "reading [a/b] 1" in shown
    assert "\x1b[?25l" in shown  # the cursor is hidden while the line lives
    assert "\x1b[?25h" in shown  # and is shown again
