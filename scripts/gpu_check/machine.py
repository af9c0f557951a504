"""The stage `machine`: what it is, and what it lacks."""

from __future__ import annotations

import importlib.util
import sysconfig
from pathlib import Path

from charonia.bench.machine import read
from gpu_check.context import Context, find_tool
from gpu_check.packages import MODULES
from gpu_check.records import DEVICE, Failure, Outcome


def run(context: Context, session: object, size: str) -> Outcome:
    facts = read()
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
