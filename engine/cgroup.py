"""What the control group of this process allows: CPU quota and memory, as a container runtime sets them."""

from __future__ import annotations

from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
SELF = Path("/proc/self/cgroup")
UNLIMITED = 1 << 60  # version 1 writes "no limit" as a huge number of bytes


def cpu_quota() -> float | None:
    """CPUs this process may use on average (2.5 = two and a half), or None without a quota."""
    quotas = [quota for folder in _folders("") if (quota := _quota_v2(folder)) is not None]
    quotas += [quota for folder in _folders("cpu") if (quota := _quota_v1(folder)) is not None]
    return min(quotas, default=None)


def memory_available() -> int | None:
    """Bytes this process may still allocate under its memory limits, page cache counted as free; None without one."""
    left = [room for folder in _folders("") if (room := _room(folder, "memory.max", "memory.current")) is not None]
    left += [
        room
        for folder in _folders("memory")
        if (room := _room(folder, "memory.limit_in_bytes", "memory.usage_in_bytes")) is not None
    ]
    return min(left, default=None)


def _folders(controller: str) -> list[Path]:
    """Folders of our control group and its ancestors; ``controller`` "" is the unified hierarchy of version 2.

    Inside a container the path that /proc names may not exist below the mounted root; the root itself is then ours.
    """
    root = ROOT / controller
    try:
        lines = [line.split(":", 2) for line in SELF.read_text().splitlines()]
    except OSError:  # not Linux, or /proc is hidden
        return []
    own = next((path for _, names, path in lines if controller in names.split(",")), "/").strip("/")
    leaf = root / own
    return [folder for folder in [leaf, *leaf.parents] if folder.is_relative_to(root) and folder.is_dir()]


def _quota_v2(folder: Path) -> float | None:
    text = _read(folder / "cpu.max")
    if text is None or text.startswith("max"):
        return None
    quota, period = text.split()
    return int(quota) / int(period)


def _quota_v1(folder: Path) -> float | None:
    quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
    return None if quota is None or period is None or quota <= 0 else quota / period


def _room(folder: Path, limit_name: str, usage_name: str) -> int | None:
    limit, usage = _number(folder / limit_name), _number(folder / usage_name)
    if limit is None or usage is None or limit >= UNLIMITED:
        return None
    return max(0, limit - usage + _reclaimable(folder))


def _reclaimable(folder: Path) -> int:
    """Page cache that the kernel gives back under pressure: a checkpoint just read counts as used, yet is not."""
    for line in (_read(folder / "memory.stat") or "").splitlines():
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file"):
            return int(value)
    return 0


def _number(path: Path) -> int | None:
    text = _read(path)
    return int(text) if text is not None and text.lstrip("-").isdigit() else None


def _read(path: Path) -> str | None:
    """The file's text, or None where this kernel or hierarchy has no such file."""
    try:
        return path.read_text().strip()
    except OSError:
        return None
