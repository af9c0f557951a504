"""What the machine is: written beside every figure."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import subprocess
import sys
import sysconfig
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[2]
_PACKAGES = ("torch", "transformers", "tokenizers", "numpy", "nvidia-cublas", "nvidia-nccl-cu13", "nvidia-pytriton")
# Instructions that decide which kernels run on a CPU.
_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16")


def read() -> dict[str, Any]:
    gpu, driver, memory, capability = gpu_of() or ("", "", "", "")
    lines = (line.partition(":") for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines())
    values = {name.strip(): value.strip() for name, _, value in lines}
    flags = set(values.get("flags", "").split())
    include = Path(sysconfig.get_path("include"))
    return {
        "gpu": gpu,
        "gpu_memory": memory,
        "compute_capability": capability,
        "driver": driver,
        "nvcc": _first_match(["nvcc", "--version"], r"release ([\d.]+)"),
        "cmake": _first_match(["cmake", "--version"], r"version ([\d.]+)"),
        "compiler": _first_match(["c++", "--version"], r"(.*)"),
        "compute_sanitizer": _first_match(["compute-sanitizer", "--version"], r"Version ([\d.]+)"),
        "processor": values.get("model name") or platform.machine(),
        "processors": os.cpu_count(),
        "instructions": " ".join(name for name in _FLAGS if name in flags),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9),
        "load": round(os.getloadavg()[0], 1),
        "kernel": platform.release(),
        "libc": " ".join(platform.libc_ver()),
        "python": f"{platform.python_version()} ({sys.executable})",
        "python_headers": (include / "Python.h").is_file(),
        "packages": {name: found for name in _PACKAGES if (found := _version(name))},
    }


def gpu_of() -> tuple[str, str, str, str] | None:
    """Name, driver, memory and compute capability ("9.0") of the first GPU; None without one."""
    fields = "name,driver_version,memory.total,compute_cap"
    line = _output(["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]).splitlines()
    parts = [part.strip() for part in line[0].split(",")] if line else []
    return (parts[0], parts[1], parts[2], parts[3]) if len(parts) == 4 else None


def commit(*paths: str) -> str:
    """The commit of the checkout, with + where these paths of it (all without one) differ; "unknown" outside of one."""
    if not (_ROOT / ".git").exists():
        return "unknown"
    head = _output(["git", "-C", str(_ROOT), "rev-parse", "--short=12", "HEAD"]).strip()
    changed = _output(["git", "-C", str(_ROOT), "status", "--porcelain", "--", *paths])
    return f"{head}{'+' if changed.strip() else ''}" if head else "unknown"


def _output(command: list[str]) -> str:
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
        return done.stdout if done.returncode == 0 else ""
    return ""


def _first_match(command: list[str], pattern: str) -> str:
    found = re.search(pattern, _output(command))
    return found.group(1).strip() if found else "none"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
