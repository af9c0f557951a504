"""Checks whether Kubernetes accepts an object: every field is known, and every value has the right type.

Tests import the packages with schemas when they need them, because the import takes seconds, and every process that
runs tests collects all files.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

OLDEST = "1.30"  # the first version with preStop.sleep enabled by default
LATEST = "latest"  # newest version that kubernetes-validate supports
VERSIONS = (OLDEST, LATEST)
# Fields of KServe's kinds that are not fields of a pod.
_KSERVE_PREDICTOR = {"minReplicas", "maxReplicas", "model"}
_KSERVE_RUNTIME = {"annotations", "supportedModelFormats", "protocolVersions", "multiModel"}
_PLAIN = {"str": str, "int": int, "bool": bool, "object": object}

# Schemas of the Gateway API's HTTPRoute v1 and of its inference extension's InferencePool v1, by "apiVersion kind". No
# package has them.
_GATEWAY_API: dict[str, Any] = json.loads(Path(__file__).with_name("gateway_api.json").read_text("utf-8"))


class NotTakenError(Exception):
    """Kubernetes does not accept the object. The text says why."""


@functools.cache
def _kubernetes_validate() -> Any:
    """Import the package with a cache: it would read all definitions of a version for each object."""
    import kubernetes_validate

    kubernetes_validate.utils.schema_contents = functools.cache(kubernetes_validate.utils.schema_contents)
    return kubernetes_validate


def _validate(item: dict[str, Any], version: str) -> None:
    kubernetes_validate = _kubernetes_validate()
    try:
        kubernetes_validate.validate(
            item, kubernetes_validate.latest_version() if version == LATEST else version, strict=True
        )
    except kubernetes_validate.ValidationError as error:
        raise NotTakenError(str(error)) from error


def _check_pod(spec: dict[str, Any], version: str) -> None:
    _validate({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": spec}, version)


def _check_pod_monitor(item: dict[str, Any]) -> None:
    """Check with the operator's schema as a model. The model drops unknown fields, so no field may be missing."""
    from cloudcoil.models.prometheus_operator import v1 as prometheus_operator

    kept = prometheus_operator.PodMonitor.model_validate(item).model_dump(
        mode="json", by_alias=True, exclude_unset=True
    )
    if kept != item:
        raise NotTakenError(f"of {item}, the operator knows only {kept}")


def _check_gateway_api(item: dict[str, Any], schema: Any) -> None:
    import jsonschema

    try:
        jsonschema.validate(item, schema)
    except jsonschema.ValidationError as error:
        raise NotTakenError(str(error)) from error


@functools.cache
def _kserve_fields(kind: str) -> dict[str, str] | None:
    """Return the fields of a KServe kind and their types from the package kserve. None: not a kind of KServe.

    Reads the package's classes, which are generated from the OpenAPI document, without importing them: the import would
    need all packages for serving models.
    """
    (folder,) = importlib.util.find_spec("kserve").submodule_search_locations  # type: ignore[union-attr]
    file = Path(folder) / "models" / f"{re.sub('(?<!^)(?=[A-Z])', '_', kind).lower()}.py"
    if not file.is_file():
        return None
    (model,) = (node for node in ast.parse(file.read_text()).body if isinstance(node, ast.ClassDef))
    said = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in model.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    return {key: said["openapi_types"][name] for name, key in said["attribute_map"].items()}


def _check_kserve(value: Any, kind: str, place: str) -> None:
    """Kinds of Kubernetes itself are checked together with their pod."""
    if (many := re.fullmatch(r"list\[(.+)\]", kind)) and isinstance(value, list):
        for index, one in enumerate(value):
            _check_kserve(one, many[1], f"{place}/{index}")
    elif (named := re.fullmatch(r"dict\(str, (.+)\)", kind)) and isinstance(value, dict):
        for key, one in value.items():
            _check_kserve(one, named[1], f"{place}/{key}")
    elif kind in _PLAIN or many or named:
        if not isinstance(value, _PLAIN.get(kind, ())) or (kind == "int" and isinstance(value, bool)):
            raise NotTakenError(f"{place} is {value!r}, and not {kind}")
    elif (fields := _kserve_fields(kind)) is not None:
        if not isinstance(value, dict) or not value.keys() <= fields.keys():
            raise NotTakenError(f"{place} is {value!r}, and {kind} has the fields {sorted(fields)}")
        for key, one in value.items():
            _check_kserve(one, fields[key], f"{place}/{key}")


def check(item: dict[str, Any], version: str) -> None:
    """Raises NotTakenError if Kubernetes `version` would not accept the object."""
    if schema := _GATEWAY_API.get(f"{item['apiVersion']} {item['kind']}"):
        return _check_gateway_api(item, schema)
    match item["apiVersion"], item["kind"]:
        case "monitoring.coreos.com/v1", "PodMonitor":
            _check_pod_monitor(item)
        case "serving.kserve.io/v1alpha1", "ServingRuntime":
            _check_kserve(item, "V1alpha1ServingRuntime", "")
            _check_pod({key: value for key, value in item["spec"].items() if key not in _KSERVE_RUNTIME}, version)
        case "serving.kserve.io/v1beta1", "InferenceService":
            _check_kserve(item, "V1beta1InferenceService", "")
            (predictor,) = item["spec"].values()
            pod = {key: value for key, value in predictor.items() if key not in _KSERVE_PREDICTOR}
            _check_pod({"containers": [{"name": "model", "image": "none"}], **pod}, version)
        case _:
            _validate(item, version)
