"""What a streamed response costs: the CPU time of each process of a served model, by the number of streams.

A target is Triton or the gateway before it, each with calls for its answers or with a subscription (docs/contracts.md).
In process, the engine shares one process with the clients, so that there are no prices: how late its events come is
what the others' are held against. Those of a subscription come oftener, and so they do in process for these.

The same requests are sent streamed and whole, in turns. What the streamed ones take more is the price of their
responses. CPU time depends less than time on what else runs on the machine. Events are what the client reads: a gateway
that falls behind makes one of several responses.
"""

from __future__ import annotations

import asyncio
import functools
import multiprocessing
import time
import urllib.request
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil  # type: ignore[import-untyped]
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

from charonia import _engine
from charonia.api.engine import Engine
from charonia.bench.compare import Served, serving
from charonia.bench.figures import Trace
from charonia.bench.records import Record
from charonia.bench.serving import closed_loop
from charonia.bench.targets import OpenTarget, Target, gateway, in_process, triton
from charonia.bench.workload import Job
from charonia.engine_settings import Setting, spell_settings
from charonia.errors import ModelError

TARGETS = ("triton", "gateway")
IN_PROCESS = "in-process"
SUBSCRIBED = "-subscribed"  # behind a target's name: answers come by a subscription
_CLIENT = "client"
_LAUNCHER = "launcher"  # waits, whatever the others do
_LEAST_REQUESTS = 8  # of a case: fewer take too little CPU time to be measured
_SETTLE_S = 0.1
_SETTLE_LIMIT_S = 120.0
_TEXT = "postprocessing"
_MODELS = ("preprocessing", "engine", _TEXT)
_INTERVAL = "stream_interval_per_stream_ms"

# What is asked, by the number of streams.
_SUBSCRIBED_STREAMS = (64, 256)
_SUBSCRIBED_US = 80.0  # of CPU time an event, in Triton and the gateway together
_OF_WHOLE = 80.0  # percent
_CALLS_STREAMS = (64,)
_CALLS_US = 350.0  # of CPU time a response, in Triton with its Python models
_CALLS_QUEUE_MS = 20.0
_LATE_STREAMS = (64,)
_LATE_TIMES = 2.0  # of in process


@dataclass(frozen=True)
class Load:
    """What the clients saw of one case. late_ms: of each event how long after the engine had made it it came, as
    delays() has it; empty where the target does not say when that was."""

    events: int
    tokens: int
    seconds: float
    late_ms: list[float]


@dataclass
class Round:
    """One case, measured once. whole: None in process, where prices are not measured. responses: of Triton to the
    streamed requests, or events of a subscription. cpu_s: by process; queue_ms: mean time in the queue of each Triton
    model."""

    streamed: Load
    whole: Load | None
    responses: int
    streamed_cpu_s: dict[str, float] = field(default_factory=dict)
    whole_cpu_s: dict[str, float] = field(default_factory=dict)
    queue_ms: dict[str, float] = field(default_factory=dict)

    def price_us(self, process: str) -> float:
        """CPU time of a response in this process; below zero where that is smaller than the noise."""
        more = self.streamed_cpu_s.get(process, 0.0) - self.whole_cpu_s.get(process, 0.0)
        return 1e6 * more / self.responses

    @property
    def processes(self) -> list[str]:
        """Of the server."""
        return [name for name in self.streamed_cpu_s if name not in (_CLIENT, _LAUNCHER)]


def jobs_of(streams: int, job: Job) -> list[Job]:
    """The requests of a case: two or more for each stream, all alike."""
    return [job] * max(2 * streams, _LEAST_REQUESTS)


def run_streaming(
    model: str,
    *,
    streams: Sequence[int],
    targets: Sequence[str],
    job: Job,
    rounds: int,
    settings: Mapping[str, Setting],
    console: Console,
) -> list[Record]:
    """Serves the model, once for each way, and measures every target with every number of streams. job: every request.
    Raises ModelError when a request fails."""
    results: dict[tuple[str, int], list[Round]] = {(target, level): [] for target in targets for level in streams}
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn())
    # Spawned, not forked: nothing of this process's threads is in it, and its CPU time is the clients'.
    context = multiprocessing.get_context("spawn")
    bars = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    with ExitStack() as servers, ProcessPoolExecutor(1, context) as clients, bars:
        # The gateway's way is a setting of its process.
        ways = dict.fromkeys(target.endswith(SUBSCRIBED) for target in targets if not _is_in_process(target))
        served = {
            way: servers.enter_context(serving(model, settings, variables={"CHARONIA_GATEWAY_SUBSCRIBE": str(way)}))
            for way in ways
        }
        task = bars.add_task("cases", total=len(results) * rounds)
        for target in targets:  # loads everything that is loaded at first use
            for stream in (True, False) if not _is_in_process(target) else ():
                opener = _opener(target, served[target.endswith(SUBSCRIBED)], stream)
                clients.submit(send_all, opener, jobs_of(1, replace(job, max_tokens=8)), 4).result()
        for number in range(rounds):
            for (target, level), found in results.items():
                jobs = jobs_of(level, job)
                if _is_in_process(target):
                    own = _as_subscribed(settings) if target.endswith(SUBSCRIBED) else settings
                    engine = functools.partial(_engine_here, model, own, job)
                    load, _ = clients.submit(send_all, engine, jobs, level).result()
                    found.append(Round(load, None, load.events))
                else:
                    found.append(_measure(served[target.endswith(SUBSCRIBED)], clients, target, level, jobs, number))
                bars.advance(task)
    return beside_in_process(
        [record for case, found in results.items() for record in case_records(*case, found, job.logprobs)]
    )


def _is_in_process(target: str) -> bool:
    return target.startswith(IN_PROCESS)


def _as_subscribed(settings: Mapping[str, Setting]) -> dict[str, Setting]:
    """With which the engine's streams have responses as often as those of a subscription."""
    default = next(entry.default_value for entry in _engine.config_fields() if entry.key == _INTERVAL)
    given = {**_engine.settings_from_environment(), **spell_settings(settings)}
    return {**settings, _INTERVAL: _engine.JOINED_STREAM_WEIGHT * float(given.get(_INTERVAL, default))}


def _engine_here(model: str, settings: Mapping[str, Setting], job: Job) -> OpenTarget:
    @asynccontextmanager
    async def open_target() -> AsyncIterator[Target]:
        with Engine.from_pretrained(model, **dict[str, Any](settings)) as engine:
            async with in_process(engine)() as target:
                await closed_loop(target, jobs_of(1, replace(job, max_tokens=8)), 4, lambda: None)
                yield target

    return open_target


def _opener(target: str, served: Served, stream: bool) -> Callable[[], OpenTarget]:
    if target.startswith("triton"):
        return functools.partial(triton, served.triton, stream, target.endswith(SUBSCRIBED))
    return functools.partial(gateway, served.gateway, None, None, stream)


def _measure(
    served: Served, clients: ProcessPoolExecutor, target: str, streams: int, jobs: Sequence[Job], number: int
) -> Round:
    loads: dict[bool, Load] = {}
    spent: dict[bool, dict[str, float]] = {}
    queues: dict[str, float] = {}
    responses = 0.0
    # Every other round the other way about: what grows slower or faster favours neither.
    for stream in (True, False) if number % 2 == 0 else (False, True):
        counted, before = _settled_queues(served), _cpu_seconds(served.pid)
        loads[stream], own = clients.submit(send_all, _opener(target, served, stream), jobs, streams).result()
        after = _cpu_seconds(served.pid)
        spent[stream] = {name: after[name] - before.get(name, 0.0) for name in after} | {_CLIENT: own}
        if stream:
            counts = _settled_queues(served)
            queues = _mean_queue_ms(counted, counts)
            # Each is made into text once; where there is none of them, each is an event.
            responses = counts[_TEXT][1] - counted.get(_TEXT, (0.0, 0.0))[1]
            if target.endswith(SUBSCRIBED):
                responses = loads[True].events
    return Round(loads[True], loads[False], int(responses), spent[True], spent[False], queues)


def send_all(make_target: Callable[[], OpenTarget], jobs: Sequence[Job], clients: int) -> tuple[Load, float]:
    """Sends the requests from this process; with its CPU seconds."""
    began = time.process_time()

    async def run() -> Load:
        async with make_target()() as target:
            traces = await closed_loop(target, jobs, clients, lambda: None)
        if errors := sorted({trace.error for trace in traces if trace.error}):
            raise ModelError(f"{len(errors)} kinds of errors, first: {errors[0]}")
        return Load(
            events=sum(len(trace.arrivals) for trace in traces),
            tokens=sum(trace.output_tokens for trace in traces),
            seconds=max(trace.ended for trace in traces) - min(trace.began for trace in traces),
            late_ms=delays(traces),
        )

    load = asyncio.run(run())
    return load, time.process_time() - began


def delays(traces: Sequence[Trace]) -> list[float]:
    """Of each event, in milliseconds from when the engine made it to when it was read.

    The engine tells its time since it took the request, and the client since it sent it. Between the two is the way of
    the request to the engine, which is not known: it is taken to be what makes the fastest event of each request as
    fast as the fastest event of all, with the way of that request counted as delay. So a delay that all events have is
    counted, and rather too much than too little of it."""
    known = [trace for trace in traces if trace.made_ms]
    ways = [1e3 * (np.array(trace.arrivals) - trace.began) - np.array(trace.made_ms) for trace in known]
    least = min((float(way.min()) for way in ways), default=0.0)
    return [float(late) for way in ways for late in way - way.min() + least]


def _cpu_seconds(pid: int) -> dict[str, float]:
    """Of `charonia serve` and all below it, by what they are."""
    found: dict[str, float] = defaultdict(float)
    for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
        try:
            times = process.cpu_times()
            found[process_name(process.cmdline())] += times.user + times.system
        except psutil.Error:  # it has just ended
            continue
    return dict(found)


def process_name(command: Sequence[str]) -> str:
    """What a process of a served model is, by its command line."""
    program = Path(command[0]).name if command else ""
    if program == "tritonserver":
        return "Triton"
    if program == "triton_python_backend_stub":
        # Its first argument is the model's file: .../postprocessing/1/model.py
        return Path(command[1]).parts[-3]
    # Of several processes the gateway's others are `-m charonia_gateway.worker_main`.
    return "gateway" if any(part.partition(".")[0] == "charonia_gateway" for part in command) else _LAUNCHER


def _settled_queues(served: Served) -> dict[str, tuple[float, float]]:
    """As _queues(), once nothing more is counted: Triton counts a request after its response has gone out. Raises
    ModelError where that does not come."""
    deadline = time.monotonic() + _SETTLE_LIMIT_S
    found, before = _queues(served), None
    while found != before:
        if time.monotonic() > deadline:
            raise ModelError(
                f"Triton has counted requests for {_SETTLE_LIMIT_S:g} s after the last answer: "
                "do other clients ask this server?"
            )
        time.sleep(_SETTLE_S)
        found, before = _queues(served), found
    return found


def _queues(served: Served) -> dict[str, tuple[float, float]]:
    """By Triton model: microseconds that requests have waited for it, and how many they were."""
    # A package of the gateway's, which may not be installed where only the engine is.
    from prometheus_client.parser import text_string_to_metric_families

    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(served.metrics, timeout=30) as response:
        families = list(text_string_to_metric_families(response.read().decode()))
    waited: dict[str, float] = defaultdict(float)
    count: dict[str, float] = defaultdict(float)
    for sample in (sample for family in families for sample in family.samples):
        if sample.name.startswith("nv_inference_queue_duration_us"):
            waited[sample.labels["model"]] += sample.value
        elif sample.name.startswith("nv_inference_request_success"):
            count[sample.labels["model"]] += sample.value
    return {model: (waited[model], count[model]) for model in count}


def _mean_queue_ms(
    before: Mapping[str, tuple[float, float]], after: Mapping[str, tuple[float, float]]
) -> dict[str, float]:
    means = {}
    for model, (waited, count) in after.items():
        waited_before, count_before = before.get(model, (0.0, 0.0))
        if count > count_before:
            means[model] = (waited - waited_before) / (count - count_before) / 1e3
    return means


def case_records(target: str, streams: int, rounds: Sequence[Round], logprobs: int | None = None) -> list[Record]:
    """What was measured of one target and number of streams; prices are in CPU time. logprobs: of its requests; what is
    asked is asked without."""
    case: dict[str, Any] = {"through": target, "streams": streams}
    if logprobs is not None:
        case["logprobs"] = logprobs
    bars = _bars(target, streams) if logprobs is None else {}

    def record(name: str, unit: str, values: Sequence[float], difference: bool = False) -> Record:
        asked, at_most = bars.get((name, unit), (None, False))
        if difference:  # sums of them that cancel leave what is no figure: 2e-12
            values = [round(value, 6) for value in values]
        return Record.of(
            "streaming", name, unit, values, case=case, difference=difference, asked=asked, at_most=at_most
        )

    def price(name: str, values: Sequence[float]) -> Record:
        return record(name, "us/response", values, difference=True)

    found = [
        record("responses", "", [one.responses for one in rounds]),
        record("events", "", [one.streamed.events for one in rounds]),
        record("tokens per event", "", [one.streamed.tokens / one.streamed.events for one in rounds]),
        record("streamed", "tokens/s", [_rate(one.streamed) for one in rounds]),
    ]
    if both := [(one.streamed, one.whole) for one in rounds if one.whole]:
        found += [
            record("whole", "tokens/s", [_rate(whole) for _, whole in both]),
            record("streamed, of whole", "%", [100 * _rate(streamed) / _rate(whole) for streamed, whole in both]),
        ]
        for name in rounds[0].processes:
            # What the way does not lead through.
            if name not in ("parsing", "gateway") or (name == "gateway" and target.startswith("gateway")):
                found.append(price(name, [one.price_us(name) for one in rounds]))
        found += [
            price("server", [sum(map(one.price_us, one.processes)) for one in rounds]),
            record("server", "us/token", [_server_us_per_token(one) for one in rounds], difference=True),
            price("client", [one.price_us(_CLIENT) for one in rounds]),
            record("responses/s per core", "", [one.responses / _server_s(one) for one in rounds]),
        ]
    for model in _MODELS:
        if all(model in one.queue_ms for one in rounds):
            found.append(record(f"queue of {model}", "ms", [one.queue_ms[model] for one in rounds]))
    if late := [each for one in rounds for each in one.streamed.late_ms]:
        found += [
            record(f"late, {name}", "ms", [float(np.percentile(late, percent))])
            for name, percent in (("median", 50), ("99th", 99))
        ]
    return found


def _bars(target: str, streams: int) -> dict[tuple[str, str], tuple[float, bool]]:
    """What is asked of a figure, by its name and unit, and whether it is the most that it may be."""
    found: dict[tuple[str, str], tuple[float, bool]] = {}
    if target == "gateway" + SUBSCRIBED and streams in _SUBSCRIBED_STREAMS:
        found["server", "us/response"] = (_SUBSCRIBED_US, True)
        found["streamed, of whole", "%"] = (_OF_WHOLE, False)
    if target == "triton" and streams in _CALLS_STREAMS:
        found["server", "us/response"] = (_CALLS_US, True)
        found[f"queue of {_TEXT}", "ms"] = (_CALLS_QUEUE_MS, True)
    return found


def _rate(load: Load) -> float:
    return load.tokens / load.seconds


def _server_us_per_token(one: Round) -> float:
    """As Round.price_us, for each token of what was streamed."""
    return sum(map(one.price_us, one.processes)) * one.responses / one.streamed.tokens


def _server_s(one: Round) -> float:
    return sum(one.streamed_cpu_s[name] for name in one.processes)


def beside_in_process(records: Sequence[Record]) -> list[Record]:
    """The records, and how many times later than in process the events of the same number of streams came."""

    def key(record: Record) -> tuple[str, int, bool]:
        return record.name, record.case["streams"], record.case["through"].endswith(SUBSCRIBED)

    late = {
        key(record): record.value
        for record in records
        if _is_in_process(record.case["through"]) and record.name.startswith("late, ")
    }
    found = list(records)
    for record in records:
        if not _is_in_process(record.case["through"]) and (base := late.get(key(record))):
            asked = _LATE_TIMES if record.case["streams"] in _LATE_STREAMS and "logprobs" not in record.case else None
            found.append(
                Record.of(
                    "streaming", f"{record.name}, of in process", "times", [record.value / base], case=record.case,
                    asked=asked, at_most=True,
                )
            )  # fmt: skip
    return found
