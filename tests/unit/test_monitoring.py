"""Prometheus' rules and Grafana's dashboards as files, checked without a running server."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
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
def test_rules_say_what_they_should_of_given_series(promtool: Path) -> None:
    files = sorted((PROMETHEUS / "tests").glob("*.yml"))
    assert files
    run(promtool, "test", "rules", *files)


@pytest.mark.parametrize("rule", ALERTS, ids=ALERT_NAMES)
def test_an_alert_is_tested_to_fire_and_to_wait(rule: dict[str, Any]) -> None:
    expr = f'ALERTS{{alertname="{rule["alert"]}",alertstate="firing"}}'
    expected = [
        bool(check["exp_samples"])
        for test in load(PROMETHEUS / "tests" / "alerts_test.yml")["tests"]
        for check in test["promql_expr_test"]
        if check["expr"] == expr
    ]
    assert set(expected) == {True, False}


@pytest.mark.parametrize("rule", rules("recording.yml"), ids=lambda rule: rule["record"])
def test_a_recorded_figure_is_tested(rule: dict[str, Any]) -> None:
    tests = (PROMETHEUS / "tests" / "recording_test.yml").read_text(encoding="utf-8")
    assert f"expr: {rule['record']}\n" in tests or f"({rule['record']}," in tests


@pytest.mark.parametrize("rule", ALERTS, ids=ALERT_NAMES)
def test_an_alert_says_what_is_the_matter_and_what_to_do(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in ("critical", "warning")
    annotations = rule["annotations"]
    assert set(annotations) == {"summary", "description", "runbook", "dashboard"}
    assert "\n" not in annotations["summary"]
    assert annotations["runbook"].startswith("1. ") and " 2. " in annotations["runbook"]
    titles = [board["title"].lower() for board in BOARDS.values()]
    assert f"charonia: {annotations['dashboard'].lower()}" in titles
    assert set(ALERT_NAME.findall(annotations["runbook"])) <= set(ALERT_NAMES)


def test_every_alert_has_its_heading_in_the_runbooks_and_no_heading_is_without_one() -> None:
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


def test_limits_in_graphs_are_those_of_the_alerts_that_the_panels_name() -> None:
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


def test_the_program_writes_a_file_for_each_dashboard(tmp_path: Path) -> None:
    subprocess.run([sys.executable, dashboards.__file__, tmp_path / "new"], check=True)
    assert {file.stem: json.loads(file.read_text()) for file in (tmp_path / "new").iterdir()} == BOARDS


@pytest.mark.parametrize("name", BOARDS)
def test_panels_have_their_own_ids_and_do_not_overlap(name: str) -> None:
    all_panels = BOARDS[name]["panels"]
    assert len({panel["id"] for panel in all_panels}) == len(all_panels)
    places = [panel["gridPos"] for panel in all_panels]
    for place in places:
        assert place["x"] >= 0 and place["x"] + place["w"] <= 24 and place["w"] > 0 and place["h"] > 0
    for one, other in itertools.combinations(places, 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        above = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or above, (one, other)


@pytest.mark.parametrize("name", BOARDS)
def test_every_panel_has_a_unit_and_a_line_that_says_what_to_do(name: str) -> None:
    for panel in panels(name):
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        advice = panel["description"]
        assert advice.endswith((".", "?")) and "\n" not in advice, panel["title"]
        assert set(ALERT_NAME.findall(advice)) <= set(ALERT_NAMES), panel["title"]
        assert panel["targets"], panel["title"]
        references = [target["refId"] for target in panel["targets"]]
        assert len(set(references)) == len(references)


@pytest.mark.parametrize("name", BOARDS)
def test_panels_name_a_data_source_and_variables_that_there_are(name: str) -> None:
    source = {"type": "prometheus", "uid": "${datasource}"}
    variables = {variable["name"]: variable for variable in BOARDS[name]["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource" and variables["datasource"]["query"] == "prometheus"
    for variable in variables.values():
        assert variable["type"] == "datasource" or variable["datasource"] == source
    for panel in panels(name):
        assert panel["datasource"] == source
        for target in panel["targets"]:
            assert target["datasource"] == source
            used = set(re.findall(r"\$(\w+)", target["expr"])) - {"__rate_interval"}
            assert used <= set(variables) - {"datasource"}, panel["title"]


def engine_metrics() -> dict[str, str]:
    """Return name and kind of the engine's metrics from its catalogue."""
    text = (ROOT / "engine" / "src" / "base" / "metrics.cpp").read_text(encoding="utf-8")
    found = {name: kind for kind, name in re.findall(r'\b\w+,\s*k(Gauge|Counter),\s*"(charonia_\w+)"', text)}
    found |= dict.fromkeys(re.findall(r'histogram\(\w+,\s*"(charonia_\w+)"', text), "Histogram")
    assert {"Gauge", "Counter"} <= set(found.values()) and len(found) > 25
    return found


def test_rules_and_dashboards_read_metrics_that_the_engine_has() -> None:
    texts = [*TEXTS, *(file.read_text(encoding="utf-8") for file in (PROMETHEUS / "rules").glob("*.yml"))]
    read = set(re.findall(r"(?<![:\w])(charonia_(?!gateway_)\w+?)(?:_bucket|_sum|_count)?[{\[]", "\n".join(texts)))
    assert len(read) > 15
    assert read <= set(engine_metrics())
    shown = "\n".join(TEXTS)
    assert [name for name in engine_metrics() if not re.search(rf"\b{name}(_bucket|_sum|_count)?\b", shown)] == []


def test_dashboards_show_what_the_gateway_counts() -> None:
    found = {family.name + "_total" * (family.type == "counter") for family in Metrics().registry.collect()}
    shown = "\n".join(TEXTS)
    assert {name for name in found if not re.search(rf"\b{name}(_bucket|_sum|_count)?\b", shown)} == {
        "charonia_gateway_request_duration_seconds",
        "charonia_gateway_key_requests_total",
        "charonia_gateway_workers",
    }


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


def test_prometheus_scrapes_what_the_rules_and_the_dashboards_name() -> None:
    scraped = load(PROMETHEUS / "prometheus.yml")["scrape_configs"]
    jobs = {job["job_name"] for job in scraped if "relabel_configs" not in job}
    assert jobs == {"triton", "gateway", "node", "gpu"}
    (unchecked,) = [job for job in scraped if "relabel_configs" in job]
    assert unchecked["relabel_configs"] == [{"target_label": "job", "replacement": "gateway"}]
    assert load(PROMETHEUS / "gateway" / "unchecked.yml") == [], "but with docker-compose.tls.yml"
    texts = [rule["expr"] for rule in ALERTS] + TEXTS
    named = set(re.findall(r'job=\\?"(\w+)', "\n".join(texts)))
    assert named and named <= jobs
