"""Whether an object is one that Kubernetes takes: every field known, every value of its type."""

from __future__ import annotations

from typing import Any

import kubernetes_validate
from cloudcoil.models.prometheus_operator import v1 as prometheus_operator

OLDEST = "1.30"  # the first that has preStop.sleep without being asked for it
VERSIONS = (OLDEST, kubernetes_validate.latest_version())
# What InferenceService's predictor has beside the fields of a pod.
_KSERVE_PREDICTOR = {"minReplicas", "maxReplicas", "model"}
_KSERVE_RUNTIME = {"annotations", "supportedModelFormats", "protocolVersions", "multiModel"}


class UnknownField(Exception):
    pass


def _check_pod(spec: dict[str, Any], version: str) -> None:
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": spec}
    kubernetes_validate.validate(pod, version, strict=True)


def _check_pod_monitor(item: dict[str, Any]) -> None:
    """The operator's own schema as a model. It drops what it does not know, so what it kept must be all."""
    kept = prometheus_operator.PodMonitor.model_validate(item).model_dump(
        mode="json", by_alias=True, exclude_unset=True
    )
    if kept != item:
        raise UnknownField(f"of {item}, the operator knows only {kept}")


def check(item: dict[str, Any], version: str) -> None:
    """Raises for what Kubernetes `version` would not take. Of KServe's kinds, whose schema no package has, this is the
    part that is a pod's."""
    match item["apiVersion"], item["kind"]:
        case "monitoring.coreos.com/v1", "PodMonitor":
            _check_pod_monitor(item)
        case "serving.kserve.io/v1alpha1", "ServingRuntime":
            _check_pod({key: value for key, value in item["spec"].items() if key not in _KSERVE_RUNTIME}, version)
        case "serving.kserve.io/v1beta1", "InferenceService":
            (predictor,) = item["spec"].values()
            pod = {key: value for key, value in predictor.items() if key not in _KSERVE_PREDICTOR}
            _check_pod({"containers": [{"name": "model", "image": "none"}], **pod}, version)
        case _:
            kubernetes_validate.validate(item, version, strict=True)
