"""What `charonia benchmark workers` makes of what it measured."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from charonia.bench import records
from charonia.bench.streaming import Load
from charonia.bench.workers import Round, case_records


def _round(*worker_s: float, supervisor_s: float = 0.0) -> Round:
    return Round(Load(events=1000, tokens=4000, seconds=2.0, late_ms=[]), worker_s, supervisor_s, 0.5, 0.25)


def test_what_a_gateway_carries_is_bounded_by_its_busiest_worker() -> None:
    found = case_records(2, 64, [_round(0.1, 0.2), _round(0.1, 0.3, supervisor_s=0.01), _round(0.2, 0.3)])
    value = {(record.name, record.unit): record.value for record in found}
    assert {tuple(record.case.items()) for record in found} == {(("workers", 2), ("streams", 64))}
    assert (value["events", ""], value["events", "/s"]) == (1000, 500)
    assert value["gateway", "us/event"] == pytest.approx(410)
    assert value["gateway", "us/token"] == pytest.approx(410 / 4)
    assert value["busiest worker", "%"] == pytest.approx(200 / 3)
    assert value["events of a core each", "/s"] == pytest.approx(1000 / 0.3)
    assert (value["engine", "us/event"], value["client", "us/event"]) == (500, 250)


def test_the_table_fits_80_columns() -> None:
    some = [record for count in (1, 2, 4) for record in case_records(count, 64, [_round(*[0.1234567] * count)])]
    console = Console(file=io.StringIO(), width=80)
    records.print_records(console, some)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert max(map(len, text.splitlines())) <= 80 and "\N{HORIZONTAL ELLIPSIS}" not in text
