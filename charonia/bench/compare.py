"""What the stack costs: the same requests to the engine in this process, through Triton and through the gateway.

One after the other, so that each has the machine to itself.
"""

from __future__ import annotations

import functools
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from charonia.api.engine import Engine, Setting, spell_settings
from charonia.bench.figures import Figures, as_json
from charonia.bench.serving import run_in_processes, run_serving
from charonia.bench.targets import OpenTarget, gateway, in_process, triton
from charonia.bench.workload import Job
from charonia.errors import ModelError

TARGETS = ("in-process", "triton", "gateway")
_START_TIMEOUT_S = 600.0
_STOP_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Served:
    """Where a served model listens."""

    triton: str  # HOST:PORT of gRPC
    gateway: str  # URL
    metrics: str  # URL of Triton's metrics
    pid: int  # of `charonia serve`


def free_ports(count: int) -> list[int]:
    with ExitStack() as sockets:
        bound = [sockets.enter_context(socket.socket()) for _ in range(count)]
        for each in bound:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in bound]


@contextmanager
def serving(model: str, settings: Mapping[str, Setting], options: Sequence[str] = ()) -> Iterator[Served]:
    """`charonia serve` on free ports, until the block is left. options: more of its options.

    Raises ModelError with what it said when it fails."""
    http, grpc, metrics, rest = free_ports(4)
    with tempfile.TemporaryDirectory(prefix="charonia-benchmark-") as folder:
        log = Path(folder, "serve.log")
        command = [sys.executable, "-m", "charonia", "serve", model, "--host", "127.0.0.1", "--run-dir", folder]
        command += options
        for name, port in (("http", http), ("grpc", grpc), ("metrics", metrics), ("gateway", rest)):
            command += [f"--{name}-port", str(port)]
        environment = dict(os.environ)
        environment.update({f"CHARONIA_{key.upper()}": value for key, value in spell_settings(settings).items()})
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
            try:
                wait_until_ready(process, f"http://127.0.0.1:{rest}/health/ready", log)
                yield Served(
                    f"127.0.0.1:{grpc}",
                    f"http://127.0.0.1:{rest}",
                    f"http://127.0.0.1:{metrics}/metrics",
                    process.pid,
                )
            finally:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(_STOP_TIMEOUT_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


def wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            said = log.read_text(encoding="utf-8", errors="replace")[-3000:]
            raise ModelError(f"charonia serve ended with exit code {process.returncode}:\n{said}")
        try:
            with opener.open(url, timeout=2) as response:
                if response.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise ModelError(f"charonia serve was not ready after {_START_TIMEOUT_S:.0f} s")


def run_compare(
    model: str,
    jobs: Mapping[int, Sequence[Job]],
    *,
    rounds: int,
    settings: Mapping[str, Setting],
    console: Console,
    targets: Sequence[str] = TARGETS,
    processes: int = 1,
    serve_options: Sequence[str] = (),
) -> dict[int, dict[str, list[Figures]]]:
    """jobs: the requests for each concurrency. targets: of TARGETS, the first among them. processes: over which the
    clients of a server are spread. Returns for each concurrency and target the figures of each round."""
    results: dict[int, dict[str, list[Figures]]] = {level: {name: [] for name in targets} for level in jobs}

    def measure(name: str, make_target: Callable[[], OpenTarget], processes: int) -> None:
        if name not in targets:
            return
        for level, requests in jobs.items():
            warmup = min(level, 4)
            if processes > 1 and level > 1:
                figures = run_in_processes(make_target, requests, concurrency=level, warmup=warmup, processes=processes)
            else:
                title = f"{name}, {level} at once"
                figures = run_serving(
                    make_target(), requests, concurrency=level, warmup=warmup, console=console, title=title
                )
            results[level][name].append(figures)

    def in_this_process() -> None:
        with Engine.from_pretrained(model, show_progress=True, **dict[str, Any](settings)) as engine:
            measure("in-process", functools.partial(in_process, engine), 1)

    def served() -> None:
        with serving(model, settings, serve_options) as addresses:
            measure("triton", functools.partial(triton, addresses.triton), processes)
            measure("gateway", functools.partial(gateway, addresses.gateway), processes)

    for number in range(rounds):
        # Every other round the other way about: a machine that grows slower or faster favours neither.
        order = (in_this_process, served) if number % 2 == 0 else (served, in_this_process)
        for part in order:
            part()
    return results


def _throughput(rounds: Sequence[Figures]) -> float:
    return float(np.median([figures.output_tokens_per_s for figures in rounds]))


def summary(results: Mapping[int, Mapping[str, Sequence[Figures]]]) -> dict[str, Any]:
    """For the JSON file: figures of every round, median throughput, and its ratio to the engine's in process."""
    levels = {}
    for level, targets in results.items():
        base = _throughput(targets["in-process"])
        levels[str(level)] = {
            name: {
                "output_tokens_per_s": _throughput(rounds),
                "ratio": _throughput(rounds) / base if base else None,
                "rounds": [as_json(figures) for figures in rounds],
            }
            for name, rounds in targets.items()
        }
    return {"concurrency": levels}


def print_summary(console: Console, results: Mapping[int, Mapping[str, Sequence[Figures]]]) -> None:
    """Output tokens per second and the ratio to the engine's, one line for each concurrency."""
    names = list(next(iter(results.values())))
    table = Table("requests at once", title="Output tokens/s, and of the engine's in process")
    for name in names:
        table.add_column(name, justify="right")
    table.add_column("errors", justify="right")
    for level, targets in results.items():
        base = _throughput(targets["in-process"])
        cells = [
            f"{_throughput(targets[name]):.1f} ({100 * _throughput(targets[name]) / base:.0f} %)" for name in names
        ]
        errors = sum(figures.errors for rounds in targets.values() for figures in rounds)
        table.add_row(str(level), *cells, str(errors))
    console.print(table)
    texts = {
        text for targets in results.values() for rounds in targets.values() for f in rounds for text in f.error_texts
    }
    for text in sorted(texts):
        console.print(text, style="red", markup=False)
