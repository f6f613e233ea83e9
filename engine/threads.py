"""How many OpenMP threads the model's kernels use, and what those threads do while they wait.

Both are read by the OpenMP runtime (libgomp, inside torch) when it is loaded, so ``configure`` comes before the first
``import torch``; this module imports nothing but the standard library.

**Threads.** One per physical core this process may use (affinity, CPU quota), less one from four cores on: the event
loop, tokenization and the metrics scrape run on that one. With two or three cores every core is given to the model:
the loop needs a few percent of one, a missing core would cost a third to a half.

**Waiting.** Every layer ends in a barrier, hundreds a step. A waiting thread can spin (libgomp's default for some
milliseconds: wakes at once, burns its core) or sleep (each wake-up costs microseconds). Spinning wins only while every
thread of the team has a core to itself. When anything else wants that core, the spinner holds it for whole scheduler
slices while the thread it waits for is not running: decode steps then take ten times as long, where sleeping threads
lose only the share that the other work takes. So threads sleep unless a core is left over for the rest of the system.
Figures: ``engine/LOG.md``.
"""

from __future__ import annotations

import logging
import math
import os
import sys
from pathlib import Path

from engine.cgroup import cpu_quota

logger = logging.getLogger(__name__)

SPARE_CORE_FROM = 4
_POLICY_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
_TOPOLOGY = Path("/sys/devices/system/cpu")


def configure(num_threads: int | None = None) -> int:
    """Sets thread count and waiting policy in this process's environment; returns the thread count.

    An explicit ``num_threads`` wins, then OMP_NUM_THREADS as the user set it, then the choice above; a policy the user
    set is left alone. If torch is already imported, only the count can still change: that is done and logged.
    Raises ValueError for a count below 1.
    """
    if num_threads is not None and num_threads < 1:
        raise ValueError(f"num_threads must be at least 1, not {num_threads}")
    cores = usable_cores()
    threads = num_threads or _from_environment() or default_threads(cores)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    chosen = next((name for name in _POLICY_VARIABLES if name in os.environ), None)
    sleeps = chosen is None and threads >= cores
    if sleeps:
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(threads)
        if sleeps:
            logger.warning("torch was imported before its threads were configured, so they spin while they wait")
    return threads


def default_threads(cores: int) -> int:
    """Threads for the model on ``cores`` usable cores."""
    return cores - 1 if cores >= SPARE_CORE_FROM else cores


def usable_cores() -> int:
    """Physical cores in this process's CPU affinity, at most its control group's CPU quota rounded down; at least 1.

    Two hardware threads of one core share the units that a matrix product keeps busy, so they count as one.
    """
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    physical = len({_core(cpu) for cpu in cpus})
    quota = cpu_quota()
    return max(1, physical if quota is None else min(physical, math.floor(quota)))


def _core(cpu: int) -> str:
    """A name shared by the hardware threads of one core."""
    try:
        return (_TOPOLOGY / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text().strip()
    except OSError:  # not Linux, or /sys is hidden: count every CPU
        return str(cpu)


def _from_environment() -> int | None:
    """The first level of OMP_NUM_THREADS ("4" or "4,2"), or None."""
    first = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(first) if first.isdigit() and int(first) > 0 else None
