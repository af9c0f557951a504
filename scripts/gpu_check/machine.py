"""What the machine is: written into the results beside every figure."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import re
import subprocess
import sys
import sysconfig
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from gpu_check.context import Context, find_tool
from gpu_check.packages import MODULES
from gpu_check.records import DEVICE, Failure, Outcome

_PACKAGES = ("torch", "transformers", "tokenizers", "numpy", "nvidia-cublas", "nvidia-nccl-cu13", "nvidia-pytriton")


def run(context: Context, session: object, size: str) -> Outcome:
    facts = read(context)
    gpu = facts["gpu"] or "no GPU"
    python = facts["python"].partition(" ")[0]
    summary = (
        f"{gpu}, driver {facts['driver'] or 'none'}, nvcc {facts['nvcc']}, {facts['processors']} processors, "
        f"Python {python}"
    )
    if lacking := _lacking(context):
        summary += f"; not here: {', '.join(lacking)}"
    if not context.rehearse and not facts["gpu"]:
        told = "nvidia-smi shows no GPU; a machine without one can --rehearse"
        return Outcome("failed", f"{told}; {summary}", failures=[Failure("machine", told, DEVICE)])
    return Outcome("passed", summary)


def _lacking(context: Context) -> list[str]:
    """What stages use and this machine has not, beside what was brought along; they say what follows from it."""
    tools = ("cmake", "ninja", *(() if context.rehearse else ("nvcc", "compute-sanitizer")))
    found = [tool for tool in tools if find_tool(tool) is None]
    found += [name for name in MODULES if importlib.util.find_spec(name) is None]
    return found + ([] if (Path(sysconfig.get_path("include")) / "Python.h").is_file() else ["Python.h"])


def read(context: Context) -> dict[str, Any]:
    gpu, driver, memory, capability = gpu_of() or ("", "", "", "")
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
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
        "processor": models[0] if models else platform.machine(),
        "processors": os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9),
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
