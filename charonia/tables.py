"""Tables in the output of commands, for people and for pipes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

_MAX_WIDTH = 10_000


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print to standard output, without limiting the width: a pipe has 80 columns, and a truncated name or id is
    useless. Brackets are not markup."""
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column)
    for row in rows:
        table.add_row(*map(Text, row))
    console = Console(soft_wrap=True)
    width = Measurement.get(console, console.options.update(max_width=_MAX_WIDTH), table).maximum
    console.width = max(console.width, width)
    console.print(table)
