"""What a gateway does with several servers: the same requests through one that has one server and one that has more.

All servers run all the time, on this machine; those that a gateway does not know are idle. So on one machine it shows
what the choice costs and whether the work is spread, and not what more machines compute.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from rich.console import Console

from charonia.bench.compare import Served, free_ports, serving, wait_until_ready
from charonia.bench.figures import Figures, records
from charonia.bench.records import Record
from charonia.bench.serving import run_serving
from charonia.bench.targets import gateway
from charonia.bench.workload import Job
from charonia.engine_settings import Setting


@dataclass(frozen=True)
class Round:
    """shares: of the generated tokens, those of each server, the most first."""

    figures: Figures
    shares: tuple[float, ...]


def run_endpoints(
    model: str,
    jobs: Sequence[Job],
    *,
    levels: Sequence[int],
    concurrency: int,
    rounds: int,
    settings: Mapping[str, Setting],
    console: Console,
) -> dict[int, list[Round]]:
    """levels: numbers of servers. Returns the rounds of each."""
    results: dict[int, list[Round]] = {level: [] for level in levels}
    with ExitStack() as stack:
        servers = [stack.enter_context(serving(model, settings)) for _ in range(max(levels))]
        urls = {level: stack.enter_context(_gateway(servers[:level])) for level in levels}
        for number in range(rounds):
            # Every other round the other way about: a machine that grows slower or faster favours neither.
            for level in list(levels) if number % 2 == 0 else list(reversed(levels)):
                before = [_generated(server) for server in servers[:level]]
                figures = run_serving(
                    gateway(urls[level]),
                    jobs,
                    concurrency=concurrency,
                    warmup=0,
                    console=console,
                    title=f"{level} servers",
                )
                gained = [_generated(server) - old for server, old in zip(servers[:level], before, strict=True)]
                shares = sorted((tokens / (sum(gained) or 1) for tokens in gained), reverse=True)
                results[level].append(Round(figures, tuple(shares)))
    return results


@contextmanager
def _gateway(servers: Sequence[Served]) -> Iterator[str]:
    """The URL of a gateway before these servers, until the block is left."""
    (port,) = free_ports(1)
    with tempfile.TemporaryDirectory(prefix="charonia-gateway-") as folder:
        log = Path(folder, "gateway.log")
        environment = {
            "CHARONIA_GATEWAY_WORKERS": "1",  # each has its own load, and what is measured is how it is spread
            **os.environ,
            "CHARONIA_HOST": "127.0.0.1",
            "CHARONIA_GATEWAY_PORT": str(port),
            "CHARONIA_TRITON_ENDPOINTS": ",".join(server.triton for server in servers),
        }
        with log.open("wb") as output:
            command = [sys.executable, "-m", "charonia_gateway"]
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
            try:
                url = f"http://127.0.0.1:{port}"
                wait_until_ready(process, f"{url}/health/ready", log)
                yield url
            finally:
                process.terminate()
                process.wait()


def _generated(server: Served) -> float:
    """Tokens that this server's engine has generated."""
    # A package of the gateway's, which may not be installed where only the engine is.
    from prometheus_client.parser import text_string_to_metric_families

    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(server.metrics, timeout=30) as response:
        families = text_string_to_metric_families(response.read().decode())
    return sum(
        sample.value
        for family in families
        for sample in family.samples
        if sample.name == "charonia_generation_tokens_total"
    )


def endpoint_records(results: Mapping[int, Sequence[Round]]) -> list[Record]:
    """Of every number of servers, with the median output beside the first number's, and what each has done."""
    medians = {level: median(one.figures.output_tokens_per_s for one in rounds) for level, rounds in results.items()}
    base = next(iter(medians.values()))
    found = []
    for level, rounds in results.items():
        case = {"servers": level}
        found += records("endpoints", [one.figures for one in rounds], case)
        if base:
            found.append(Record.of("endpoints", "of the first", "%", 100 * (medians[level] / base), case=case))
        for name, place in (("most of a server", 0), ("least of a server", -1)):
            shares = [100 * one.shares[place] for one in rounds]
            found.append(Record.of("endpoints", name, "% of the tokens", shares, case=case))
    return found
