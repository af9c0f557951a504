"""Prometheus' rules and Grafana's dashboards as files, checked without a running server."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import promql_parser as promql
import pytest
import yaml
from charonia_gateway.metrics import Metrics
from load_file import load_file
from missing_tools import missing_tool

ROOT = Path(__file__).resolve().parents[2]
MONITORING = ROOT / "monitoring"
PROMETHEUS = MONITORING / "prometheus"
dashboards = load_file(MONITORING / "grafana" / "dashboards.py")
BOARDS: dict[str, dict[str, Any]] = dashboards.render()
TEXTS = [json.dumps(board) for board in BOARDS.values()]
ALERT_NAME = re.compile(r"\bCharonia[A-Z]\w+")


def load(file: Path) -> Any:
    return yaml.safe_load(file.read_text(encoding="utf-8"))


def rules(file: str) -> list[dict[str, Any]]:
    return [rule for group in load(PROMETHEUS / "rules" / file)["groups"] for rule in group["rules"]]


ALERTS = rules("alerts.yml")
ALERT_NAMES = [rule["alert"] for rule in ALERTS]


def panels(name: str) -> list[dict[str, Any]]:
    return [panel for panel in BOARDS[name]["panels"] if panel["type"] != "row"]


@pytest.fixture(scope="module")
def promtool() -> Path:
    found = subprocess.run([ROOT / "scripts" / "get_prometheus.sh"], capture_output=True, text=True)
    if found.returncode:
        missing_tool(found.stderr.strip().removeprefix("skipped: "))
    return Path(found.stdout.strip()) / "promtool"


def run(*command: str | Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_takes_the_configuration_and_the_rules(promtool: Path) -> None:
    run(promtool, "check", "config", PROMETHEUS / "prometheus.yml")
    named = load(PROMETHEUS / "prometheus.yml")["rule_files"]
    assert sorted(PROMETHEUS / file for file in named) == sorted((PROMETHEUS / "rules").glob("*.yml"))


@pytest.mark.slow
def test_rules_pass_promtools_tests(promtool: Path) -> None:
    files = sorted((PROMETHEUS / "tests").glob("*.yml"))
    assert files
    run(promtool, "test", "rules", *files)


@pytest.mark.parametrize("rule", ALERTS, ids=ALERT_NAMES)
def test_alert_has_severity_summary_and_runbook(rule: dict[str, Any]) -> None:
    assert (rule["labels"]["severity"] == "none") == (rule["alert"] == "Watchdog")
    assert rule["labels"]["severity"] in ("critical", "warning", "none")
    annotations = rule["annotations"]
    assert set(annotations) == {"summary", "description", "runbook", "dashboard"}
    assert "\n" not in annotations["summary"]
    assert annotations["runbook"].startswith("1. ") and " 2. " in annotations["runbook"]
    titles = [board["title"].lower() for board in BOARDS.values()]
    assert f"charonia: {annotations['dashboard'].lower()}" in titles
    assert set(ALERT_NAME.findall(annotations["runbook"])) <= set(ALERT_NAMES)


def test_headings_of_the_runbooks_are_the_alerts() -> None:
    text = (ROOT / "docs" / "runbooks.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (\S+)$", text, re.MULTILINE) == ALERT_NAMES
    assert set(ALERT_NAME.findall(text)) <= set(ALERT_NAMES)


def numbers(expr: promql.Expr) -> list[float]:
    """Return the constants in the comparisons of an expression."""
    if isinstance(expr, promql.ParenExpr):
        return numbers(expr.expr)
    if not isinstance(expr, promql.BinaryExpr):
        return []
    if isinstance(expr.rhs, promql.NumberLiteral):
        return [expr.rhs.val]
    return numbers(expr.lhs) + numbers(expr.rhs)


def test_limits_in_graphs_equal_those_of_the_named_alerts() -> None:
    exprs = {rule["alert"]: promql.parse(rule["expr"]) for rule in ALERTS}
    checked = set()
    for name in BOARDS:
        for panel in panels(name):
            defaults = panel["fieldConfig"]["defaults"]
            steps = defaults.get("thresholds", {}).get("steps", [])
            if "thresholdsStyle" in defaults.get("custom", {}) or len(steps) == 3:  # a dashed line, or yellow and red
                alert = ALERT_NAME.search(panel["description"])
                assert alert, panel["title"]
                assert numbers(exprs[alert.group()])[0] == steps[-1]["value"], panel["title"]
                checked.add(alert.group())
    assert len(checked) >= 7


@pytest.mark.parametrize("name", BOARDS)
def test_panels_have_ids_places_units_and_advice(name: str) -> None:
    all_panels = BOARDS[name]["panels"]
    assert len({panel["id"] for panel in all_panels}) == len(all_panels)
    places = [panel["gridPos"] for panel in all_panels]
    for place in places:
        assert place["x"] >= 0 and place["x"] + place["w"] <= 24 and place["w"] > 0 and place["h"] > 0
    for one, other in itertools.combinations(places, 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        above = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or above, (one, other)
    for panel in panels(name):
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        advice = panel["description"]
        assert advice.endswith((".", "?")) and "\n" not in advice, panel["title"]
        assert set(ALERT_NAME.findall(advice)) <= set(ALERT_NAMES), panel["title"]
        references = [target["refId"] for target in panel["targets"]]
        assert references and len(set(references)) == len(references)


def engine_metrics() -> dict[str, str]:
    """Return name and kind of the engine's metrics from its catalogue."""
    text = (ROOT / "engine" / "src" / "base" / "metrics.cpp").read_text(encoding="utf-8")
    found = {name: kind for kind, name in re.findall(r'\b\w+,\s*k(Gauge|Counter),\s*"(charonia_\w+)"', text)}
    found |= dict.fromkeys(re.findall(r'histogram\(\w+,\s*"(charonia_\w+)"', text), "Histogram")
    assert {"Gauge", "Counter"} <= set(found.values()) and len(found) > 25
    return found


def test_counters_end_in_total_and_nothing_else_does() -> None:
    for name, kind in engine_metrics().items():
        assert name.endswith("_total") == (kind == "Counter") or name == "charonia_kv_blocks_total", name


def test_dashboards_show_every_metric_of_engine_and_gateway() -> None:
    """tests/stack/test_monitoring_live.py checks that the metrics of all queries exist."""
    found = {family.name + "_total" * (family.type == "counter") for family in Metrics().registry.collect()}
    shown = "\n".join(TEXTS)
    assert {
        name for name in found | engine_metrics().keys() if not re.search(rf"\b{name}(_bucket|_sum|_count)?\b", shown)
    } == {
        "charonia_gateway_request_duration_seconds",
        "charonia_gateway_key_requests_total",
        "charonia_gateway_workers",
    }


@pytest.mark.parametrize("name", ["overview", "engine"])
def test_figures_of_several_models_are_not_mixed(name: str) -> None:
    """The p95 of a fast and a slow model together is the figure of neither."""
    assert {"instance", "model"} <= {variable["name"] for variable in BOARDS[name]["templating"]["list"]}
    for panel in panels(name):
        for target in panel["targets"]:
            if '$instance"' not in target["expr"] or "changes(" in target["expr"]:
                continue
            assert target["expr"].count('model=~"$model"') == target["expr"].count('instance=~"$instance"'), panel[
                "title"
            ]
            if panel["type"] != "stat":
                assert "{{model}}" in target["legendFormat"], panel["title"]
                assert "by (" not in target["expr"] or re.search(r"by \([^)]*\bmodel\b", target["expr"]), panel["title"]


def test_grafana_finds_prometheus_and_the_dashboards() -> None:
    provisioning = MONITORING / "grafana" / "provisioning"
    (source,) = load(provisioning / "datasources" / "prometheus.yml")["datasources"]
    assert (source["type"], source["url"], source["isDefault"]) == ("prometheus", "http://prometheus:9090", True)
    interval = load(PROMETHEUS / "prometheus.yml")["global"]["scrape_interval"]
    assert source["jsonData"]["timeInterval"] == interval
    for board in BOARDS.values():
        variable = next(v for v in board["templating"]["list"] if v["name"] == "datasource")
        assert variable["current"] == {"selected": True, "text": source["name"], "value": source["uid"]}
    (provider,) = load(provisioning / "dashboards" / "charonia.yml")["providers"]
    assert provider["options"]["path"] == "/etc/grafana/dashboards"


def test_prometheus_scrapes_every_metric_of_rules_and_dashboards() -> None:
    scraped = load(PROMETHEUS / "prometheus.yml")["scrape_configs"]
    jobs = {job["job_name"] for job in scraped if "relabel_configs" not in job}
    assert jobs == {"triton", "gateway", "node", "gpu"}
    (unchecked,) = [job for job in scraped if "relabel_configs" in job]
    assert unchecked["relabel_configs"] == [{"target_label": "job", "replacement": "gateway"}]
    assert load(PROMETHEUS / "gateway" / "unchecked.yml") == [], "but with docker-compose.tls.yml"
    texts = [rule["expr"] for rule in ALERTS] + TEXTS
    named = set(re.findall(r'job=\\?"(\w+)', "\n".join(texts)))
    assert named and named <= jobs
