"""What a gateway's processes carry: the same streams through gateways of several sizes, before one engine.

Where a machine has fewer cores than there are processes, no rate shows how they scale. So the CPU time of each worker
is measured as well: what all of them take for an event, and the share of the busiest one, which is the bound where each
has a core. It depends less than time on what else runs on the machine.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

from charonia.bench.compare import Served, free_ports, running, serving, wait_until_ready
from charonia.bench.records import Record
from charonia.bench.streaming import Load, jobs_of, send_all
from charonia.bench.targets import gateway
from charonia.bench.workload import Job
from charonia.engine_settings import Setting

# Clients here speak plain HTTP.
_TLS = ("CHARONIA_GATEWAY_TLS_CERT", "CHARONIA_GATEWAY_TLS_KEY", "CHARONIA_GATEWAY_TLS_CLIENT_CA")


@dataclass(frozen=True)
class Round:
    """One case, measured once. worker_s: CPU seconds of each process that answers; others_s: of the supervisor, where
    there is one; engine_s: of Triton with its Python models; client_s: of the clients."""

    load: Load
    worker_s: tuple[float, ...]
    others_s: float
    engine_s: float
    client_s: float

    @property
    def busiest(self) -> float:
        """The share of the worker with the most to do, in percent."""
        return 100 * max(self.worker_s) / sum(self.worker_s)


@contextmanager
def _gateway(served: Served, workers: int) -> Iterator[tuple[str, int]]:
    """A gateway of that many workers before the engine: its URL, and its process id."""
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    env = {
        **{name: value for name, value in os.environ.items() if name not in _TLS},
        "CHARONIA_TRITON_ENDPOINTS": served.triton,
        "CHARONIA_GATEWAY_PORT": str(port),
        "CHARONIA_GATEWAY_WORKERS": str(workers),
        "CHARONIA_HOST": "127.0.0.1",
    }
    with tempfile.TemporaryDirectory(prefix="charonia-benchmark-") as folder:
        log = Path(folder, "gateway.log")
        with running([sys.executable, "-m", "charonia_gateway"], env, log) as process:
            wait_until_ready(process, f"{url}/health/ready", log)
            yield url, process.pid


def run_workers(
    model: str,
    *,
    counts: Sequence[int],
    streams: Sequence[int],
    text: str,
    max_tokens: int,
    rounds: int,
    settings: Mapping[str, Setting],
    console: Console,
) -> list[Record]:
    """Serves the model once, and measures a gateway of each of the `counts` of workers with every number of streams.
    text: every prompt. Raises ModelError when a request fails."""
    results: dict[tuple[int, int], list[Round]] = {(count, level): [] for level in streams for count in counts}
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn())
    context = multiprocessing.get_context("spawn")
    bars = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    with ExitStack() as stack:
        served = stack.enter_context(serving(model, settings))
        gateways = {count: stack.enter_context(_gateway(served, count)) for count in counts}
        clients = stack.enter_context(ProcessPoolExecutor(1, context))
        stack.enter_context(bars)
        task = bars.add_task("cases", total=len(results) * rounds)
        for url, _ in gateways.values():  # loads everything that is loaded at first use, in all workers
            clients.submit(send_all, functools.partial(gateway, url), jobs_of(64, Job(text, 8)), 64).result()
        for _ in range(rounds):
            for (count, level), found in results.items():
                found.append(_measure(served, *gateways[count], clients, level, text, max_tokens))
                bars.advance(task)
    return [record for case, found in results.items() for record in case_records(*case, found)]


def _measure(
    served: Served, url: str, pid: int, clients: ProcessPoolExecutor, streams: int, text: str, max_tokens: int
) -> Round:
    before, engine_before = cpu_seconds(pid), cpu_seconds(served.pid)
    load, own = clients.submit(
        send_all, functools.partial(gateway, url), jobs_of(streams, Job(text, max_tokens)), streams
    ).result()
    spent, engine = _spent(before, cpu_seconds(pid)), _spent(engine_before, cpu_seconds(served.pid))
    others = spent.pop(pid) if len(spent) > 1 else 0.0
    return Round(load, tuple(spent.values()), others, sum(engine.values()), own)


def _spent(before: Mapping[int, float], after: Mapping[int, float]) -> dict[int, float]:
    """CPU seconds of each process that still runs: what one that ended had taken before is nobody's."""
    return {process: seconds - before.get(process, 0.0) for process, seconds in after.items()}


def cpu_seconds(pid: int) -> dict[int, float]:
    """Of a process and all below it, by process id."""
    found = {}
    for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.Error:  # it has just ended
            continue
        found[process.pid] = times.user + times.system
    return found


def _gateway_s(one: Round) -> float:
    return sum(one.worker_s) + one.others_s


def case_records(workers: int, streams: int, rounds: Sequence[Round]) -> list[Record]:
    case: dict[str, Any] = {"workers": workers, "streams": streams}

    def record(name: str, unit: str, values: Sequence[float]) -> Record:
        return Record.of("workers of a gateway", name, unit, values, case=case)

    def price_us(one: Round, seconds: float) -> float:
        return 1e6 * seconds / one.load.events

    return [
        record("events", "", [one.load.events for one in rounds]),
        record("events", "/s", [one.load.events / one.load.seconds for one in rounds]),
        record("gateway", "us/event", [price_us(one, _gateway_s(one)) for one in rounds]),
        record("gateway", "us/token", [1e6 * _gateway_s(one) / one.load.tokens for one in rounds]),
        record("busiest worker", "%", [one.busiest for one in rounds]),
        record("events of a core each", "/s", [one.load.events / max(one.worker_s) for one in rounds]),
        record("engine", "us/event", [price_us(one, one.engine_s) for one in rounds]),
        record("client", "us/event", [price_us(one, one.client_s) for one in rounds]),
    ]
