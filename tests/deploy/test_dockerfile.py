"""The Dockerfile: clean for hadolint, and what a platform expects of an image."""

from __future__ import annotations

import json
import re
import subprocess
import sysconfig
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "Dockerfile").read_text()
HADOLINT = Path(sysconfig.get_path("scripts")) / "hadolint"


def instructions(name: str) -> list[str]:
    """Arguments of an instruction, continuation lines joined."""
    joined = re.sub(r"\\\n", " ", "\n".join(line for line in TEXT.splitlines() if not line.startswith("#")))
    return re.findall(rf"^{name}\s+(.*)$", joined, re.MULTILINE)


def lint(text: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([HADOLINT, "-"], input=text, capture_output=True, text=True, timeout=60)


def test_hadolint_finds_nothing() -> None:
    result = lint(TEXT)
    assert result.returncode == 0, result.stdout


def test_hadolint_is_awake() -> None:
    assert lint(TEXT.replace("USER 10001:10001", "RUN cd /tmp && sudo ls")).returncode != 0


def test_it_ends_as_an_unprivileged_user_with_exec_forms() -> None:
    assert instructions("USER")[-1] == "10001:10001"
    for name in ("ENTRYPOINT", "CMD"):
        assert all(json.loads(argument) for argument in instructions(name))
    assert json.loads(instructions("ENTRYPOINT")[-1]) == ["headlong"]
    assert '"0.0.0.0"' in instructions("CMD")[-1]
    assert json.loads(instructions("HEALTHCHECK")[-1].split("CMD", 1)[1])
    assert instructions("STOPSIGNAL") == ["SIGTERM"]


def test_the_builds_differ_by_arguments() -> None:
    named = {argument.split("=")[0] for argument in instructions("ARG")}
    assert {"BASE_IMAGE", "TORCH", "PIP_ARGS", "MODEL_PACKAGE"} <= named
    assert not re.search(r":latest\b", TEXT)


def test_makefile_and_image_agree_on_versions() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for name in ("TORCH", "MODEL_PACKAGE"):
        (wanted,) = re.findall(rf"^{name} \?= (.*)$", makefile, re.MULTILINE)
        assert f'{name}="{wanted}"' in instructions("ARG")


def test_everything_that_is_installed_is_copied() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = project["tool"]["setuptools"]["packages"]["find"]["include"]
    copied = " ".join(instructions("COPY"))
    kept = (ROOT / ".dockerignore").read_text().splitlines()
    for package in (*packages, "configs"):
        name = package.rstrip("*")
        assert f"{name} ./{name}" in copied
        assert f"!{name}" in kept
