"""Figures of benchmarks: one kind of record, one file format, one kind of table, for all that measures.

A file is lines of JSON: first {"run": what all its records have in common}, then a record each. Nothing compiled is
needed, and no other package until a table is made: scripts/gpu_check.sh uses this before anything is built.
"""

from __future__ import annotations

import io
import json
import math
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from charonia.errors import InvalidRequestError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


_MOST_COLUMNS = 8
_KEY_OPTION = "--api-key"
_NOISE = (
    "<N: a difference of two measurements that came out below zero, so it is smaller than their noise. No round's was "
    "further from zero than N."
)
_ANY_WIDTH = 100_000  # characters: as much as a table wants


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

    @property
    def is_noise(self) -> bool:
        """A difference that was not above zero: it is smaller than what was measured can tell."""
        return self.difference and self.value < 0

    @property
    def shown(self) -> str:
        """As tables have it. Of noise: <N, where N is the largest distance from zero that was measured."""
        return f"<{number(max(-self.minimum, self.maximum))}" if self.is_noise else number(self.value)

    @property
    def met(self) -> bool | None:
        if self.asked is None:
            return None
        return self.value <= self.asked if self.at_most else self.value >= self.asked


def describe_run(settings: dict[str, Any] | None = None) -> dict[str, Any]:
    """The first line of a file. settings: of what was measured."""
    from charonia.bench import machine

    return {
        "command": ["charonia", *without_keys(sys.argv[1:])],
        "machine": machine.read(),
        "commit": machine.commit(),
        "at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "settings": settings or {},
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
        raise InvalidRequestError(f"{file} cannot be written: {error.strerror}") from error


def read(file: Path) -> tuple[dict[str, Any], list[Record]]:
    """What write() wrote. Raises InvalidRequestError, which names the line, where it is something else."""
    run: dict[str, Any] = {}
    records = []
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise InvalidRequestError(f"{file} cannot be read: {error.strerror}") from error
    for number, line in enumerate(lines, 1):
        try:
            values = json.loads(line)
            if number == 1:
                run = values["run"]
            else:
                records.append(Record(**values))
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidRequestError(
                f"{file}, line {number}: {error}; a file that charonia benchmark --json has written is expected"
            ) from error
    return run, records


@dataclass(frozen=True)
class Grid:
    """What a table shows. keys: the first columns, which say what a line is of."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str | None = None
    keys: int = 1

    def table(self) -> Table:
        return make_table(self.headings, self.rows, title=self.title)

    def split(self, count: int) -> Iterator[Grid]:
        """Grids of at most `count` columns beside the keys."""
        for first in range(self.keys, len(self.headings), count):
            last = first + count
            headings, *rows = ((*line[: self.keys], *line[first:last]) for line in (self.headings, *self.rows))
            yield Grid(headings, rows, self.title, self.keys)


def tables(records: Sequence[Record]) -> list[Table]:
    """One for each benchmark, of any width."""
    return [grid.table() for grid in _grids(records)]


def _grids(records: Sequence[Record]) -> Iterator[Grid]:
    """For each benchmark a line for each case, a column for each name; the other way about for many names."""
    for benchmark in dict.fromkeys(record.benchmark for record in records):
        some = [record for record in records if record.benchmark == benchmark]
        varied = list(dict.fromkeys(name for record in some for name in record.case))
        names = list(dict.fromkeys((record.name, record.unit) for record in some))
        lines: dict[tuple[str, ...], dict[tuple[str, str], str]] = {}
        for record in some:
            case = tuple(str(record.case.get(name, "")) for name in varied)
            lines.setdefault(case, {})[record.name, record.unit] = record.shown
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


def make_table(headings: Sequence[str], rows: Sequence[Sequence[str]], title: str | None = None) -> Table:
    """Columns of numbers are aligned to the right."""
    from rich.table import Column, Table
    from rich.text import Text

    def is_number(place: int) -> bool:
        return all(row[place].lstrip("-<")[:1].isdigit() or row[place] in ("", "-") for row in rows)

    # Where there is little room, rich would cut words sooner than it breaks lines between them.
    columns_of_text = zip(headings, *rows, strict=True)
    widths = [max((len(word) for text in texts for word in text.split()), default=0) for texts in columns_of_text]
    columns = [
        Column(heading, justify="right" if is_number(i) else "left", min_width=width)
        for i, (heading, width) in enumerate(zip(headings, widths, strict=True))
    ]
    table = Table(*columns, title=title)
    for row in rows:
        table.add_row(*map(Text, row))  # as it is, brackets too
    return table


def print_grid(console: Console, grid: Grid) -> None:
    """As one table if the console is wide enough, if not without lines and margins, if not as several tables."""
    from rich import box
    from rich.measure import Measurement

    wide = console.options.update(width=_ANY_WIDTH)

    def too_wide(table: Table) -> bool:
        return Measurement.get(console, wide, table).minimum > console.width

    columns = len(grid.headings) - grid.keys
    found = [grid.table()]
    for number in range(1, columns + 1):
        if not any(map(too_wide, found)):
            break
        found = [part.table() for part in grid.split(math.ceil(columns / number))]
        for table in found:
            table.box, table.padding = box.SIMPLE, (0, 0)
    for table in found:
        console.print(table)


def print_records(console: Console, records: Sequence[Record]) -> None:
    for grid in _grids(records):
        print_grid(console, grid)
    if any(record.is_noise for record in records):
        console.print(_NOISE, markup=False, highlight=False)
    for record in records:
        if record.met is False:
            told = f"{record.name}: {number(record.value)} {record.unit}, asked {number(record.asked or 0)}"
            console.print(told, style="yellow", markup=False, highlight=False)


def markdown_table(table: Table) -> list[str]:
    """The lines of a table in Markdown, without its title."""
    from rich import box
    from rich.console import Console
    from rich.text import Text

    table.box, table.title = box.MARKDOWN, None
    for column in table.columns:
        column.no_wrap = True
        for cell in column.cells:
            if isinstance(cell, Text):
                cell.plain = cell.plain.replace("|", "\\|")
    console = Console(file=io.StringIO(), width=_ANY_WIDTH)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return [line.strip() for line in console.file.getvalue().splitlines() if line.strip()]


def number(value: float) -> str:
    """Four digits, and all of those before the point."""
    if value != value or value in (float("inf"), float("-inf")):
        return "-"
    if float(value).is_integer():
        return f"{value:.0f}"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
