"""The report on the terminal, whose end is what matters most, and the page beside the results file."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from charonia.bench import report
from charonia.bench.records import Grid, bars, number
from gpu_check.plan import BUDGET_S, CALLS, STAGES
from gpu_check.records import Results
from gpu_check.runner import Skip

_FAILURES = 6
_FAILURE_LINES = 14


def next_command(results: Results, skips: Sequence[Skip], options: Sequence[str]) -> str:
    """What to run next: what did not fit into the budget; else the first call of which something was never tried."""
    command = ["scripts/gpu_check.sh", *options]
    late = [skip.stage.name for skip in skips if "budget" in skip.why]
    if late:
        return shlex.join([*command, *late])
    build = results.records.get("build")
    for call, names in CALLS.items():
        if not set(names) <= results.records.keys():
            mended = "when the build is mended: " if build and build.outcome.status == "failed" else ""
            return mended + shlex.join([*command, call])
    again = [name for name, record in results.records.items() if record.outcome.status == "failed"]
    return f"when what failed is mended: {shlex.join([*command, *again])}" if again else "nothing: all calls are done"


def calls_table(results: Results) -> list[str]:
    """Seconds of the stages by calls. Compiling counts only where it is done in the call."""
    rows = []
    for call, names in CALLS.items():
        known = [(name, results.records[name]) for name in names if name in results.records]
        rows += [(call, name, stage.outcome.status, f"{stage.seconds:.0f}") for name, stage in known]
        counted = sum(stage.seconds for name, stage in known if name != "build" or results.machine.get("gpu"))
        rows.append((call, f"in all, of {BUDGET_S}", "", f"{counted:.0f}"))
    return Grid(("call", "stage", "", "seconds"), rows).markdown()


def terminal(results: Results, skips: Sequence[Skip], file: Path, options: Sequence[str] = ()) -> str:
    lines = ["", "== stages"]
    for stage in STAGES:
        record = results.records.get(stage.name)
        if record:
            lines.append(
                f"{stage.name:14} {record.outcome.status:8} {record.seconds:5.0f} s  {record.outcome.summary[:200]}"
            )
    if skips:
        lines += ["", "== left out", *(f"{skip.stage.name:14} {skip.why}" for skip in skips)]
    if found := bars(results.all_records()):
        gpu = results.machine.get("gpu")
        lines += ["", "== figures"]
        lines += [
            f"{one.verdict if gpu else '':8} {one.bar:4} {one.name[:100]}: {number(one.value)} {one.unit}"
            for one in found
        ]
    lines += ["", f"results: {file}", f"next: {next_command(results, skips, options)}", ""]
    failures = sorted(
        (failure for record in results.records.values() for failure in record.outcome.failures),
        key=lambda failure: -failure.weight,
    )
    if failures:
        lines.append(
            f"== {len(failures)} failures; the {min(len(failures), _FAILURES)} most telling, the most telling last"
        )
        for failure in reversed(failures[:_FAILURES]):
            told = "\n".join(f"    {line[:220]}" for line in failure.text.splitlines()[:_FAILURE_LINES])
            lines.append(f"-- {failure.where}\n{told}")
    return "\n".join(lines)


def markdown(results: Results) -> str:
    """The results file as a page."""
    lines = ["## Calls", ""]
    if not results.machine.get("gpu"):
        lines += ["A rehearsal's seconds; what it compiles is brought along elsewhere and is not counted.", ""]
    lines += calls_table(results)
    return report.markdown(results.run(), results.all_records(), results.file.stem) + "\n" + "\n".join(lines) + "\n"
