"""The server and the gateway have the probes and metrics that deploy/ uses."""

from __future__ import annotations

import sys
import urllib.request
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from stack import HANG_S, Stack, answers

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests" / "deploy"))

from manifests import KUSTOMIZE, Manifests, render  # noqa: E402


@pytest.fixture(scope="module")
def rendered() -> Manifests:
    return render(KUSTOMIZE / "overlays" / "autoscale")


def local(stack: Stack) -> dict[int, int]:
    """This stack's ports, by the default ports in docs/contracts.md."""
    return dict(zip((33336, 33337, 33338, 23333), stack.ports, strict=True))


def test_serving_stack_answers_every_probe(stack: Stack, rendered: Manifests) -> None:
    asked = set()
    for workload in rendered.workloads:
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            get = workload.container[kind]["httpGet"]
            port = workload.ports[get["port"]]
            assert answers(f"http://127.0.0.1:{local(stack)[port]}{get['path']}"), get
            asked.add((port, get["path"]))
    assert len(asked) == 4  # ready and live, of both
    for port, path in asked:
        assert not answers(f"http://127.0.0.1:{local(stack)[port]}{path}x")


def test_metrics_of_pod_monitors_and_autoscalers_exist(stack: Stack, rendered: Manifests) -> None:
    names: dict[str, set[str]] = {}
    for item in rendered.of("PodMonitor"):
        (endpoint,) = item["spec"]["podMetricsEndpoints"]
        port = rendered.workload(item["metadata"]["name"]).ports[endpoint["port"]]
        with urllib.request.urlopen(f"http://127.0.0.1:{local(stack)[port]}{endpoint['path']}", timeout=HANG_S) as page:
            families = list(text_string_to_metric_families(page.read().decode()))
        names[item["metadata"]["name"]] = {sample.name for family in families for sample in family.samples}
    assert "charonia_gateway_requests_total" in names["charonia-gateway"]
    (scaler,) = rendered.of("HorizontalPodAutoscaler")
    (metric,) = scaler["spec"]["metrics"]
    assert metric["pods"]["metric"]["name"] in names["charonia-server"]


def test_prometheus_accepts_adapter_query() -> None:
    import promql_parser

    text = (KUSTOMIZE / "components" / "autoscale" / "prometheus-adapter.yaml").read_text(encoding="utf-8")
    (rule,) = yaml.safe_load(text)["rules"]
    query = rule["metricsQuery"]
    for template, value in {
        "<<.Series>>": "charonia_num_requests_waiting",
        "<<.LabelMatchers>>": 'namespace="charonia",pod=~"charonia-server-0|charonia-server-1"',
        "<<.GroupBy>>": "pod",
    }.items():
        query = query.replace(template, value)
    parsed = promql_parser.parse(query)
    assert type(parsed).__name__ == "AggregateExpr"
    promql_parser.parse(rule["seriesQuery"])
