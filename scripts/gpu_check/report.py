"""The report on the terminal, whose end is what matters most, and the table beside the results file."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from charonia.bench.records import Record, make_table, markdown_table, number, tables
from gpu_check.plan import BUDGET_S, CALLS, STAGES
from gpu_check.records import Results, bar, bar_number
from gpu_check.runner import Skip
from gpu_check.speed import TABLE_RATE

_FAILURES = 6
_FAILURE_LINES = 14
# Bar 2: transformers at batch 32, of which we want five times the rate.
_PEER_TIMES = 5.0


def bars_of(results: Results) -> list[Record]:
    """All figures of bars, in their order, and those that follow from two stages."""
    found = [record for stage in results.records.values() for record in stage.outcome.records if bar_number(record)]
    table = results.records.get("bench2")
    rates = {
        record.case["batch"]: record.value
        for record in (table.outcome.records if table else ())
        if record.name == TABLE_RATE
    }
    for name in ("peer", "peer-compiled", "peer-llama"):
        peer = results.records.get(name)
        if peer and peer.outcome.status == "passed" and peer.outcome.figures["batch"] in rates:
            figures = peer.outcome.figures
            times = rates[figures["batch"]] / figures["output_tokens_per_s"]
            what = f"Llama-2-7B, batch {figures['batch']}: times {figures['what']}"
            found.append(bar("2", what, times, "times", _PEER_TIMES if name == "peer" else None))
    return sorted(found, key=bar_number)


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
    return markdown_table(make_table(("call", "stage", "", "seconds"), rows))


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
    bars = bars_of(results)
    if bars:
        lines += ["", "== figures"]
        lines += [
            f"{_verdict(results, one):8} {bar_number(one):4} {one.name[:100]}: {number(one.value)} {one.unit}"
            for one in bars
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
    machine, bars = results.machine, bars_of(results)
    packages = ", ".join(f"{name} {version}" for name, version in machine.get("packages", {}).items())
    lines = [
        f"# {machine.get('gpu') or 'Rehearsal without a GPU'}",
        "",
        f"*Written by `scripts/gpu_check.sh` from the JSON file beside it. Commit {results.commit}.*",
        "",
        f"{machine.get('gpu_memory') or 'no GPU memory'}, driver {machine.get('driver') or 'none'}, CUDA "
        f"{machine.get('nvcc')}; {machine.get('processor')}, {machine.get('processors')} processors; Python "
        f"{str(machine.get('python', '')).partition(' ')[0]}, {packages}.",
        "",
        *markdown_table(make_table(("bar", "what", "asked", "measured", ""), [_bar_row(results, one) for one in bars])),
    ]
    for name, stage in results.records.items():
        figures = [record for record in stage.outcome.records if not bar_number(record)]
        for table in tables(figures):
            lines += ["", f"## {name}", "", *_limits(stage.outcome.figures), *markdown_table(table)]
    rows = [
        (stage.name, found.outcome.status, f"{found.seconds:.0f}", found.outcome.summary, found.sources, found.at)
        for stage in STAGES
        if (found := results.records.get(stage.name))
    ]
    headings = ("stage", "", "seconds", "what", "sources", "at (UTC)")
    lines += ["", "## Stages", "", *markdown_table(make_table(headings, rows))]
    lines += ["", "## Calls", ""]
    if not machine.get("gpu"):
        lines += ["A rehearsal's seconds; what it compiles is brought along elsewhere and is not counted.", ""]
    lines += calls_table(results)
    failures = [failure for record in results.records.values() for failure in record.outcome.failures]
    if failures:
        lines += ["", "## Failures", ""]
        lines += [f"- {failure.where}\n\n      " + failure.text.replace("\n", "\n      ") for failure in failures]
    return "\n".join(lines) + "\n"


def _limits(figures: dict[str, object]) -> list[str]:
    parts = []
    bandwidth, gemm = figures.get("bandwidth"), figures.get("gemm_flops")
    if isinstance(bandwidth, float):
        parts.append(f"bandwidth {bandwidth / 1e9:.0f} GB/s")
    if isinstance(gemm, float):
        parts.append(f"bf16 GEMM {gemm / 1e12:.0f} TFLOP/s")
    return [f"Measured in the same run: {', '.join(parts)}.", ""] if parts else []


def _bar_row(results: Results, one: Record) -> tuple[str, ...]:
    asked = "" if one.asked is None else f"{number(one.asked)} {one.unit}"
    return bar_number(one), one.name, asked, f"{number(one.value)} {one.unit}", _verdict(results, one)


def _verdict(results: Results, one: Record) -> str:
    """Figures of a rehearsal say nothing."""
    return {None: "", True: "met", False: "NOT MET"}[one.met if results.machine.get("gpu") else None]
