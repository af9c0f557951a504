"""The cost of Triton and the gateway: the same requests to the engine in this process, to Triton and to the gateway.

They run one after the other, so each has the machine to itself.
"""

from __future__ import annotations

import functools
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from charonia.api.engine import Engine
from charonia.bench.figures import Figures, records
from charonia.bench.records import Record
from charonia.bench.serving import run_serving
from charonia.bench.targets import OpenTarget, gateway, in_process, triton
from charonia.bench.workload import Job
from charonia.engine_settings import Setting, spell_settings
from charonia.errors import ModelError
from charonia.serve.fetch import answers

TARGETS = ("in-process", "triton", "gateway")
_START_TIMEOUT_S = 600.0
_STOP_TIMEOUT_S = 60.0


@contextmanager
def _serving(model: str, settings: Mapping[str, Setting]) -> Iterator[tuple[str, str]]:
    """Run `charonia serve` on free ports until the block ends. Yields HOST:PORT of Triton's gRPC and the gateway's URL.
    Raises ModelError with the end of the log if the server does not start."""
    names = ("http", "grpc", "metrics", "gateway")
    ports = dict(zip(names, _free_ports(len(names)), strict=True))
    with tempfile.TemporaryDirectory(prefix="charonia-benchmark-") as folder:
        command = [sys.executable, "-m", "charonia", "serve", model, "--host", "127.0.0.1", "--run-dir", folder]
        for name, port in ports.items():
            command += [f"--{name}-port", str(port)]
        own = {f"CHARONIA_{key.upper()}": value for key, value in spell_settings(settings).items()}
        log = Path(folder, "serve.log")
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **own})
        try:
            url = f"http://127.0.0.1:{ports['gateway']}"
            _wait_until_ready(process, f"{url}/health/ready", log)
            yield f"127.0.0.1:{ports['grpc']}", url
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _free_ports(count: int) -> list[int]:
    with ExitStack() as sockets:
        bound = [sockets.enter_context(socket.socket()) for _ in range(count)]
        for each in bound:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in bound]


def _wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            text = log.read_text(encoding="utf-8", errors="replace")[-3000:]
            raise ModelError(f"charonia serve ended with exit code {process.returncode}:\n{text}")
        if answers(url, 2):
            return
        time.sleep(0.2)
    raise ModelError(f"charonia serve was not ready after {_START_TIMEOUT_S:.0f} s")


def run_compare(
    model: str,
    jobs: Mapping[int, Sequence[Job]],
    *,
    rounds: int,
    settings: Mapping[str, Setting],
    console: Console,
) -> Iterator[Record]:
    """jobs: the requests for each concurrency. Yields the records of a concurrency and target after each of its
    rounds, with the medians of the rounds so far."""
    results: dict[int, dict[str, list[Figures]]] = {level: {name: [] for name in TARGETS} for level in jobs}

    def measure(name: str, target: OpenTarget) -> Iterator[Record]:
        for level, requests in jobs.items():
            title = f"{name}, {level} at once"
            figures = run_serving(
                target, requests, concurrency=level, warmup=min(level, 4), console=console, title=title
            )
            results[level][name].append(figures)
            yield from compare_records(level, results[level])

    def in_this_process() -> Iterator[Record]:
        with Engine.from_pretrained(model, show_progress=True, **dict[str, Any](settings)) as engine:
            yield from measure("in-process", functools.partial(in_process, engine))

    def served() -> Iterator[Record]:
        with _serving(model, settings) as (grpc, url):
            yield from measure("triton", functools.partial(triton, grpc))
            yield from measure("gateway", functools.partial(gateway, url))

    for number in range(rounds):
        # The order alternates, so that a machine whose speed drifts favours no target.
        for part in (in_this_process, served) if number % 2 == 0 else (served, in_this_process):
            yield from part()


def compare_records(level: int, targets: Mapping[str, Sequence[Figures]]) -> Iterator[Record]:
    """Yield the records of each target of a concurrency, with the output rate as a share of the engine's in process."""
    base = _output(targets["in-process"])
    for name, rounds in targets.items():
        if rounds:
            case = {"requests at once": level, "target": name}
            yield from records("compare", rounds, case)
            if base:
                yield Record.of("compare", "of in process", "%", 100 * _output(rounds) / base, case=case)


def _output(rounds: Sequence[Figures]) -> float:
    return statistics.median(figures.output_tokens_per_s for figures in rounds) if rounds else 0.0
