"""Runs every query of the dashboards and the rules in a Prometheus that has scraped the stack under load.

exporters.py serves metrics of missing parts (a GPU, the exporters) with their documented names.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import engine_metrics
import httpx
import prometheus
import promql_parser as promql
import pytest
import yaml
from exporters import GpuExporter, KeyUsage, NodeExporter, TritonOnGpu
from load_file import load_file
from missing_tools import missing_tool
from prometheus import Prometheus
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.parser import text_string_to_metric_families
from stack import HANG_S, Stack, free_ports

ROOT = Path(__file__).resolve().parents[2]
MONITORING = ROOT / "monitoring"
# Longer than a KV block, so that there are prefix cache hits.
PREAMBLE = "Answer in one short sentence. " * 20


BOARDS: dict[str, dict[str, Any]] = load_file(MONITORING / "grafana" / "dashboards.py").render()


def rules(file: str) -> list[dict[str, Any]]:
    groups = yaml.safe_load((MONITORING / "prometheus" / "rules" / file).read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def filled_in(expr: str) -> str:
    """A panel's query as Grafana sends it, with all values of its variables."""
    return expr.replace("$__rate_interval", "1m").replace("$instance", ".*").replace("$model", ".*")


def operands(expr: promql.Expr) -> list[promql.Expr]:
    """The vectors that an alert compares. The alert itself is empty while there is no problem, but the vectors must not
    be."""
    if isinstance(expr, promql.ParenExpr):
        return operands(expr.expr)
    if isinstance(expr, promql.NumberLiteral):
        return []
    if isinstance(expr, promql.BinaryExpr) and str(expr.op) in (
        "and",
        "or",
        "unless",
        "==",
        "!=",
        ">",
        ">=",
        "<",
        "<=",
    ):
        return operands(expr.lhs) + operands(expr.rhs)
    return [expr]


PANELS = {
    f"{name}: {panel['title']}, {target['legendFormat']}": filled_in(target["expr"])
    for name, board in BOARDS.items()
    for panel in board["panels"]
    for target in panel.get("targets", [])
}
RECORDED = {rule["record"]: rule["record"] for rule in rules("recording.yml")}
OPERANDS = {
    f"{rule['alert']}: {operand}": str(operand)
    for rule in rules("alerts.yml")
    for operand in operands(promql.parse(rule["expr"]))
}
QUERIES = {**PANELS, **RECORDED, **OPERANDS}
VARIABLES = {
    f"{name}: {variable['name']}": variable["query"]["query"]
    for name, board in BOARDS.items()
    for variable in board["templating"]["list"]
    if variable["type"] == "query"
}


def chats(http: httpx.Client, number: int) -> None:
    question = f"{PREAMBLE}What is {number} plus five?"
    http.post("/v1/chat/completions", json={"model": "demo", "messages": [{"role": "user", "content": question}]})


def streams(http: httpx.Client, number: int) -> None:
    body = {"model": "demo", "prompt": f"{number}, two,", "max_tokens": 32, "stream": True}
    with http.stream("POST", "/v1/completions", json=body) as reply:
        reply.read()


def leaves(http: httpx.Client, number: int) -> None:
    """A client that disconnects after the first text of a long response."""
    body = {"model": "demo", "prompt": f"{number}", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    with http.stream("POST", "/v1/completions", json=body) as reply:
        next(reply.iter_raw())


def errs(http: httpx.Client, number: int) -> None:
    """A prompt that is longer than the context."""
    http.post("/v1/completions", json={"model": "demo", "prompt": "word " * 5000, "max_tokens": 1})


def talks(http: httpx.Client, number: int) -> None:
    body = {"session_id": number % 3, "interactive_mode": True, "prompt": "What is the capital of France?"}
    http.post("/v1/chat/interactive", json=body)


def chooses(http: httpx.Client, number: int) -> None:
    """Responses with a new grammar of two choices, and once more with the same grammar."""
    body = {"model": "demo", "prompt": "One of", "max_tokens": 8, "structured_outputs": {"choice": ["a", f"b{number}"]}}
    for _ in range(2):
        http.post("/v1/completions", json=body).raise_for_status()


@contextlib.contextmanager
def load(stack: Stack) -> Iterator[None]:
    """Run all kinds of clients repeatedly."""
    over = threading.Event()

    def repeat(act: Callable[[httpx.Client, int], None]) -> None:
        with httpx.Client(base_url=stack.gateway, timeout=HANG_S, trust_env=False) as http:
            for number in itertools.count():
                if over.is_set():
                    return
                act(http, number)

    kinds = [chats, chats, streams, leaves, errs, talks, chooses]
    with ThreadPoolExecutor(len(kinds)) as pool:
        try:
            running = [pool.submit(repeat, kind) for kind in kinds]
            yield
        finally:
            over.set()
        for clients in running:
            clients.result()


@pytest.fixture(scope="module")
def program() -> Path:
    found = subprocess.run([ROOT / "scripts" / "get_prometheus.sh"], capture_output=True, text=True)
    if found.returncode:
        missing_tool(found.stderr.strip().removeprefix("skipped: "))
    return Path(found.stdout.strip()) / "prometheus"


@dataclass
class Watched:
    """A Prometheus that has scraped the stack under load."""

    server: Prometheus
    # The first results of each of QUERIES; empty after a timeout. The queries are not repeated: on a busy machine a
    # failed scrape may remove results again.
    answers: dict[str, list[float]]


@pytest.fixture(scope="module")
def watched(program: Path, stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    targets = {"triton": f"127.0.0.1:{stack.ports[2]}", "gateway": f"127.0.0.1:{stack.ports[3]}"}
    exporters = {"gpu": GpuExporter(), "node": NodeExporter(), "triton-gpu": TritonOnGpu(), "keys": KeyUsage()}
    with contextlib.ExitStack() as cleanup:
        for job, exporter in exporters.items():
            registry = CollectorRegistry()
            registry.register(exporter)
            (port,) = free_ports(1)
            web, thread = start_http_server(port, "127.0.0.1", registry)
            cleanup.callback(lambda web=web, thread=thread: (web.shutdown(), web.server_close(), thread.join()))
            targets[job] = f"127.0.0.1:{port}"
        server = cleanup.enter_context(prometheus.running(program, tmp_path_factory.mktemp("prometheus"), targets))
        answers: dict[str, list[float]] = {name: [] for name in QUERIES}
        with load(stack):
            deadline = time.monotonic() + HANG_S
            while not all(answers.values()) and time.monotonic() < deadline:
                time.sleep(1)
                for name in [name for name, answer in answers.items() if not answer]:
                    answers[name] = server.numbers(QUERIES[name])
        yield Watched(server, answers)


@pytest.fixture
def server(watched: Watched) -> Prometheus:
    return watched.server


def test_metrics_for_kubernetes_endpoint_picker_exist(watched: Watched, stack: Stack) -> None:
    """deploy/inference-extension names metrics of the engine. Each is a gauge with one value, in the text format of the
    picker, on the port that the picker scrapes."""
    config = yaml.safe_load(
        (ROOT / "deploy" / "inference-extension" / "picker-config.yaml").read_text(encoding="utf-8")
    )
    (extractor,) = [one["parameters"] for one in config["plugins"] if one["type"] == "core-metrics-extractor"]
    (names,) = [
        {field: name for field, name in engine.items() if field.endswith("Spec")}
        for engine in extractor["engineConfigs"]
    ]
    assert {"queuedRequestsSpec", "runningRequestsSpec", "kvUsageSpec"} <= set(names)
    asyncio.run(engine_metrics.idle(stack.metrics))  # the gauges change with the last responses of the load
    text = httpx.get(stack.metrics, timeout=HANG_S, trust_env=False).text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    values = {}
    for field, name in names.items():
        assert families[name].type == "gauge", name
        (sample,) = families[name].samples
        values[field] = sample.value
    # The load has ended. A count of all requests would not be small, and a percentage or a number of blocks would not
    # be below 1.
    assert values["queuedRequestsSpec"] == 0 and 0 <= values["runningRequestsSpec"] < 8
    assert 0 <= values["kvUsageSpec"] < 1 <= values["cacheNumBlocksSpec"]


@pytest.mark.parametrize("job", ["triton", "gateway", "node", "gpu"])
def test_prometheus_scrapes_every_target(server: Prometheus, job: str) -> None:
    assert server.numbers(f'max_over_time(up{{job="{job}"}}[10m])') == [1]


@pytest.mark.parametrize("name", QUERIES)
def test_query_has_result(watched: Watched, name: str) -> None:
    assert watched.answers[name], QUERIES[name]


def test_query_of_missing_metric_has_no_result(server: Prometheus) -> None:
    assert server.numbers("charonia_no_such_metric") == []
    assert server.numbers("0 * charonia_kv_blocks_total / 0") == []


@pytest.mark.parametrize("name", VARIABLES)
def test_variable_has_values(server: Prometheus, name: str) -> None:
    metric, label = VARIABLES[name].removeprefix("label_values(").removesuffix(")").split(", ")
    assert server.get(f"label/{label}/values", **{"match[]": metric})


def test_prometheus_evaluates_every_rule(server: Prometheus) -> None:
    evaluated = [rule for group in server.get("rules")["groups"] for rule in group["rules"]]
    assert len(evaluated) == len(rules("recording.yml")) + len(rules("alerts.yml"))
    assert [(rule["name"], rule.get("lastError")) for rule in evaluated if rule["health"] != "ok"] == []


def test_alert_markers_are_valid_query(server: Prometheus) -> None:
    for board in BOARDS.values():
        for annotation in board["annotations"]["list"]:
            server.get("query", query=annotation["expr"])  # empty, as expected
