"""The stage `kernels`: tables of single kernels with shares of this device's limits, before everything end to end."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from gpu_check.build import kernel_benchmark
from gpu_check.commands import run
from gpu_check.context import Context
from gpu_check.records import CRASH, DEVICE, Failure, Outcome
from gpu_check.worker import Session

KERNELS = "kernels.jsonl"
_LIMIT_S, _SUITE_S = 190, 60  # the stage's own is longer, so that these end it


def kernels(context: Context, session: Session, size: str) -> Outcome:
    from charonia.bench.kernels import read

    binary, table = kernel_benchmark(context), context.work / KERNELS
    if not binary.is_file():
        return _failed(f"{binary.name} was not built, see the stage build")
    table.unlink(missing_ok=True)
    command: list[str | Path] = [
        sys.executable, "-m", "charonia", "benchmark", "kernels", binary, "--json", table, "--limit", str(_SUITE_S),
        *(["--size", "tiny"] if context.rehearse else []),
    ]  # fmt: skip
    done = run(command, context.logs / "kernels.log", limit_s=_LIMIT_S, env=context.environment())
    # What was measured before it ended otherwise is kept.
    figures = read(table) if table.is_file() else {"rows": [], "errors": []}
    failures = [Failure("kernels", json.dumps(each), DEVICE) for each in figures["errors"]]
    if done.code != 0 and not failures:
        failures = [Failure("kernels", f"{done.how}\n{done.text[-1500:]}", CRASH)]
    told = f"{len(figures['rows'])} rows in {table.name}" + (f", {len(failures)} errors" if failures else "")
    return Outcome("failed" if failures or not figures["rows"] else "passed", told, failures=failures)


def _failed(why: str) -> Outcome:
    return Outcome("failed", why.splitlines()[0], failures=[Failure("kernels", why, CRASH)])
