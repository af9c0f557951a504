"""The stage `kernels`: tables of single kernels with shares of this device's limits, before everything end to end."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path

from gpu_check.build import kernel_benchmark
from gpu_check.commands import run
from gpu_check.context import ROOT, Context
from gpu_check.records import CRASH, DEVICE, Failure, Outcome
from gpu_check.worker import Session

_LIMIT_S, _SUITE_S = 190, 60  # the stage's own is longer, so that these end it


def kernels(context: Context, session: Session, size: str) -> Outcome:
    binary, table = kernel_benchmark(context), context.work / "kernels.json"
    if importlib.util.find_spec("gpu_check.kernels") is None:
        return _failed("scripts/gpu_check/kernels.py is missing")
    if not binary.is_file():
        return _failed(f"{binary.name} was not built, see the stage build")
    table.unlink(missing_ok=True)
    env = context.environment()
    env["PYTHONPATH"] += os.pathsep + str(ROOT)
    command: list[str | Path] = [
        sys.executable, "-m", "scripts.gpu_check.kernels", "--binary", binary, "--out", table, "--limit", str(_SUITE_S),
        *(["--tiny"] if context.rehearse else []),
    ]  # fmt: skip
    done = run(command, context.logs / "kernels.log", limit_s=_LIMIT_S, env=env)
    # What was measured before it ended otherwise is kept.
    figures = json.loads(table.read_text(encoding="utf-8")) if table.is_file() else {"rows": [], "errors": []}
    failures = [Failure("kernels", json.dumps(each), DEVICE) for each in figures["errors"]]
    if done.code != 0 and not failures:
        failures = [Failure("kernels", f"{done.how}\n{done.text[-1500:]}", CRASH)]
    told = f"{len(figures['rows'])} rows in {table.name}" + (f", {len(failures)} errors" if failures else "")
    return Outcome("failed" if failures or not figures["rows"] else "passed", told, failures=failures)


def _failed(why: str) -> Outcome:
    return Outcome("failed", why.splitlines()[0], failures=[Failure("kernels", why, CRASH)])
