"""The figures of `charonia benchmark streaming`."""

from __future__ import annotations

import io
import itertools
import json
from typing import Any

import httpx
import pytest
from rich.console import Console

from charonia import _engine
from charonia.bench import records, streaming, targets
from charonia.bench.compare import compare_records
from charonia.bench.figures import Figures, Trace
from charonia.bench.streaming import Load, Round, beside_in_process, case_records, delays, jobs_of, process_name
from charonia.bench.workload import Job
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
    assert len(jobs_of(1, Job("x", 4))) == 8
    assert jobs_of(64, Job("x", 4, logprobs=1)) == [Job("x", 4, logprobs=1)] * 128


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
    assert value["server", "us/token"] == pytest.approx(200)
    assert value["streamed, of whole", "%"] == 50
    assert value["postprocessing", "us/response"] == 0
    assert ("launcher", "us/response") not in value and ("parsing", "us/response") not in value
    assert value["responses/s per core", ""] == pytest.approx(2000 / (2.5 + 0.6))
    assert value["queue of postprocessing", "ms"] == 4
    assert value["late, median", "ms"] == 2
    alone = {record.name for record in case_records("triton", 64, [_round(0.1)])}
    assert "gateway" not in alone and "server" in alone


@pytest.mark.parametrize(
    ("target", "streams", "asked"),
    [
        ("gateway-subscribed", 64, {"server us/response": "at most 80", "streamed, of whole %": "80"}),
        ("gateway-subscribed", 256, {"server us/response": "at most 80", "streamed, of whole %": "80"}),
        ("triton", 64, {"server us/response": "at most 350", "queue of postprocessing ms": "at most 20"}),
        *((target, 8, {}) for target in ("gateway-subscribed", "triton", "gateway")),
        *((target, 64, {}) for target in ("gateway", "triton-subscribed")),
    ],
)
def test_what_is_asked_is_in_the_figures(target: str, streams: int, asked: dict[str, str]) -> None:
    found = case_records(target, streams, [_round(0.1), _round(0.2)])
    assert {
        f"{record.name} {record.unit}": f"{'at most ' * record.at_most}{record.asked:g}"
        for record in found
        if record.asked is not None
    } == asked
    scored = case_records(target, streams, [_round(0.1), _round(0.2)], logprobs=1)
    assert not any(record.asked for record in scored), "it is asked of answers without log probabilities"
    assert [(record.name, record.value) for record in scored] == [(record.name, record.value) for record in found]


@pytest.mark.parametrize("logprobs", [None, 0, 2])
async def test_log_probabilities_are_asked_of_the_gateway(logprobs: int | None) -> None:
    bodies: list[dict[str, Any]] = []

    async def answer(request: httpx.Request) -> httpx.Response:
        bodies.append(json.loads(await request.aread()))
        usage = {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 0}}
        return httpx.Response(200, json={"usage": usage})

    async with httpx.AsyncClient(base_url="http://some", transport=httpx.MockTransport(answer)) as client:
        await targets.Gateway(client, "model", stream=False).run(Job("x", 2, logprobs=logprobs), Trace(0.0))
    assert bodies[0].get("logprobs") == logprobs and ("logprobs" in bodies[0]) == (logprobs is not None)


async def test_some_streams_of_the_gateway_say_when_their_events_were_made() -> None:
    async def answer(request: httpx.Request) -> httpx.Response:
        body = json.loads(await request.aread())
        timed = body.get("timings_per_token")
        events: list[dict[str, Any]] = [
            {"choices": [{"text": "a"}], **({"timings": {"total_ms": ms}} if timed else {})} for ms in (2.5, 4.0)
        ]
        usage = {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 0}}
        events.append({"choices": [], "usage": usage, **({"timings": {"total_ms": 4.0}} if timed else {})})
        return httpx.Response(200, text="".join(f"data: {json.dumps(event)}\n\n" for event in events))

    async with httpx.AsyncClient(base_url="http://some", transport=httpx.MockTransport(answer)) as client:
        target = targets.Gateway(client, "model")
        traces = [Trace(0.0) for _ in range(9)]
        for trace in traces:
            await target.run(Job("x", 2), trace)
    assert [trace.made_ms for trace in traces] == [[2.5, 4.0], *[[]] * 7, [2.5, 4.0]]
    assert {len(trace.arrivals) for trace in traces} == {2}


def test_in_process_streams_may_have_responses_as_often_as_subscribed_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CHARONIA_STREAM_INTERVAL_PER_STREAM_MS", raising=False)
    name = "stream_interval_per_stream_ms"
    default = next(float(entry.default_value) for entry in _engine.config_fields() if entry.key == name)
    assert streaming._as_subscribed({"threads": 2}) == {"threads": 2, name: pytest.approx(default / 5)}
    monkeypatch.setenv("CHARONIA_STREAM_INTERVAL_PER_STREAM_MS", "3")
    assert streaming._as_subscribed({})[name] == pytest.approx(0.6)
    assert streaming._as_subscribed({name: 0})[name] == 0


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
    here_oftener = case_records("in-process-subscribed", 64, [late([0.25])])
    assert {record.name for record in here} == {
        "responses", "events", "tokens per event", "streamed", "late, median", "late, 99th",
    }  # fmt: skip
    served = [record for streams in (64, 8) for record in case_records("triton", streams, [_round(0.1)])]
    subscribed = case_records("gateway-subscribed", 64, [_round(0.1)])
    found = beside_in_process([*here, *here_oftener, *served, *subscribed])
    times = [record for record in found if record.unit == "times"]
    assert [(record.name, record.case["through"], record.value) for record in times] == [
        ("late, median, of in process", "triton", 2.0),
        ("late, 99th, of in process", "triton", pytest.approx(2.98 / 1.49)),
        ("late, median, of in process", "gateway-subscribed", 8.0),
        ("late, 99th, of in process", "gateway-subscribed", pytest.approx(2.98 / 0.25)),
    ]
    assert {record.case["streams"] for record in times} == {64}
    assert [record.verdict for record in times] == ["met", "met", "NOT MET", "NOT MET"]


def test_of_the_gateway_98_percent_of_the_tokens_in_process_are_asked() -> None:
    def figures(tokens: int) -> Figures:
        trace = Trace(0.0, arrivals=[1.0, 2.0], ended=2.0, input_tokens=1, output_tokens=tokens)
        return Figures.of([trace])

    one = {"in-process": [figures(100)], "triton": [figures(97)], "gateway": [figures(98)]}
    found = compare_records({level: one for level in (1, 4, 8, 32)})
    asked = [record for record in found if record.asked is not None]
    assert [(record.case["requests at once"], record.case["target"], record.asked) for record in asked] == [
        (level, "gateway", 98) for level in (1, 8, 32)
    ]
    assert {record.verdict for record in asked} == {"met"}


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


def test_the_bars_of_a_subscription_fit_80_columns() -> None:
    some = case_records("gateway-subscribed", 256, [_round(0.1)])
    console = Console(file=io.StringIO(), width=80)
    records.print_records(console, some)
    assert isinstance(console.file, io.StringIO)
    bars = console.file.getvalue().partition("Bars")[2].split()
    assert bars.count("NOT") == bars.count("MET") == 2 and bars.count("gateway-subscribed") == 2


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
