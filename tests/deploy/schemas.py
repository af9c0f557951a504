"""Whether an object is one that Kubernetes takes: every field known, every value of its type.

The packages that know it are imported by the test that asks: they take seconds, and every process that runs tests
collects all files.
"""

from __future__ import annotations

from typing import Any

OLDEST = "1.30"  # the first that has preStop.sleep without being asked for it
LATEST = "latest"  # that kubernetes-validate knows
VERSIONS = (OLDEST, LATEST)
# What InferenceService's predictor has beside the fields of a pod.
_KSERVE_PREDICTOR = {"minReplicas", "maxReplicas", "model"}
_KSERVE_RUNTIME = {"annotations", "supportedModelFormats", "protocolVersions", "multiModel"}


class NotTakenError(Exception):
    """With what is wrong as its text."""


def _validate(item: dict[str, Any], version: str) -> None:
    import kubernetes_validate

    try:
        kubernetes_validate.validate(
            item, kubernetes_validate.latest_version() if version == LATEST else version, strict=True
        )
    except kubernetes_validate.ValidationError as error:
        raise NotTakenError(str(error)) from error


def _check_pod(spec: dict[str, Any], version: str) -> None:
    _validate({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": spec}, version)


def _check_pod_monitor(item: dict[str, Any]) -> None:
    """The operator's own schema as a model. It drops what it does not know, so what it kept must be all."""
    from cloudcoil.models.prometheus_operator import v1 as prometheus_operator

    kept = prometheus_operator.PodMonitor.model_validate(item).model_dump(
        mode="json", by_alias=True, exclude_unset=True
    )
    if kept != item:
        raise NotTakenError(f"of {item}, the operator knows only {kept}")


def check(item: dict[str, Any], version: str) -> None:
    """Raises NotTakenError for what Kubernetes `version` would not take. Of KServe's kinds, whose schema no package
    has, this is the part that is a pod's."""
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
            _validate(item, version)
