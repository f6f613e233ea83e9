import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine import cgroup, threads

REPOSITORY = Path(__file__).parents[2]
POLICY = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def configured(cores: int, count: int | None = None, **environment: str) -> list[str]:
    """OMP_NUM_THREADS and OMP_WAIT_POLICY after ``configure(count)`` in a fresh process on ``cores`` cores."""
    program = (
        "import os, sys; from engine import threads\n"
        f"threads.usable_cores = lambda: {cores}\n"
        f"assert str(threads.configure({count})) == os.environ['OMP_NUM_THREADS']\n"
        "assert 'torch' not in sys.modules\n"
        "print(os.environ['OMP_NUM_THREADS'], os.environ.get('OMP_WAIT_POLICY'))"
    )
    clean = {name: value for name, value in os.environ.items() if name not in POLICY}
    return subprocess.run(
        [sys.executable, "-c", program],
        env=clean | environment,
        cwd=REPOSITORY,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()


@pytest.mark.parametrize(
    ("cores", "expected"),
    [(1, ["1", "PASSIVE"]), (2, ["2", "PASSIVE"]), (3, ["3", "PASSIVE"]), (4, ["3", "None"]), (16, ["15", "None"])],
)
def test_threads_sleep_unless_a_core_is_spare(cores: int, expected: list[str]) -> None:
    assert configured(cores) == expected


def test_what_the_user_set_is_kept() -> None:
    assert configured(8, OMP_NUM_THREADS="2,1") == ["2", "None"]
    assert configured(8, OMP_NUM_THREADS="8") == ["8", "PASSIVE"]
    assert configured(2, OMP_WAIT_POLICY="ACTIVE") == ["2", "ACTIVE"]
    assert configured(2, GOMP_SPINCOUNT="1000") == ["2", "None"]


def test_an_explicit_count_wins() -> None:
    assert configured(8, 4, OMP_NUM_THREADS="2") == ["4", "None"]
    assert configured(2, 4) == ["4", "PASSIVE"]


def test_a_count_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        threads.configure(0)


def test_after_torch_only_the_count_changes_and_it_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import torch

    before = torch.get_num_threads()
    for name in POLICY:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(threads, "usable_cores", lambda: 1)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    try:
        assert threads.configure() == 1
        assert torch.get_num_threads() == 1
        assert "before its threads were configured" in caplog.text
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("quota", "expected"), [(None, 2), (0.5, 1), (1.5, 1), (8.0, 2)])
def test_usable_cores(monkeypatch: pytest.MonkeyPatch, quota: float | None, expected: int) -> None:
    monkeypatch.setattr(threads, "cpu_quota", lambda: quota)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)
    monkeypatch.setattr(threads, "_core", lambda cpu: str(cpu % 2))  # two cores of two hardware threads
    assert threads.usable_cores() == expected


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_cgroup_version_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroup, "ROOT", tmp_path)
    monkeypatch.setattr(cgroup, "SELF", tmp_path / "self")
    write(tmp_path / "self", "0::/pod/app\n")
    write(tmp_path / "pod/cpu.max", "150000 100000\n")
    write(tmp_path / "pod/app/cpu.max", "max 100000\n")
    write(tmp_path / "pod/memory.max", "max\n")
    write(tmp_path / "pod/memory.current", "5\n")
    write(tmp_path / "pod/app/memory.max", "1000\n")
    write(tmp_path / "pod/app/memory.current", "700\n")
    write(tmp_path / "pod/app/memory.stat", "anon 500\ninactive_file 200\n")
    assert cgroup.cpu_quota() == 1.5
    assert cgroup.memory_available() == 500


def test_cgroup_version_1_seen_from_inside_a_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroup, "ROOT", tmp_path)
    monkeypatch.setattr(cgroup, "SELF", tmp_path / "self")
    write(tmp_path / "self", "4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n0::/\n")
    write(tmp_path / "cpu/cpu.cfs_quota_us", "250000\n")
    write(tmp_path / "cpu/cpu.cfs_period_us", "100000\n")
    write(tmp_path / "memory/memory.limit_in_bytes", "4000\n")
    write(tmp_path / "memory/memory.usage_in_bytes", "1000\n")
    assert cgroup.cpu_quota() == 2.5
    assert cgroup.memory_available() == 3000
    write(tmp_path / "memory/memory.limit_in_bytes", "9223372036854771712\n")
    write(tmp_path / "cpu/cpu.cfs_quota_us", "-1\n")
    assert cgroup.cpu_quota() is None
    assert cgroup.memory_available() is None
