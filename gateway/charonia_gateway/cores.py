"""How many worker processes a gateway has unless it is told."""

from __future__ import annotations

import math
import os
from pathlib import Path

CORES_PER_WORKER = 4  # the others are Triton's and its Python models', which do more for each response
MAX_WORKERS = 8
_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # of a container


def cores(quota: Path = _QUOTA) -> float:
    """Processors that this process may use, of a container those of its quota (cgroup v2)."""
    found: float = len(os.sched_getaffinity(0))
    try:
        limit, period = quota.read_text().split()
        if limit != "max":
            found = min(found, int(limit) / int(period))
    except (OSError, ValueError, ZeroDivisionError):  # no cgroup v2
        pass
    return found


def default_workers(count: float | None = None) -> int:
    """One for every four cores, at least one and at most eight. count: of cores; default: those of this machine."""
    return max(1, min(MAX_WORKERS, math.floor((cores() if count is None else count) / CORES_PER_WORKER)))
