"""The overlay autoscale: more servers while requests wait."""

from __future__ import annotations

import re

import yaml
from manifests import KUSTOMIZE, render

METRIC = "charonia_num_requests_waiting"
AUTOSCALE = KUSTOMIZE / "components" / "autoscale"


def test_what_is_scaled_exists_and_has_no_number_of_its_own() -> None:
    rendered = render(KUSTOMIZE / "overlays" / "autoscale")
    (scaler,) = rendered.of("HorizontalPodAutoscaler")
    target = scaler["spec"]["scaleTargetRef"]
    item = rendered.one(target["kind"], target["name"])
    assert item["apiVersion"] == target["apiVersion"]
    assert "replicas" not in item["spec"]
    assert 1 <= scaler["spec"]["minReplicas"] < scaler["spec"]["maxReplicas"]


def test_pods_go_one_at_a_time_and_not_before_their_answers_have() -> None:
    rendered = render(KUSTOMIZE / "overlays" / "autoscale")
    (scaler,) = rendered.of("HorizontalPodAutoscaler")
    down = scaler["spec"]["behavior"]["scaleDown"]
    assert [policy["value"] for policy in down["policies"]] == [1]
    grace = rendered.workload("charonia-server").pod["terminationGracePeriodSeconds"]
    assert all(policy["periodSeconds"] > grace for policy in down["policies"])


def test_the_metric_is_the_one_that_the_adapter_gives() -> None:
    (scaler,) = render(KUSTOMIZE / "overlays" / "autoscale").of("HorizontalPodAutoscaler")
    (metric,) = scaler["spec"]["metrics"]
    assert metric["type"] == "Pods" and metric["pods"]["metric"] == {"name": METRIC}
    (rule,) = yaml.safe_load((AUTOSCALE / "prometheus-adapter.yaml").read_text(encoding="utf-8"))["rules"]
    series = rule["seriesQuery"].partition("{")[0]
    assert series == METRIC
    assert re.sub(rule["name"]["matches"], rule["name"]["as"], series) == METRIC
    assert set(rule["resources"]["overrides"]) == {"namespace", "pod"}
    assert {"<<.Series>>", "<<.LabelMatchers>>", "<<.GroupBy>>"} <= set(re.findall(r"<<[^>]*>>", rule["metricsQuery"]))
