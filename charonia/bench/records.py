"""The figures of benchmarks: one type of record, one JSON file format and one type of table for all benchmarks.

The file is an object {"run": {...}, "records": [...]}. `run` has the command, the machine, the commit, the time and the
settings. This module does not need the compiled engine.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from charonia.bench import machine
from charonia.errors import InvalidRequestError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_KEY_OPTION = "--api-key"


@dataclass(frozen=True)
class Record:
    """One figure: the median, the smallest and the largest of `repeats` measurements.

    benchmark: name of the benchmark. unit: "" for counts. case: the values that differ between the lines of a table, by
    column heading: {"batch": 8}. asked: the required value, a minimum, or with `at_most` a maximum. details: data that
    no table shows.
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

    @classmethod
    def of(cls, benchmark: str, name: str, unit: str, values: float | Sequence[float], **more: Any) -> Record:
        """values: one measurement or several. more: case, asked, at_most, details."""
        several = list(values) if isinstance(values, Sequence) else [values]
        least, greatest = float(min(several)), float(max(several))
        return cls(benchmark, name, unit, float(statistics.median(several)), least, greatest, len(several), **more)

    @property
    def met(self) -> bool | None:
        """Whether the value meets the requirement; None if there is none."""
        if self.asked is None:
            return None
        return self.value <= self.asked if self.at_most else self.value >= self.asked

    @property
    def heading(self) -> str:
        return f"{self.name}, {self.unit}" if self.unit else self.name

    @property
    def subject(self) -> str:
        """The name of the figure in words: "gemm qkv 2560 x 1536, w4a16, 1 row"."""
        return f"{self.benchmark} {', '.join(_words(*one) for one in self.case.items() if one[1] != '')}".rstrip()


def _words(name: str, value: Any) -> str:
    """A value of a case: a text alone, a number with its name."""
    if isinstance(value, str):
        return value
    if name.endswith("s"):  # a count: rows, sequences
        return f"{value} {name[:-1] if value == 1 else name}"
    return f"{name} {value}"


def describe_run(settings: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Describe this run for a file. API keys of the command line are replaced by ***."""
    return {
        "command": ["charonia", *_without_keys(sys.argv[1:])],
        "machine": machine.read(),
        "commit": machine.commit(),
        "at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "settings": dict(settings or {}),
    }


def _without_keys(arguments: Sequence[str]) -> list[str]:
    shown = []
    for before, argument in zip(["", *arguments], arguments, strict=False):
        if argument.startswith(f"{_KEY_OPTION}="):
            argument = f"{_KEY_OPTION}=***"
        shown.append("***" if before == _KEY_OPTION else argument)
    return shown


def check_writable(file: Path | None) -> Path | None:
    """Return `file`. Raises InvalidRequestError if it cannot be written; commands check this before they measure."""
    if file is not None and (file.is_dir() or not os.access(file.parent, os.W_OK | os.X_OK)):
        raise InvalidRequestError(f"{file} cannot be written: name a file in a folder that exists and is writable")
    return file


def write(file: Path | None, run: Mapping[str, Any], records: Iterable[Record | str]) -> None:
    """Write a benchmark's file, if there is one to write. run: see describe_run(). records: may be in JSON already. An
    earlier file is replaced as a whole."""
    if file is None:
        return
    lines = ",\n".join(one if isinstance(one, str) else json.dumps(asdict(one)) for one in records)
    replace(file, f'{{"run": {json.dumps(run, indent=1)},\n"records": [\n{lines}\n]}}\n')


def replace(file: Path, text: str) -> None:
    """Write a file as a whole: a crash leaves the earlier one. Only ordinary files are replaced."""
    part = file.with_name(f"{file.name}.part") if file.is_file() or not file.exists() else file
    part.write_text(text, encoding="utf-8")
    if part != file:
        part.replace(file)


def keep(file: Path | None, settings: Mapping[str, Any], records: Iterable[Record]) -> Iterator[list[Record]]:
    """Yield the records so far after each of them, and write the file, so that an error or a crash loses none of those
    before it. A record replaces an earlier record with the same name and case."""
    run = describe_run(settings) if file else {}
    found: dict[str, Record] = {}
    lines: dict[str, str] = {}
    write(file, run, [])
    for record in records:
        key = repr((record.benchmark, record.name, record.unit, record.case))
        found[key], lines[key] = record, json.dumps(asdict(record))
        write(file, run, lines.values())
        report_progress(f"{record.subject}: {record.heading} {number(record.value)}")
        yield list(found.values())


def report_progress(text: str) -> None:
    """Print a line on standard error if it is a log, which shows no progress bars."""
    if not sys.stderr.isatty():
        print(text, file=sys.stderr, flush=True)


def read(file: Path) -> tuple[dict[str, Any], list[Record]]:
    """Read a file of write(): the run and the records."""
    whole = json.loads(file.read_text(encoding="utf-8"))
    return whole["run"], [Record(**values) for values in whole["records"]]


def tables(records: Sequence[Record]) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """Yield (benchmark, headings, rows) for each benchmark: a row for each case, and a column for each name."""
    for benchmark in dict.fromkeys(record.benchmark for record in records):
        some = [record for record in records if record.benchmark == benchmark]
        varied = list(dict.fromkeys(name for record in some for name in record.case))
        names = list(dict.fromkeys(record.heading for record in some))
        lines: dict[tuple[str, ...], dict[str, str]] = {}
        for record in some:
            case = tuple(str(record.case.get(name, "")) for name in varied)
            lines.setdefault(case, {})[record.heading] = number(record.value)
        rows = [[*case, *(line.get(name, "-") for name in names)] for case, line in lines.items()]
        yield benchmark, [*varied, *names], rows


def print_records(console: Console, records: Sequence[Record]) -> None:
    """Print the tables. A table that is too wide for the console has a row for each figure instead."""
    for benchmark, headings, rows in tables(records):
        if sum(width + 3 for width in _longest_words(headings, rows)) >= console.width:
            some = [record for record in records if record.benchmark == benchmark]
            varied = list(dict.fromkeys(name for record in some for name in record.case))
            headings = [*varied, "figure", "value"]
            rows = [
                [*(str(record.case.get(name, "")) for name in varied), record.heading, number(record.value)]
                for record in some
            ]
        console.print(_rich_table(benchmark, headings, rows))


def _longest_words(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[int]:
    """The length of the longest word of each column. With this width no word is cut."""
    return [
        max(len(word) for text in column for word in text.split() or [""])
        for column in zip(headings, *rows, strict=True)
    ]


def _rich_table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title)
    for index, (heading, width) in enumerate(zip(headings, _longest_words(headings, rows), strict=True)):
        numeric = all(row[index].lstrip("-")[:1].isdigit() or row[index] == "-" for row in rows)
        table.add_column(heading, justify="right" if numeric else "left", min_width=width)
    for row in rows:
        table.add_row(*map(Text, row))  # Text: brackets are not markup
    return table


def number(value: float) -> str:
    """Format a number with four significant digits, or with all digits before the point."""
    return f"{value:.0f}" if abs(value) >= 1000 or float(value).is_integer() else f"{value:.4g}"
