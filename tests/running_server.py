"""The real server with the real model, as a user starts it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx

START_SECONDS = 240  # the first start converts the GGUF


class RunningServer:
    """A ``headlong serve`` process and its address."""

    def __init__(self, process: subprocess.Popen[str], url: str, log: list[str]) -> None:
        self.process = process
        self.url = url
        self.log = log

    def metric(self, name: str) -> float:
        """The sum of a series over its labels."""
        text = httpx.get(f"{self.url}/metrics").text
        values = re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
        assert values, f"no metric {name}"
        return sum(map(float, values))

    def resident_bytes(self) -> int:
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")


@contextlib.contextmanager
def running_server(*arguments: str) -> Iterator[RunningServer]:
    command = [sys.executable, "-m", "server", "serve", "--port", "0", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    log: list[str] = []
    stderr = process.stderr
    drain = threading.Thread(target=lambda: log.extend(stderr), daemon=True)
    drain.start()
    timer = threading.Timer(START_SECONDS, process.kill)
    timer.start()
    try:
        line = process.stdout.readline()
        timer.cancel()
        found = re.search(r"on (http://\S+)", line)
        assert found, f"the server did not start: {line!r} {''.join(log)}"
        yield RunningServer(process, found.group(1), log)
    finally:
        timer.cancel()
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        drain.join(10)
        process.stdout.close()
        process.stderr.close()
