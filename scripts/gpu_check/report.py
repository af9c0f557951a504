"""The report on the terminal, whose end is what matters most, and the table beside the results file."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from gpu_check.plan import BUDGET_S, CALLS, STAGES
from gpu_check.records import Bar, Results
from gpu_check.runner import Skip

_FAILURES = 6
_FAILURE_LINES = 14
# Bar 2: transformers at batch 32, of which we want five times the rate.
_PEER_TIMES = 5.0


def bars_of(results: Results) -> list[tuple[str, Bar]]:
    """All figures with their stages, in the order of the bars, and the one that follows from two stages."""
    found = [(name, bar) for name, record in results.records.items() for bar in record.outcome.bars]
    table = results.records.get("bench2")
    rates = (
        {row["batch"]: row["total_output_tokens_per_s"] for row in table.outcome.figures.get("rows", [])}
        if table
        else {}
    )
    for name in ("peer", "peer-compiled", "peer-llama"):
        peer = results.records.get(name)
        if peer and peer.outcome.status == "passed" and peer.outcome.figures["batch"] in rates:
            figures = peer.outcome.figures
            times = rates[figures["batch"]] / figures["output_tokens_per_s"]
            what = f"Llama-2-7B, batch {figures['batch']}: times {figures['what']}"
            found.append((name, Bar("2", what, times, "times", _PEER_TIMES if name == "peer" else None)))
    return sorted(found, key=lambda entry: entry[1].number)


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
    lines = ["| call | stage | | seconds |", "|---|---|---|---:|"]
    for call, names in CALLS.items():
        known = [(name, results.records[name]) for name in names if name in results.records]
        lines += [f"| {call} | {name} | {record.outcome.status} | {record.seconds:.0f} |" for name, record in known]
        counted = sum(record.seconds for name, record in known if name != "build" or results.machine.get("gpu"))
        lines.append(f"| {call} | in all, of {BUDGET_S} | | {counted:.0f} |")
    return lines


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
        lines += [f"{_verdict(results, bar):8} {bar.number:4} {bar.what[:100]}: {_value(bar)}" for _, bar in bars]
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
    machine = results.machine
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
        "| bar | what | asked | measured | |",
        "|---|---|---:|---:|---|",
    ]
    for _, bar in bars_of(results):
        asked = "" if bar.asked is None else f"{bar.asked:g} {bar.unit}"
        lines.append(f"| {bar.number} | {bar.what} | {asked} | {_value(bar)} | {_verdict(results, bar)} |")
    for name, record in results.records.items():
        rows = record.outcome.figures.get("rows")
        if rows:
            lines += ["", f"## {name}", "", *_limits(record.outcome.figures), *_table(rows)]
    lines += ["", "## Stages", "", "| stage | | seconds | what | sources | at (UTC) |", "|---|---|---:|---|---|---|"]
    for stage in STAGES:
        found = results.records.get(stage.name)
        if found:
            summary = found.outcome.summary.replace("|", "\\|")
            cells = (stage.name, found.outcome.status, f"{found.seconds:.0f}", summary, found.sources, found.at)
            lines.append(f"| {' | '.join(cells)} |")
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


def _table(rows: list[dict[str, float | None]]) -> list[str]:
    lines = [
        "| batch | in | out | prefill, tokens/s | of GEMMs | decode, tokens/s | in all, tokens/s | weights, of the "
        "bandwidth | with KV |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        shares = [_percent(row[key]) for key in ("gemm_share", "bandwidth_share", "bandwidth_share_with_kv")]
        lines.append(
            f"| {row['batch']} | {row['prompt_tokens']} | {row['output_tokens']} | {row['prefill_tokens_per_s']:.0f} | "
            f"{shares[0]} | {row['decode_tokens_per_s']:.1f} | {row['total_output_tokens_per_s']:.1f} | {shares[1]} | "
            f"{shares[2]} |"
        )
    return lines


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f} %"


def _value(bar: Bar) -> str:
    return f"{bar.measured:.0f} {bar.unit}" if abs(bar.measured) >= 1000 else f"{bar.measured:.3g} {bar.unit}"


def _verdict(results: Results, bar: Bar) -> str:
    """Figures of a rehearsal say nothing."""
    return {None: "", True: "met", False: "NOT MET"}[bar.met if results.machine.get("gpu") else None]
