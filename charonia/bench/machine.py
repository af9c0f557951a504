"""The machine and the commit, for the files of figures."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[2]
_PACKAGES = ("torch", "transformers", "nvidia-cublas", "nvidia-pytriton")
_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16")  # they decide which kernels run


def read() -> dict[str, Any]:
    lines = (line.partition(":") for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines())
    values = {name.strip(): value.strip() for name, _, value in lines}
    flags = set(values.get("flags", "").split())
    found = {
        "gpu": gpu_of("name,driver_version,memory.total"),
        "processor": values.get("model name") or platform.machine(),
        "processors": os.cpu_count(),
        "instructions": " ".join(name for name in _FLAGS if name in flags),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9),
        "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
    }
    for package in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def gpu_of(fields: str) -> str:
    """Ask nvidia-smi for fields of the first GPU. Returns an empty text if there is none."""
    lines = _output(["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]).splitlines()
    return lines[0].strip() if lines else ""


def commit() -> str:
    """The commit of the checkout, with + if files differ from it; "unknown" outside a checkout."""
    if not (_ROOT / ".git").exists():
        return "unknown"
    head = _output(["git", "-C", str(_ROOT), "rev-parse", "--short=12", "HEAD"]).strip()
    changed = _output(["git", "-C", str(_ROOT), "status", "--porcelain"]).strip()
    return f"{head}{'+' if changed else ''}" if head else "unknown"


def _output(command: list[str]) -> str:
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
        return done.stdout if done.returncode == 0 else ""
    return ""
