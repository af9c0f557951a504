"""deploy/inference-extension: servers in an InferencePool, the endpoint picker and the route to them.

tests/stack/test_monitoring_live.py checks that the metrics exist which the picker reads.
"""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import schemas
import yaml
from manifests import DEPLOY, KUSTOMIZE, Manifests, Object, render, write_overlay

import charonia

FOLDER = DEPLOY / "inference-extension"


@pytest.fixture
def rendered() -> Manifests:
    return render(FOLDER)


@pytest.fixture
def server(rendered: Manifests) -> Object:
    return deepcopy(rendered.one("StatefulSet", "charonia-server"))


def container(server: Object, name: str) -> Object:
    (found,) = [one for one in server["spec"]["template"]["spec"]["containers"] if one["name"] == name]
    return found


@pytest.fixture
def config(rendered: Manifests) -> dict[str, Any]:
    """Return the picker's own configuration from its config map."""
    (picker,) = rendered.of("Deployment")
    (volume,) = [one for one in picker["spec"]["template"]["spec"]["volumes"] if one["name"] == "config"]
    (name, text), *others = rendered.one("ConfigMap", volume["configMap"]["name"])["data"].items()
    assert not others
    (main,) = picker["spec"]["template"]["spec"]["containers"]
    (mount,) = [one for one in main["volumeMounts"] if one["name"] == "config"]
    assert f"--config-file={mount['mountPath']}/{name}" in main["args"]
    found: dict[str, Any] = yaml.safe_load(text)
    return found


def parameters(config: dict[str, Any], kind: str) -> dict[str, Any]:
    (found,) = [plugin["parameters"] for plugin in config["plugins"] if plugin["type"] == kind]
    return dict(found)


@pytest.mark.parametrize("version", schemas.VERSIONS)
def test_every_object_is_one_that_kubernetes_takes(rendered: Manifests, version: str) -> None:
    assert {"InferencePool", "HTTPRoute", "StatefulSet", "Deployment"} <= {item["kind"] for item in rendered.objects}
    for item in rendered.objects:
        schemas.check(item, version)


def test_the_pool_is_the_servers_by_the_gateway_beside_each(rendered: Manifests, server: Object) -> None:
    spec = rendered.one("InferencePool", "charonia")["spec"]
    labels = server["spec"]["template"]["metadata"]["labels"]
    assert spec["selector"]["matchLabels"].items() <= labels.items()
    (picker,) = rendered.of("Deployment")
    assert not spec["selector"]["matchLabels"].items() <= picker["spec"]["template"]["metadata"]["labels"].items()
    gateway = container(server, "gateway")
    assert [port["number"] for port in spec["targetPorts"]] == [port["containerPort"] for port in gateway["ports"]]
    (source,) = gateway["envFrom"]
    settings = rendered.one("ConfigMap", source["configMapRef"]["name"])["data"]
    (grpc,) = [port["containerPort"] for port in container(server, "server")["ports"] if port["name"] == "grpc"]
    assert settings["CHARONIA_TRITON_ENDPOINTS"] == f"127.0.0.1:{grpc}"


def test_the_gateway_beside_a_server_is_the_one_of_the_base(rendered: Manifests, server: Object) -> None:
    """Except for the names, which must be unique in a pod, and the order of stopping: not before the server."""
    own = container(server, "gateway")
    base = deepcopy(render(KUSTOMIZE / "overlays" / "cpu").workload("charonia-gateway").container)
    for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
        base[kind]["httpGet"]["port"] = "rest"
    base["ports"][0]["name"] = "rest"
    base["volumeMounts"][0]["name"] = "gateway-tmp"
    base["lifecycle"] = container(server, "server")["lifecycle"]
    assert own["image"] == f"charonia-gateway:{charonia.__version__}"
    for one in (own, base):
        one.pop("envFrom")
    assert own == base
    ports = [port["name"] for one in server["spec"]["template"]["spec"]["containers"] for port in one["ports"]]
    assert len(ports) == len(set(ports))


def test_gateway_next_to_a_server_reads_the_keys_of_the_base(tmp_path: Path) -> None:
    own = render(write_overlay(tmp_path / "own", [FOLDER], [FOLDER / "api-keys"]))
    component = KUSTOMIZE / "components" / "api-keys"
    base = render(write_overlay(tmp_path / "base", [KUSTOMIZE / "overlays" / "cpu"], [component]))
    for item in own.objects:
        schemas.check(item, schemas.OLDEST)
    found = []
    for one in (own.one("StatefulSet", "charonia-server"), base.one("Deployment", "charonia-gateway")):
        gateway, pod = container(one, "gateway"), one["spec"]["template"]["spec"]
        mounts = [mount for mount in gateway["volumeMounts"] if mount["name"] == "api-keys"]
        volumes = [volume for volume in pod["volumes"] if volume["name"] == "api-keys"]
        found.append((gateway["env"], mounts, volumes, pod["securityContext"]["fsGroup"]))
    assert found[0] == found[1] and len(found[0][1]) == 1
    server = container(own.one("StatefulSet", "charonia-server"), "server")
    assert "api-keys" not in [mount["name"] for mount in server["volumeMounts"]], "the server does not see them"


def test_the_route_hands_the_api_to_the_pool_and_nothing_else(rendered: Manifests) -> None:
    spec = rendered.one("HTTPRoute", "charonia")["spec"]
    (rule,) = spec["rules"]
    (pool,) = rule["backendRefs"]
    made = rendered.one("InferencePool", "charonia")
    assert f"{pool['group']}/v1" == made["apiVersion"] and (pool["kind"], pool["name"]) == ("InferencePool", "charonia")
    paths = [match["path"] for match in rule["matches"]]
    for closed in ("/metrics", "/health/live", "/", "/docs", "/openapi.json"):
        assert not [path for path in paths if closed == path["value"] or closed.startswith(path["value"] + "/")]
    assert set(rule["timeouts"].values()) == {"0s"}, "streams are not cut off"


def test_the_pools_picker_is_this_one(rendered: Manifests) -> None:
    reference = rendered.one("InferencePool", "charonia")["spec"]["endpointPickerRef"]
    service = rendered.one("Service", reference["name"])
    assert reference["port"]["number"] in [port["port"] for port in service["spec"]["ports"]]
    (picker,) = rendered.of("Deployment")
    assert service["spec"]["selector"].items() <= picker["spec"]["template"]["metadata"]["labels"].items()
    (main,) = picker["spec"]["template"]["spec"]["containers"]
    assert {port["targetPort"] for port in service["spec"]["ports"]} <= {port["name"] for port in main["ports"]}
    assert "--pool-name=charonia" in main["args"]
    (role,) = rendered.of("Role")
    allowed = {(group, kind) for rule in role["rules"] for group in rule["apiGroups"] for kind in rule["resources"]}
    assert {("", "pods"), ("inference.networking.k8s.io", "inferencepools")} <= allowed
    assert {verb for rule in role["rules"] for verb in rule["verbs"]} == {"get", "list", "watch"}
    (binding,) = rendered.of("RoleBinding")
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert [one["name"] for one in binding["subjects"]] == [picker["spec"]["template"]["spec"]["serviceAccountName"]]


def test_the_picker_reads_tritons_metrics(rendered: Manifests, server: Object, config: dict[str, Any]) -> None:
    (metrics,) = [port["containerPort"] for port in container(server, "server")["ports"] if port["name"] == "metrics"]
    assert parameters(config, "metrics-data-source") == {"scheme": "http", "path": "/metrics", "port": metrics}
    extractor = parameters(config, "core-metrics-extractor")
    (engine,) = extractor["engineConfigs"]
    label = server["spec"]["template"]["metadata"]["labels"]["llm-d.ai/engine-type"]
    assert label == engine["name"] == extractor["defaultEngine"]
    types = [plugin["type"] for plugin in config["plugins"]]
    (profile,) = config["schedulingProfiles"]
    assert {one["pluginRef"] for one in profile["plugins"]} <= set(types) and len(types) == len(set(types))
    policy = rendered.one("NetworkPolicy", "charonia-pool")["spec"]
    (picker,) = rendered.of("Deployment")
    ours = [rule for rule in policy["ingress"] if rule["ports"][0]["port"] == metrics]
    (source,) = ours[0]["from"]
    assert source["podSelector"]["matchLabels"].items() <= picker["spec"]["template"]["metadata"]["labels"].items()
    assert [rule["ports"][0]["port"] for rule in policy["ingress"]] == [23333, metrics]
