"""A whole file of records as text: what was run and where, its tables, bars and stages. On a terminal or in Markdown.

scripts/gpu_check.sh uses this too, so nothing compiled is needed, and for Markdown no other package.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from charonia.bench.records import Grid, Record, bar_grids, grids, noise_notes, print_grid

if TYPE_CHECKING:
    from rich.console import Console

_KERNELS = "kernels"  # the benchmark whose records have tables of their own
_REHEARSAL = "A rehearsal: the models are tiny, so the figures say nothing."


def print_report(
    console: Console, run: Mapping[str, Any], records: Sequence[Record], title: str, *, ranges: bool = False
) -> None:
    """title: of a run without one, which may be none. ranges: as grids() takes them."""
    if title := run.get("title") or title:
        console.print(title, style="bold", markup=False, highlight=False)
    for text in (_origin(run), *_paragraphs(run, records)):
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    for grid in _all_grids(run, records, ranges):
        print_grid(console, grid)
    for where, text in _failures(run, records):
        console.print(f"{where}: {text}", style="red", markup=False, highlight=False, soft_wrap=True)


def markdown(run: Mapping[str, Any], records: Sequence[Record], title: str, *, ranges: bool = False) -> str:
    """As a page."""
    lines = [f"# {run.get('title') or title}", "", _origin(run, "`")]
    for text in _paragraphs(run, records):
        lines += ["", text]
    for grid in _all_grids(run, records, ranges):
        lines += ["", f"## {grid.title}", "", *grid.markdown()]
    if failures := _failures(run, records):
        lines += ["", "## Failures", ""]
        lines += [f"- {where}\n\n      " + text.replace("\n", "\n      ") for where, text in failures]
    return "\n".join(lines) + "\n"


def _origin(run: Mapping[str, Any], quote: str = "") -> str:
    """The command, the commit and the time."""
    command = shlex.join(map(str, run.get("command", ())))
    parts = (command and f"{quote}{command}{quote}", f"commit {run.get('commit') or 'unknown'}", run.get("at"))
    return ", ".join(part for part in parts if part)


def _paragraphs(run: Mapping[str, Any], records: Sequence[Record]) -> list[str]:
    return [
        *([machine] if (machine := _machine(run.get("machine", {}))) else []),
        *([_REHEARSAL] if run.get("rehearsal") else []),
        *map(str, run.get("notes", ())),
        *noise_notes(records),
    ]


def _machine(facts: Mapping[str, Any]) -> str:
    """One line of what charonia.bench.machine says; what is not there is left out."""
    python = str(facts.get("python", "")).partition(" ")[0]
    gpu = ("gpu", "gpu_memory", "driver", "nvcc") if facts.get("gpu") else ()
    kinds = (
        [_FACTS.get(name, "{}").format(facts[name]) for name in gpu if facts.get(name)],
        [_FACTS.get(name, "{}").format(facts[name]) for name in _PROCESSOR if facts.get(name)],
        [f"{name} {version}" for name, version in {"Python": python, **_object(facts, "packages")}.items() if version],
    )
    told = "; ".join(", ".join(kind) for kind in kinds if kind)
    return f"{told}." if told else ""


_PROCESSOR = ("processor", "processors", "instructions", "memory_gb", "load")
_FACTS = {
    "driver": "driver {}",
    "nvcc": "CUDA {}",
    "processors": "{} processors",
    "memory_gb": "{} GB",
    "load": "load {}",
}


def _all_grids(run: Mapping[str, Any], records: Sequence[Record], ranges: bool) -> Iterator[Grid]:
    from charonia.bench.kernels import is_row, kernel_grids

    kinds: dict[bool, list[Record]] = {False: [], True: []}
    for record in records:
        kinds[record.benchmark == _KERNELS and is_row(record.details)].append(record)
    yield from grids(kinds[False], ranges=ranges)
    yield from kernel_grids([record.details for record in kinds[True]])
    yield from bar_grids(records, rehearsal=bool(run.get("rehearsal")), ranges=ranges)
    if stages := run.get("stages"):
        headings = ("stage", "", "seconds", "what", "sources", "at (UTC)")
        lines = [
            (
                name, str(one.get("status", "")), _seconds(one.get("seconds")),
                *(str(one.get(what, "")) for what in ("summary", "sources", "at")),
            )
            for name, one in stages.items()
        ]  # fmt: skip
        yield Grid(headings, lines, "Stages", words=headings[-2:])


def _seconds(value: Any) -> str:
    return f"{value:.0f}" if isinstance(value, (int, float)) else ""


def _failures(run: Mapping[str, Any], records: Sequence[Record]) -> list[tuple[str, str]]:
    """Where, and what: of stages, faults of a soak, errors of the kernels' program and of requests."""
    settings = run.get("settings", {})
    of_stages = [failure for stage in run.get("stages", {}).values() for failure in _list(stage, "failures")]
    texts = [(record.benchmark, str(text)) for record in records for text in _list(record.details, "texts")]
    return [
        *((str(one.get("where")), str(one.get("text"))) for one in of_stages if isinstance(one, dict)),
        *(("fault", str(fault)) for fault in _list(settings, "faults")),
        *(("error", json.dumps(error)) for error in _list(settings, "errors")),
        *dict.fromkeys(texts),
    ]


def _list(values: Mapping[str, Any], name: str) -> list[Any]:
    """None where it is something else: files may have been written by hand."""
    return found if isinstance(found := values.get(name), list) else []


def _object(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    return found if isinstance(found := values.get(name), dict) else {}
