"""Figures of benchmarks: one kind of record, one file format, one kind of table, for all that measures.

A file is lines of JSON: first {"run": what all its records have in common}, then a record each. describe_run() makes
the run, and scripts/gpu_check.sh adds its stages to it. report.py shows a whole file. Nothing compiled is needed, and
no other package until something is printed: scripts/gpu_check.sh uses this before anything is built.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from charonia.errors import InvalidRequestError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


BAR = "bar"
_MOST_COLUMNS = 8
_KEY_OPTION = "--api-key"
_NOISE = (
    "<N: a difference of two measurements that came out below zero, so it is smaller than their noise. No round's was "
    "further from zero than N."
)
_ANY_WIDTH = 100_000  # characters: as much as a table wants
# What a line of a file may hold: of a run, where it is there, and of a record.
_RUN_KINDS: dict[str, Any] = {
    "command": list, "machine": dict, "settings": dict, "notes": list, "stages": dict,
}  # fmt: skip
_RECORD_KINDS: dict[str, Any] = {
    "benchmark": str, "name": str, "unit": str, "value": (int, float), "minimum": (int, float), "maximum": (int, float),
    "case": dict, "asked": (int, float, type(None)), "details": dict,
}  # fmt: skip


@dataclass(frozen=True)
class Record:
    """One figure: the median of `repeats` measurements, the smallest and the largest of them.

    benchmark: what measured it: "static", "scheduler". unit: of value, minimum, maximum and asked; "" for counts. case:
    what varies between the lines of a table, by the heading of its column: {"batch": 8}. asked: what value should
    reach, or with at_most not exceed; None: nothing. details: what belongs to it and is in no table, anything JSON has.
    difference: it is one measurement less another, and below zero where it is smaller than their noise.
    """

    benchmark: str
    name: str
    unit: str
    value: float
    minimum: float
    maximum: float
    repeats: int = 1
    case: dict[str, Any] = field(default_factory=dict)
    asked: float | None = None
    at_most: bool = False
    details: dict[str, Any] = field(default_factory=dict)
    difference: bool = False

    @classmethod
    def of(cls, benchmark: str, name: str, unit: str, values: float | Sequence[float], **more: Any) -> Record:
        """values: all measurements, at least one. more: case, asked, at_most, details,
        difference."""
        several = list(values) if isinstance(values, Sequence) else [values]
        least, greatest = float(min(several)), float(max(several))
        return cls(benchmark, name, unit, float(statistics.median(several)), least, greatest, len(several), **more)

    @classmethod
    def from_json(cls, values: Any) -> Record:
        """Raises TypeError where they are none of a record."""
        record = cls(**values)
        _check_kinds(vars(record), _RECORD_KINDS)
        return record

    @property
    def is_noise(self) -> bool:
        """A difference that was not above zero: it is smaller than what was measured can tell."""
        return self.difference and self.value < 0

    @property
    def shown(self) -> str:
        """As tables have it. Of noise: <N, where N is the largest distance from zero that was measured."""
        return f"<{number(max(-self.minimum, self.maximum))}" if self.is_noise else number(self.value)

    @property
    def with_range(self) -> str:
        """shown, and where it was measured several times the smallest and the largest."""
        if self.is_noise or self.minimum == self.maximum:
            return self.shown
        return f"{self.shown} ({number(self.minimum)} to {number(self.maximum)})"

    @property
    def met(self) -> bool | None:
        if self.asked is None:
            return None
        return self.value <= self.asked if self.at_most else self.value >= self.asked

    @property
    def verdict(self) -> str:
        return {None: "", True: "met", False: "NOT MET"}[self.met]

    @property
    def is_bar(self) -> bool:
        """In the table of bars alone, whether or not anything is asked. Its benchmark is "bar 6.1", "bar peers"."""
        return self.benchmark.startswith(f"{BAR} ")

    @property
    def bar(self) -> str:
        """What the table of bars calls its benchmark."""
        return self.benchmark.removeprefix(f"{BAR} ")


def describe_run(settings: Mapping[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """The first line of a file. settings: of what was measured. more, for the report: title; notes, paragraphs of text
    above the tables; rehearsal, of which no figure says anything."""
    from charonia.bench import machine

    return {
        "command": ["charonia", *without_keys(sys.argv[1:])],
        "machine": machine.read(),
        "commit": machine.commit(),
        "at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "settings": settings or {},
        **more,
    }


def without_keys(arguments: Sequence[str]) -> list[str]:
    """The arguments of a command line, with *** in place of API keys: files of figures are shown to others."""
    shown = []
    for before, argument in zip(["", *arguments], arguments, strict=False):
        if before == _KEY_OPTION:
            shown.append("***")
        elif argument.startswith(f"{_KEY_OPTION}="):
            shown.append(f"{_KEY_OPTION}=***")
        else:
            shown.append(argument)
    return shown


def write(file: Path | None, run: dict[str, Any], records: Iterable[Record]) -> None:
    """Writes a benchmark's file, if the user asked for one; replaces it as a whole."""
    if file is None:
        return
    lines = [{"run": run}, *(asdict(record) for record in records)]
    part = file.with_name(f"{file.name}.part")
    try:
        part.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        part.replace(file)
    except OSError as error:
        with suppress(OSError):
            part.unlink()
        raise InvalidRequestError(f"{file} cannot be written: {error.strerror}") from error


def read(file: Path) -> tuple[dict[str, Any], list[Record]]:
    """What write() wrote. Raises InvalidRequestError, which names the line, where it is something else."""
    expected = "a file is expected that charonia benchmark --json or scripts/gpu_check.sh has written"
    try:
        first, *others = file.read_text(encoding="utf-8").splitlines() or [""]
    except OSError as error:
        raise InvalidRequestError(f"{file} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"{file}: {error}; {expected}") from error
    records: list[Record] = []
    line = 1
    try:
        run = _run_of(json.loads(first))
        for text in others:
            line += 1
            records.append(Record.from_json(json.loads(text)))
    except (ValueError, TypeError) as error:
        raise InvalidRequestError(f"{file}, line {line}: {error}; {expected}") from error
    return run, records


def _run_of(line: Any) -> dict[str, Any]:
    run = line.get("run") if isinstance(line, dict) else None
    if not isinstance(run, dict):
        raise TypeError('there is no object "run"')
    _check_kinds(run, _RUN_KINDS)
    _check_kinds(run.get("stages", {}), dict.fromkeys(run.get("stages", {}), dict))
    return run


def _check_kinds(values: Mapping[str, Any], kinds: Mapping[str, Any]) -> None:
    for name, kind in kinds.items():
        if name in values and not isinstance(values[name], kind):
            raise TypeError(f'"{name}" is {json.dumps(values[name])[:80]}')


@dataclass(frozen=True)
class Grid:
    """What a table shows. keys: the first columns, which say what a line is of. words: headings of columns that are
    aligned to the left whatever is in them, such as hashes and dates."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str | None = None
    keys: int = 1
    words: Sequence[str] = ()

    def is_number(self, column: int) -> bool:
        """Whether it is aligned to the right."""
        if self.headings[column] in self.words:
            return False
        return all(row[column].lstrip("-<")[:1].isdigit() or row[column] in ("", "-") for row in self.rows)

    def widths(self, spare: int = 0) -> list[int]:
        """Of each column: that of its longest word, and what it gets of the `spare` characters, at most its longest
        text. Where there is little room, rich itself would cut words sooner than it breaks lines between them."""
        columns = list(zip(self.headings, *self.rows, strict=True))
        found = [max((len(word) for text in texts for word in text.split()), default=0) for texts in columns]
        wanted = [max(map(len, texts)) for texts in columns]
        while spare > 0 and found != wanted:
            found[max(range(len(found)), key=lambda i: wanted[i] - found[i])] += 1
            spare -= 1
        return found

    def table(self) -> Table:
        from rich.table import Column, Table
        from rich.text import Text

        columns = [
            Column(heading, justify="right" if self.is_number(i) else "left", min_width=width)
            for i, (heading, width) in enumerate(zip(self.headings, self.widths(), strict=True))
        ]
        table = Table(*columns, title=self.title)
        for row in self.rows:
            table.add_row(*map(Text, row))  # as it is, brackets too
        return table

    def markdown(self) -> list[str]:
        """Its lines, without the title."""
        lines = [[" ".join(cell.replace("|", "\\|").split()) for cell in row] for row in (self.headings, *self.rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        sides = [">" if self.is_number(column) else "<" for column in range(len(widths))]
        head, *others = (
            " | ".join(f"{cell:{side}{width}}" for cell, side, width in zip(line, sides, widths, strict=True))
            for line in lines
        )
        rule = "|".join(
            "-" * (width + 1) + (":" if side == ">" else "-") for side, width in zip(sides, widths, strict=True)
        )
        return [f"| {head} |", f"|{rule}|", *(f"| {line} |" for line in others)]

    def split(self, count: int) -> Iterator[Grid]:
        """Grids of at most `count` columns beside the keys."""
        for first in range(self.keys, len(self.headings), count):
            last = first + count
            headings, *rows = ((*line[: self.keys], *line[first:last]) for line in (self.headings, *self.rows))
            yield Grid(headings, rows, self.title, self.keys, self.words)


def grids(records: Sequence[Record], *, ranges: bool = False) -> Iterator[Grid]:
    """For each benchmark a line for each case, a column for each name; the other way about for many names. Bars are in
    bar_grids(). ranges: with the smallest and the largest of several measurements."""
    figures = [record for record in records if not record.is_bar]
    for benchmark in dict.fromkeys(record.benchmark for record in figures):
        some = [record for record in figures if record.benchmark == benchmark]
        varied = list(dict.fromkeys(name for record in some for name in record.case))
        names = list(dict.fromkeys((record.name, record.unit) for record in some))
        lines: dict[tuple[str, ...], dict[tuple[str, str], str]] = {}
        for record in some:
            case = tuple(str(record.case.get(name, "")) for name in varied)
            lines.setdefault(case, {})[record.name, record.unit] = record.with_range if ranges else record.shown
        headings = [f"{name}, {unit}" if unit else name for name, unit in names]
        if len(names) <= _MOST_COLUMNS:
            rows = [(*case, *(line.get(name, "-") for name in names)) for case, line in lines.items()]
            yield Grid((*varied, *headings), rows, benchmark, len(varied))
        else:
            columns = (", ".join(varied), *(" ".join(case) for case in lines))
            rows = [
                (heading, *(line.get(name, "-") for line in lines.values()))
                for name, heading in zip(names, headings, strict=True)
            ]
            yield Grid(columns, rows, benchmark)


def bars(records: Iterable[Record]) -> list[Record]:
    """Those of which something is asked, and the other figures of bars; by benchmark."""
    return sorted(
        (record for record in records if record.is_bar or record.asked is not None), key=lambda record: record.benchmark
    )


def bar_grids(records: Iterable[Record], *, rehearsal: bool = False, ranges: bool = False) -> Iterator[Grid]:
    """One line for each bar, if there is any. rehearsal: none is called met or not. ranges: as in grids()."""
    found = bars(records)
    if not found:
        return
    varied = list(dict.fromkeys(name for record in found for name in record.case))
    rows = [
        (
            record.bar, *(str(record.case.get(name, "")) for name in varied), record.name,
            _asked(record), f"{record.with_range if ranges else record.shown} {record.unit}".strip(),
            "" if rehearsal else record.verdict,
        )
        for record in found
    ]  # fmt: skip
    yield Grid(("bar", *varied, "what", "asked", "measured", ""), rows, "Bars", 2 + len(varied))


def _asked(record: Record) -> str:
    if record.asked is None:
        return ""
    return f"{'at most ' if record.at_most else ''}{number(record.asked)} {record.unit}".strip()


def print_grid(console: Console, grid: Grid) -> None:
    """As one table if the console is wide enough, if not without lines and margins, if not as several tables."""
    from rich import box
    from rich.measure import Measurement

    wide = console.options.update(width=_ANY_WIDTH)

    def too_wide(table: Table) -> bool:
        return Measurement.get(console, wide, table).minimum > console.width

    columns = len(grid.headings) - grid.keys
    parts, found = [grid], [grid.table()]
    for number in range(1, columns + 1):
        if not any(map(too_wide, found)):
            break
        parts = list(grid.split(math.ceil(columns / number)))
        found = [part.table() for part in parts]
        for table in found:
            table.box, table.padding = box.SIMPLE, (0, 0)
    for part, table in zip(parts, found, strict=True):
        spare = console.width - Measurement.get(console, wide, table).minimum
        for column, width in zip(table.columns, part.widths(spare), strict=True):
            column.min_width = column.max_width = width
        console.print(table)


def print_records(console: Console, records: Sequence[Record], *, rehearsal: bool = False) -> None:
    for grid in (*grids(records), *bar_grids(records, rehearsal=rehearsal)):
        print_grid(console, grid)
    for note in noise_notes(records):
        console.print(note, markup=False, highlight=False)


def noise_notes(records: Iterable[Record]) -> list[str]:
    """What <N means, where there is one."""
    return [_NOISE] if any(record.is_noise for record in records) else []


def number(value: float) -> str:
    """Four digits, and all of those before the point."""
    if value != value or value in (float("inf"), float("-inf")):
        return "-"
    if float(value).is_integer():
        return f"{value:.0f}"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
