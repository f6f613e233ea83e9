"""A real server process: loading, readiness, drain at SIGTERM, exit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

SCRIPT = Path(__file__).with_name("still_server.py")


class Process:
    """The server as a subprocess; ``url`` (and ``admin_url``) are known once it listens."""

    def __init__(self, *overrides: str, **environment: str) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, "-W", "error", str(SCRIPT), *overrides],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | environment,
        )
        self.url = self.line()
        self.admin_url = self.line() if any("admin_port" in override for override in overrides) else ""

    def line(self) -> str:
        assert self.popen.stdout is not None
        return self.popen.stdout.readline().strip()

    def until_served(self) -> None:
        assert self.line() == "serving tiny"

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.popen.send_signal(number)

    def end(self, timeout: float = 20.0) -> tuple[int, str, str]:
        """Exit status, the rest of stdout, stderr."""
        out, err = self.popen.communicate(timeout=timeout)
        return self.popen.returncode, out, err


Start = Callable[..., Process]


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[Process] = []

    def make(*overrides: str, **environment: str) -> Process:
        started.append(Process(*overrides, **environment))
        return started[-1]

    yield make
    for process in started:
        if process.popen.poll() is None:
            process.popen.kill()
        process.popen.communicate()


class SlowReader(threading.Thread):
    """Reads ``/slow`` in the background; ``begun`` is set at the first event."""

    def __init__(self, url: str, count: int) -> None:
        super().__init__()
        self.url, self.count = url, count
        self.begun = threading.Event()
        self.lines: list[str] = []
        self.fault: Exception | None = None

    def run(self) -> None:
        try:
            with httpx.stream("GET", f"{self.url}/slow?count={self.count}", timeout=30) as answer:
                for line in answer.iter_lines():
                    if line:
                        self.lines.append(line)
                        self.begun.set()
        except httpx.HTTPError as fault:
            self.fault = fault
            self.begun.set()


def start_reader(url: str, count: int) -> SlowReader:
    reader = SlowReader(url, count)
    reader.start()
    assert reader.begun.wait(10)
    return reader


def test_sigterm_lets_a_live_stream_finish(start: Start) -> None:
    process = start("server.drain_seconds=20")
    process.until_served()
    assert httpx.get(f"{process.url}/ready").status_code == 200
    with httpx.Client(base_url=process.url) as kept:  # a connection opened before the signal is served after it
        kept.get("/health")
        reader = start_reader(process.url, 30)
        process.signal()
        time.sleep(0.3)
        ready = kept.get("/ready")
    assert ready.status_code == 503
    assert ready.json()["reason"] == "the server is draining"
    refused = httpx.get(f"{process.url}/slow?count=1")  # a new connection is still accepted
    assert refused.status_code == 503
    assert 1 <= int(refused.headers["retry-after"]) <= 30
    assert refused.json()["error"]["code"] == "service_unavailable"
    assert httpx.get(f"{process.url}/health").status_code == 200
    reader.join()
    ended = time.monotonic()
    status, out, err = process.end()
    assert time.monotonic() - ended < 5  # it goes when the stream has, not when the budget is over
    assert reader.fault is None
    assert reader.lines == [*(f"data: {number}" for number in range(30)), "data: [DONE]"]
    assert status == 0
    assert out.splitlines() == ["engine stopped", "ended"]
    assert "Traceback" not in err


def test_what_outlives_the_drain_ends_with_an_error_event(start: Start) -> None:
    process = start("server.drain_seconds=1")
    process.until_served()
    reader = start_reader(process.url, 200)
    started = time.monotonic()
    process.signal(signal.SIGINT)
    reader.join()
    status, _, err = process.end()
    assert 0.9 < time.monotonic() - started < 6
    assert reader.fault is None
    assert reader.lines[-1] == 'data: {"error": {}}'
    assert status == 0
    assert "Traceback" not in err


def test_an_idle_server_stops_at_once(start: Start) -> None:
    process = start()
    process.until_served()
    started = time.monotonic()
    process.signal()
    status, out, _ = process.end()
    assert status == 0
    assert out.splitlines() == ["engine stopped", "ended"]
    assert time.monotonic() - started < 10  # of a budget of 30


def test_a_second_signal_exits_at_once(start: Start) -> None:
    process = start("server.drain_seconds=100")
    process.until_served()
    reader = start_reader(process.url, 300)
    process.signal()
    time.sleep(0.3)
    assert process.popen.poll() is None
    process.signal(signal.SIGINT)
    status, out, _ = process.end(timeout=5)
    assert status == 128 + signal.SIGINT
    assert "engine stopped" not in out
    reader.join()


def test_probes_while_the_model_loads(start: Start) -> None:
    process = start(STILL_LOAD_SECONDS="1.5")
    assert httpx.get(f"{process.url}/health").status_code == 200
    ready = httpx.get(f"{process.url}/ready")
    assert ready.status_code == 503
    assert "loading" in ready.json()["reason"]
    early = httpx.post(f"{process.url}/v1/chat/completions", json={})
    assert early.status_code == 503
    assert early.json()["error"]["code"] == "model_loading"
    assert "retry-after" in early.headers
    process.until_served()
    assert httpx.get(f"{process.url}/ready").status_code == 200


def test_a_signal_while_the_model_loads_ends_it(start: Start) -> None:
    process = start(STILL_LOAD_SECONDS="60")
    assert httpx.get(f"{process.url}/health").status_code == 200
    process.signal()
    status, _, err = process.end(timeout=5)
    assert status == 0
    assert "Traceback" not in err


def test_a_load_fault_ends_the_process(start: Start) -> None:
    process = start(STILL_LOAD_FAULT="no such model")
    status, out, err = process.end()
    assert status == 3
    assert out.splitlines() == ["fault: no such model"]
    assert "Traceback" not in err


def test_the_admin_port_has_metrics_and_probes(start: Start) -> None:
    process = start("server.admin_port=0")
    process.until_served()
    assert process.admin_url != process.url
    assert httpx.get(f"{process.url}/version").status_code == 200
    assert "headlong_requests_running" in httpx.get(f"{process.admin_url}/metrics").text
    assert httpx.get(f"{process.admin_url}/ready").status_code == 200
    assert httpx.get(f"{process.admin_url}/version").status_code == 404
    process.signal()
    assert process.end()[0] == 0


def test_the_admin_port_answers_during_the_drain(start: Start) -> None:
    process = start("server.admin_port=0", "server.drain_seconds=20")
    process.until_served()
    reader = start_reader(process.url, 10)
    process.signal()
    time.sleep(0.3)
    assert httpx.get(f"{process.admin_url}/ready").status_code == 503
    assert httpx.get(f"{process.admin_url}/metrics").status_code == 200
    reader.join()
    assert reader.lines[-1] == "data: [DONE]"
    assert process.end()[0] == 0
