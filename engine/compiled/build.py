"""Compiles the step's sources once, with the machine's own C++ compiler, into the cache.

Plain C functions, no headers of torch or Python: the build takes seconds, and the result does not depend on their
versions. One object file for each instruction set; which of them runs is decided by the CPU when it is loaded, so a
library built into an image serves every machine of its architecture.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from engine.errors import ModelLoadError
from engine.loading.cache import build_once

LIBRARY = "libheadlong.so"
_SOURCE = Path(__file__).parent / "source"
# No -ffast-math: it would remove the checks for NaN and reorder sums. No contraction either: which products are fused
# is written in the source, so that a row's bits do not depend on the compiler's taste.
_FLAGS = ("-std=c++20", "-O3", "-fPIC", "-ffp-contract=off", "-pthread")
_LINK = ("-shared", "-static-libstdc++", "-static-libgcc")  # runs where another compiler's runtime is installed
_X86 = {
    "isa_avx2.cpp": ("-mavx2", "-mfma"),
    "isa_avx512.cpp": ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni", "-mfma"),
}


class CompiledStepError(Exception):
    """The compiled step cannot be had here; the message says why, in one sentence."""


def build_library(progress: Callable[[str], None]) -> Path:
    """The compiled library, built now unless the cache has it. Raises CompiledStepError."""
    if os.name != "posix":
        raise CompiledStepError(f"the compiled step is not made for {platform.system()}")
    try:
        folder = build_once(
            f"step-{_key()}", lambda target: _compile(find_compiler(), target, progress), progress, "the compiled step"
        )
    except ModelLoadError as error:
        raise CompiledStepError(str(error)) from error
    return folder / LIBRARY


def find_compiler() -> list[str]:
    """The command of a C++ compiler: ``$CXX``, else the first of c++, g++, clang++. Raises CompiledStepError."""
    named = os.environ.get("CXX", "")
    try:
        wanted = shlex.split(named)
    except ValueError as error:
        raise CompiledStepError(f"CXX={named} is not a command: {error}") from error
    for command in [wanted] if wanted else (["c++"], ["g++"], ["clang++"]):
        found = shutil.which(command[0])
        if found is not None:
            return [found, *command[1:]]
    if wanted:
        raise CompiledStepError(f"CXX={named} names no program that is there to build the compiled step with")
    raise CompiledStepError("there is no C++ compiler (c++, g++ or clang++) to build the compiled step with")


def _key() -> str:
    """Names what a library is built from: sources, flags and architecture. The compiler is left out, so that an image
    without one finds the library that was built into it."""
    digest = hashlib.sha256(repr((_FLAGS, _LINK, _X86, platform.machine())).encode())
    for path in sorted(_SOURCE.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:24]


def _compile(compiler: list[str], target: Path, progress: Callable[[str], None]) -> None:
    progress("Compiling the step for this machine (once, about ten seconds)")
    is_x86 = platform.machine().lower() in ("x86_64", "amd64")

    def compile_one(source: Path) -> str:
        special = _X86.get(source.name, ()) if is_x86 else ()
        unit = target / f"{source.stem}.o"
        _run([*compiler, *_FLAGS, *special, "-c", str(source), "-o", str(unit)])
        return str(unit)

    with ThreadPoolExecutor() as pool:
        units = list(pool.map(compile_one, sorted(_SOURCE.glob("*.cpp"))))
    _run([*compiler, *_FLAGS, *_LINK, "-o", str(target / LIBRARY), *units])
    if not (target / LIBRARY).is_file():
        raise CompiledStepError(f"{compiler[0]} succeeded and left no library")
    for unit in units:
        Path(unit).unlink(missing_ok=True)


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        raise CompiledStepError(f"{command[0]} could not be run: {error}") from error
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        raise CompiledStepError(f"{command[0]} failed: {lines[0].strip() if lines else done.returncode}")
