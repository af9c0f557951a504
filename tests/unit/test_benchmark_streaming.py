"""The figures of `charonia benchmark streaming`."""

from __future__ import annotations

import io
import itertools
from typing import Any

import pytest
from rich.console import Console

from charonia.bench import records, streaming
from charonia.bench.figures import Trace
from charonia.bench.streaming import Load, Round, beside_in_process, case_records, delays, jobs_of, process_name
from charonia.errors import ModelError


def test_processes_are_known_by_their_command_lines() -> None:
    stub = "/opt/triton_python_backend_stub"
    assert process_name(["/opt/tritonserver", "--model-repository=/x"]) == "Triton"
    assert process_name([stub, "/run/model_repository/postprocessing/1/model.py", "triton_shm"]) == "postprocessing"
    assert process_name(["/venv/bin/python", "-m", "charonia_gateway"]) == "gateway"
    assert process_name(["/venv/bin/python", "-m", "charonia_gateway.worker_main", "7"]) == "gateway"
    assert process_name(["/venv/bin/python", "-m", "charonia", "serve", "x"]) == "launcher"
    assert process_name([]) == "launcher"


def test_a_case_has_two_requests_for_each_stream_and_eight_at_least() -> None:
    assert len(jobs_of(1, "x", 4)) == 8
    assert len(jobs_of(64, "x", 4)) == 128


def _round(cpu_s: float) -> Round:
    names = ("Triton", "preprocessing", "postprocessing", "parsing", "gateway", "launcher", "client")
    whole = dict.fromkeys(names, 0.5)
    streamed = {**whole, "Triton": 0.5 + cpu_s, "gateway": 0.5 + 2 * cpu_s, "launcher": 99.0}
    return Round(
        Load(events=1000, tokens=3000, seconds=2.0, late_ms=[1.0, 3.0]),
        Load(events=10, tokens=3000, seconds=1.0, late_ms=[]),
        2000,
        streamed,
        whole,
        {"ensemble": 0.0, "engine": 1.0, "postprocessing": 4.0},
    )


def test_the_price_of_a_response_is_what_streamed_tokens_cost_more() -> None:
    found = case_records("gateway", 64, [_round(0.1), _round(0.2), _round(0.3)])
    value = {(record.name, record.unit): record.value for record in found}
    assert (value["responses", ""], value["events", ""]) == (2000, 1000) and value["tokens per event", ""] == 3
    assert value["streamed", "tokens/s"] == 1500 and value["whole", "tokens/s"] == 3000
    assert value["Triton", "us/response"] == pytest.approx(100)
    assert value["gateway", "us/response"] == pytest.approx(200)
    assert value["server", "us/response"] == pytest.approx(300)
    assert value["postprocessing", "us/response"] == 0
    assert ("launcher", "us/response") not in value and ("parsing", "us/response") not in value
    assert value["responses/s per core", ""] == pytest.approx(2000 / (2.5 + 0.6))
    assert value["queue of postprocessing", "ms"] == 4
    assert value["late, median", "ms"] == 2
    alone = {record.name for record in case_records("triton", 64, [_round(0.1)])}
    assert "gateway" not in alone and "server" in alone


def test_the_delay_of_an_event_counts_the_shortest_way_of_a_request() -> None:
    # The ways of the requests to the engine take 5 and 2 ms, the fastest events 1 ms, and one event 4 ms.
    slow = Trace(10.0, arrivals=[10.016, 10.026], made_ms=[10.0, 20.0])
    fast = Trace(20.0, arrivals=[20.013, 20.026], made_ms=[10.0, 20.0])
    assert delays([slow, fast, Trace(30.0, arrivals=[30.5])]) == pytest.approx([3, 3, 3, 6])
    assert delays([]) == []


def test_how_late_events_come_is_held_against_the_engine_in_process() -> None:
    def late(ms: list[float]) -> Round:
        return Round(Load(events=100, tokens=300, seconds=2.0, late_ms=ms), None, 100)

    here = case_records("in-process", 64, [late([0.5, 1.5])])
    assert {record.name for record in here} == {
        "responses", "events", "tokens per event", "streamed", "late, median", "late, 99th",
    }  # fmt: skip
    served = [record for streams in (64, 8) for record in case_records("triton", streams, [_round(0.1)])]
    found = beside_in_process([*here, *served])
    times = [(record.name, record.case["streams"], record.value) for record in found if record.unit == "times"]
    assert times == [
        ("late, median, of in process", 64, 2.0),
        ("late, 99th, of in process", 64, pytest.approx(2.98 / 1.49)),
    ]


def test_queues_are_read_once_they_stand_still_and_an_error_where_others_ask_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(streaming, "_SETTLE_S", 0.0)
    served: Any = None  # _queues() alone would ask it
    counts = iter([1, 2, 3, 3, 4])
    monkeypatch.setattr(streaming, "_queues", lambda _: next(counts))
    assert streaming._settled_queues(served) == 3
    monkeypatch.setattr(streaming, "_SETTLE_LIMIT_S", 0.01)
    endless = itertools.count()
    monkeypatch.setattr(streaming, "_queues", lambda _: next(endless))
    with pytest.raises(ModelError, match="do other clients ask this server"):
        streaming._settled_queues(served)


def test_a_price_below_zero_is_shown_as_smaller_than_the_noise_and_written_as_it_is() -> None:
    found = case_records("gateway", 64, [_round(cpu_s) for cpu_s in (-0.012, -0.002, 0.004)])
    [price] = [record for record in found if record.name == "Triton"]
    assert (price.value, price.minimum, price.maximum) == pytest.approx((-1, -6, 2))
    console = Console(file=io.StringIO(), width=80)
    records.print_records(console, found)
    assert isinstance(console.file, io.StringIO)
    text = " ".join(console.file.getvalue().split())
    assert "<6" in text and "<N: a difference of two measurements" in text and "-" not in text.partition("│ Triton")[2]


def test_the_table_of_four_cases_fits_80_columns() -> None:
    some = [record for level in (1, 8, 64, 256) for record in case_records("gateway", level, [_round(0.1)])]
    console = Console(file=io.StringIO(), width=80)
    records.print_records(console, some)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    assert {word for record in some for word in record.name.replace(",", "").split()} <= set(
        text.replace(",", "").split()
    )
    assert "…" not in text
