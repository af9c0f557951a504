"""The stage `kernels`: tables of single kernels with shares of this device's limits, before everything end to end."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu_check.build import kernel_benchmark
from gpu_check.commands import run
from gpu_check.context import Context
from gpu_check.records import CRASH, DEVICE, Failure, Outcome, bar
from gpu_check.worker import Session

if TYPE_CHECKING:
    from charonia.bench.records import Record

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
    status = "failed" if failures or not figures["rows"] else "passed"
    return Outcome(status, told, records=int4_bars(figures["rows"]), failures=failures)


_OF_A_LAYER = {"qkv", "o", "gate_up", "down"}


def int4_bars(rows: Iterable[Mapping[str, Any]]) -> list[Record]:
    """Of each number of rows: how many times as fast a layer's GEMMs are with int4 weights and 16-bit activations as
    with bf16, each by its fastest kernel. Only where all of them were measured both ways."""
    best: dict[tuple[int, bool], dict[str, float]] = {}
    for row in rows:
        shape = row["shape"]
        int4 = shape.get("codes") == "int4"
        if shape.get("model") != "llama3-8b" or shape.get("weight") not in _OF_A_LAYER or shape.get("type") != "bf16":
            continue
        if (not int4 and ("codes" in shape or shape.get("out") != "bf16")) or row["kernel"] in _PARTS_OF_A_GEMM:
            continue
        times = best.setdefault((shape["rows"], int4), {})
        times[shape["weight"]] = min(times.get(shape["weight"], row["microseconds"]), row["microseconds"])
    bars = []
    for count in sorted({count for count, _ in best}):
        ours, theirs = (best.get((count, int4), {}) for int4 in (True, False))
        if set(ours) == set(theirs) == _OF_A_LAYER:
            times_as_fast = sum(theirs.values()) / sum(ours.values())
            what = f"GEMMs of a layer of llama3-8b with {count} rows: int4 against bf16"
            bars.append(bar("8", what, times_as_fast, "x", 1 if count <= 256 else None))
    return bars


_PARTS_OF_A_GEMM = {"gemm_gated", "dequantise"}  # with a gate, or without the product


def _failed(why: str) -> Outcome:
    return Outcome("failed", why.splitlines()[0], failures=[Failure("kernels", why, CRASH)])
