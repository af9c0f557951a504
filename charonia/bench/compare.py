"""What the stack costs: the same requests to the engine in this process, through Triton and through the gateway.

One after the other, so that each has the machine to itself.
"""

from __future__ import annotations

import functools
import os
import signal
import socket
import ssl
import statistics
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

from rich.console import Console

from charonia.api.engine import Engine
from charonia.bench.figures import Figures, records
from charonia.bench.records import Record
from charonia.bench.serving import run_in_processes, run_serving
from charonia.bench.targets import OpenTarget, gateway, in_process, triton
from charonia.bench.workload import Job
from charonia.engine_settings import Setting, spell_settings
from charonia.errors import ModelError

TARGETS = ("in-process", "triton", "gateway")
# Asked of the gateway, of a model of 0.5 B parameters: the less a token takes, the more of its time the stack has.
_OF_IN_PROCESS = 98.0  # percent of the tokens
_ASKED_LEVELS = (1, 8, 32)  # requests at once
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
def serving(
    model: str,
    settings: Mapping[str, Setting],
    options: Sequence[str] = (),
    tls_ca: Path | None = None,
    variables: Mapping[str, str] | None = None,
) -> Iterator[Served]:
    """`charonia serve` on free ports, until the block is left. options: more of its options. tls_ca: the certificates
    that the gateway's comes from, where the environment gives it one (CHARONIA_GATEWAY_TLS_CERT). variables: more of
    its environment.

    Raises ModelError with what it said when it fails."""
    http, grpc, metrics, rest = free_ports(4)
    with tempfile.TemporaryDirectory(prefix="charonia-benchmark-") as folder:
        log = Path(folder, "serve.log")
        command = [sys.executable, "-m", "charonia", "serve", model, "--host", "127.0.0.1", "--run-dir", folder]
        command += options
        for name, port in (("http", http), ("grpc", grpc), ("metrics", metrics), ("gateway", rest)):
            command += [f"--{name}-port", str(port)]
        environment = {**os.environ, **(variables or {})}
        environment.update({f"CHARONIA_{key.upper()}": value for key, value in spell_settings(settings).items()})
        with running(command, environment, log) as process:
            scheme = "https" if os.environ.get("CHARONIA_GATEWAY_TLS_CERT") else "http"
            wait_until_ready(process, f"{scheme}://localhost:{rest}/health/ready", log, tls_ca)
            yield Served(
                f"127.0.0.1:{grpc}",
                f"{scheme}://localhost:{rest}",
                f"http://127.0.0.1:{metrics}/metrics",
                process.pid,
            )


@contextmanager
def running(command: Sequence[str], environment: Mapping[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that writes to `log`, until the block is left."""
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path, tls_ca: Path | None = None) -> None:
    trust = urllib.request.HTTPSHandler(context=ssl.create_default_context(cafile=tls_ca))
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), trust)
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


def compare_records(results: Mapping[int, Mapping[str, Sequence[Figures]]]) -> list[Record]:
    """Of every concurrency and target, with the median output beside the engine's in process."""
    found = []
    for level, targets in results.items():
        base = _output(targets["in-process"])
        for name, rounds in targets.items():
            case = {"requests at once": level, "target": name}
            found += records("compare", rounds, case)
            if base:
                asked = _OF_IN_PROCESS if name == "gateway" and level in _ASKED_LEVELS else None
                share = 100 * (_output(rounds) / base)
                found.append(Record.of("compare", "of in process", "%", share, case=case, asked=asked))
    return found


def _output(rounds: Sequence[Figures]) -> float:
    return statistics.median(figures.output_tokens_per_s for figures in rounds)
