"""The overlay autoscale: more servers while requests wait."""

from __future__ import annotations

import re

import yaml
from manifests import KUSTOMIZE, render

METRIC = "charonia_num_requests_waiting"
AUTOSCALE = KUSTOMIZE / "components" / "autoscale"


def test_scaled_workload_exists_and_loses_one_pod_at_a_time() -> None:
    rendered = render(KUSTOMIZE / "overlays" / "autoscale")
    (scaler,) = rendered.of("HorizontalPodAutoscaler")
    target = scaler["spec"]["scaleTargetRef"]
    item = rendered.one(target["kind"], target["name"])
    assert item["apiVersion"] == target["apiVersion"] and "replicas" not in item["spec"]
    grace = rendered.workload("charonia-server").pod["terminationGracePeriodSeconds"]
    policies = scaler["spec"]["behavior"]["scaleDown"]["policies"]
    assert [policy["value"] for policy in policies] == [1]
    assert all(policy["periodSeconds"] > grace for policy in policies)


def test_the_adapter_provides_the_metric_of_the_scaler() -> None:
    (scaler,) = render(KUSTOMIZE / "overlays" / "autoscale").of("HorizontalPodAutoscaler")
    (metric,) = scaler["spec"]["metrics"]
    assert metric["type"] == "Pods" and metric["pods"]["metric"] == {"name": METRIC}
    (rule,) = yaml.safe_load((AUTOSCALE / "prometheus-adapter.yaml").read_text(encoding="utf-8"))["rules"]
    assert rule["seriesQuery"].partition("{")[0] == METRIC
    assert re.sub(rule["name"]["matches"], rule["name"]["as"], METRIC) == METRIC
