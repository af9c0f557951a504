"""The Python tests whose device is a setting: parity with transformers, the engine's API, reproducible results."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpu_check.commands import run
from gpu_check.context import HOST, ROOT, Context
from gpu_check.records import ASSERTION, CRASH, DEVICE, Failure, Outcome

_DEVICE_ERROR = re.compile(r"cuda|cublas|nccl|illegal memory|out of memory", re.IGNORECASE)
_TEST_S = 60
# Of a rehearsal, on the emulated device, which is slow: tests/gpu, and four ranks on one device.
_REHEARSED = "test_gpu or (four_ranks and 2-qwen2)"


def parity(context: Context, session: object, size: str) -> Outcome:
    """fp32 against transformers, 16 bits against its distance from fp32; then what only a GPU shows."""
    chosen = ["-k", _REHEARSED] if context.architecture == HOST else []
    tests = [ROOT / "tests" / "parity", ROOT / "tests" / "gpu"]
    return _pytest(context, "parity", [*tests, *chosen], limit_s=170, CHARONIA_DEVICE="cuda")


def engine(context: Context) -> Outcome:
    tests = [ROOT / "tests" / "unit" / name for name in ("test_engine_api.py", "test_reproducible.py")]
    return _pytest(context, "engine_api", tests, limit_s=80, CHARONIA_REPRODUCIBLE="true")


def _pytest(context: Context, name: str, tests: Sequence[str | Path], *, limit_s: float, **variables: str) -> Outcome:
    lines = context.logs / f"{name}.jsonl"
    lines.parent.mkdir(parents=True, exist_ok=True)
    lines.unlink(missing_ok=True)
    # A test that hangs in the engine gives no signal handler a chance: its worker ends, and another one goes on.
    command: list[str | Path] = [
        sys.executable, "-m", "pytest", "-q", "-c", ROOT / "pyproject.toml", "--tb=short",
        "-p", "no:cacheprovider", "-p", "gpu_check.pytest_lines",
        "-n", str(min(context.jobs, 8)), f"--timeout={_TEST_S}", "--timeout-method=thread", *tests,
    ]  # fmt: skip
    # Models here are tiny and of many shapes: measuring GEMMs would be most of the time. Workers share the memory.
    variables |= {"CHARONIA_CUDA_MEASURE_S": "0.3", "CHARONIA_CACHE_MAX_ENTRY_COUNT": "0.05"}
    # Measured by processes that share the device: no engine that is measured itself may find such times.
    variables["CHARONIA_CACHE_DIR"] = str(context.work / "cache_of_tests")
    variables["GPU_CHECK_LINES"] = str(lines)
    done = run(command, context.logs / f"{name}.log", limit_s=limit_s, env=context.environment() | variables)
    outcomes: dict[str, list[str]] = {"passed": [], "skipped": [], "failed": []}
    failures = []
    for line in lines.read_text(encoding="utf-8").splitlines() if lines.is_file() else ():
        report = json.loads(line)
        outcomes[report["outcome"]].append(report["test"])
        if report["outcome"] == "failed":
            failures.append(_failure(report["test"], report["text"]))
    slow = done.code is None and context.rehearse  # rather than hung: every test has a time limit of its own
    if done.code != 0 and not slow and (done.code is None or not failures):
        failures.append(Failure(name, f"pytest {done.how}\n{done.text[-1000:]}", CRASH))
    figures: dict[str, Any] = {name: len(tests) for name, tests in outcomes.items()}
    told = f"{figures['passed']} tests passed" + (f", {figures['skipped']} skipped" if figures["skipped"] else "")
    if slow:
        figures["no_time_for"] = [f"the rest of {name}"]
        told += f"; no time for the rest of {name}"
    if failures or not figures["passed"]:
        return Outcome("failed", f"{len(failures)} failed, {told}", figures, failures=failures)
    return Outcome("passed", told, figures)


def _failure(where: str, text: str) -> Failure:
    lines = text.splitlines()
    telling = [line for line in lines if line.startswith(("E ", ">"))] or lines
    short = "\n".join(line[:240] for line in telling[:10])
    return Failure(where, short, DEVICE if _DEVICE_ERROR.search(short) else ASSERTION)
