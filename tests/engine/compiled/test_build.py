"""Building the library: once, with whatever compiler there is, and one sentence where it cannot be done."""

from __future__ import annotations

import ctypes
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from compiled_models import library

from engine.compiled import build
from engine.compiled.build import CompiledStepError, build_library, find_compiler

# The package engine.loading without its contents: they import torch, which takes seconds and is not needed here.
IN_ANOTHER_PROCESS = """
import importlib.util, sys, types
from pathlib import Path
package = sys.modules["engine.loading"] = types.ModuleType("engine.loading")
package.__path__ = list(importlib.util.find_spec("engine").submodule_search_locations)
package.__path__[0] += "/loading"
from engine.compiled import build
assert "torch" not in sys.modules
build._SOURCE = Path(sys.argv[1])
print(build.build_library(lambda line: None))
"""


class Workshop:
    """A cache of its own, a source that is quick to compile, and a compiler that writes down when it runs."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.source = folder / "source"
        self.source.mkdir()
        for name in ("one", "two"):
            (self.source / f"{name}.cpp").write_text(f'extern "C" int headlong_{name}() {{ return 42; }}\n')
        self.log = folder / "log"
        self.compiler = folder / "compiler"
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        monkeypatch.setattr(build, "_SOURCE", self.source)
        try:
            self.real = find_compiler()[0]
        except CompiledStepError as error:
            pytest.skip(str(error))
        self.compile_with(f'exec {self.real} "$@"', monkeypatch)

    def compile_with(self, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.compiler.write_text(f'#!/bin/sh\necho "$@" >> {self.log}\n{command}\n')
        self.compiler.chmod(0o755)
        monkeypatch.setenv("CXX", str(self.compiler))

    @property
    def runs(self) -> int:
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workshop:
    library()  # a machine that cannot compile at all is skipped
    return Workshop(tmp_path, monkeypatch)


def test_it_is_compiled_once(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    path = build_library(lines.append)
    assert ctypes.CDLL(str(path)).headlong_two() == 42
    assert workshop.runs == 3  # two units and the link
    assert len(lines) == 1
    assert "Compiling the step" in lines[0]
    assert [one.name for one in path.parent.iterdir() if one.suffix == ".o"] == []
    # From now on without a compiler: that is how an image serves what was built into it.
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "")
    assert build_library(lines.append) == path
    assert (workshop.runs, len(lines)) == (3, 1)


def test_another_source_is_another_library(workshop: Workshop) -> None:
    first = build_library(lambda _: None)
    (workshop.source / "one.cpp").write_text('extern "C" int headlong_one() { return 43; }\n')
    second = build_library(lambda _: None)
    assert first != second
    assert ctypes.CDLL(str(second)).headlong_one() == 43


def test_a_library_that_was_cut_is_built_anew(workshop: Workshop) -> None:
    path = build_library(lambda _: None)
    path.write_bytes(path.read_bytes()[:100])
    assert build_library(lambda _: None) == path
    assert workshop.runs == 6
    assert ctypes.CDLL(str(path)).headlong_one() == 42


def test_two_processes_at_once_build_one_library(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    workshop.compile_with(f'sleep 0.3; exec {workshop.real} "$@"', monkeypatch)
    command = [sys.executable, "-c", IN_ANOTHER_PROCESS, str(workshop.source)]
    processes = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=os.getcwd())
        for _ in range(2)
    ]
    found = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], found
    assert found[0][0] == found[1][0]
    assert ctypes.CDLL(found[0][0].strip()).headlong_one() == 42
    assert workshop.runs == 3


FAILING = {
    "exit 3": "compiler failed: 3",
    "echo 'one.cpp:1:1: error: no such thing' >&2; exit 1": "compiler failed: one.cpp:1:1: error: no such thing",
    "echo 'warning: dull' >&2; echo 'fatal error: no cstdlib' >&2; exit 1": "compiler failed: fatal error: no cstdlib",
    "true": "compiler succeeded and left no library",
}


@pytest.mark.parametrize("command", FAILING)
def test_a_compiler_that_fails_is_said(workshop: Workshop, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    workshop.compile_with(command, monkeypatch)
    for _ in range(2):  # nothing half-done is kept
        with pytest.raises(CompiledStepError, match=FAILING[command]) as raised:
            build_library(lambda _: None)
        assert "\n" not in str(raised.value)
    workshop.compile_with(f'exec {workshop.real} "$@"', monkeypatch)
    assert build_library(lambda _: None).is_file()


@pytest.mark.parametrize(
    ("named", "sentence"),
    [
        ("", r"there is no C\+\+ compiler \(c\+\+, g\+\+ or clang\+\+\)"),
        ("/nowhere/c++ -O2", r"CXX=/nowhere/c\+\+ -O2 names no program"),
        ("'c++", "CXX='c.. is not a command: No closing quotation"),
    ],
)
def test_no_compiler_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str, sentence: str) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CXX", named)
    with pytest.raises(CompiledStepError, match=sentence):
        build_library(lambda _: None)


def test_a_compiler_that_cannot_be_started_is_said(workshop: Workshop) -> None:
    workshop.compiler.write_bytes(b"\x7fELF no program")
    with pytest.raises(CompiledStepError, match="compiler could not be run"):
        build_library(lambda _: None)


def test_cxx_may_carry_arguments(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", f"{workshop.compiler} -DANSWER=42")
    (workshop.source / "one.cpp").write_text('extern "C" int headlong_one() { return ANSWER; }\n')
    assert ctypes.CDLL(str(build_library(lambda _: None))).headlong_one() == 42


def test_a_cache_that_is_no_folder_is_said(workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(CompiledStepError, match="is not a folder; set XDG_CACHE_HOME"):
        build_library(lambda _: None)


def test_the_command_builds_it_or_says_why_not(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runpy.run_module("engine.compiled", run_name="__main__")
    assert capsys.readouterr().out.endswith(f"the compiled step is ready in {build_library(lambda _: None)}\n")
    (workshop.source / "one.cpp").write_text("nonsense\n")
    with pytest.raises(SystemExit, match=r"headlong: .*compiler failed: .*error"):
        runpy.run_module("engine.compiled", run_name="__main__")
