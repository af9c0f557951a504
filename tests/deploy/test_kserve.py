"""deploy/kserve: the server as KServe runs it, and the gateway before it."""

from __future__ import annotations

import pytest
import schemas
from manifests import DEPLOY, KUSTOMIZE, Manifests, render

import charonia


@pytest.fixture
def rendered() -> Manifests:
    return render(DEPLOY / "kserve")


@pytest.mark.parametrize("version", schemas.VERSIONS)
def test_every_object_is_one_that_kubernetes_takes(rendered: Manifests, version: str) -> None:
    assert {"ServingRuntime", "InferenceService", "Deployment"} <= {item["kind"] for item in rendered.objects}
    for item in rendered.objects:
        schemas.check(item, version)


def test_the_model_is_served_by_this_runtime(rendered: Manifests) -> None:
    (runtime,) = rendered.of("ServingRuntime")
    (service,) = rendered.of("InferenceService")
    model = service["spec"]["predictor"]["model"]
    assert model["runtime"] == runtime["metadata"]["name"]
    assert model["modelFormat"]["name"] in {known["name"] for known in runtime["spec"]["supportedModelFormats"]}
    assert model["protocolVersion"] in runtime["spec"]["protocolVersions"]


def test_the_container_is_the_servers(rendered: Manifests) -> None:
    """Ports, probes and security contexts equal those in the stateful set. KServe needs numeric ports in probes."""
    (runtime,) = rendered.of("ServingRuntime")
    (container,) = runtime["spec"]["containers"]
    server = render(KUSTOMIZE / "overlays" / "cpu").workload("charonia-server")
    assert container["name"] == "kserve-container"
    assert container["image"] == f"charonia-server:{charonia.__version__}"
    assert {port["name"]: port["containerPort"] for port in container["ports"]} == server.ports
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        expected = {**server.container[probe]["httpGet"], "port": server.ports["http"]}
        assert container[probe] == {**server.container[probe], "httpGet": expected}
    assert container["lifecycle"] == server.container["lifecycle"]
    assert server.container["securityContext"].items() <= container["securityContext"].items()
    assert {mount["name"] for mount in container["volumeMounts"]} == {v["name"] for v in runtime["spec"]["volumes"]}
    variables = {variable["name"] for variable in container["env"]}
    assert variables - {"MODEL"} <= {*server.settings, *server.references}
    (service,) = rendered.of("InferenceService")
    predictor = service["spec"]["predictor"]
    assert predictor["terminationGracePeriodSeconds"] == server.pod["terminationGracePeriodSeconds"]
    assert predictor["enableServiceLinks"] is predictor["automountServiceAccountToken"] is False


def test_the_gateway_calls_the_service_that_kserve_makes(rendered: Manifests) -> None:
    (service,) = rendered.of("InferenceService")
    name = service["metadata"]["name"]
    gateway = rendered.workload("charonia-gateway")
    assert gateway.settings["CHARONIA_TRITON_ENDPOINTS"] == f"dns:///{name}-predictor:33337"
    out = rendered.one("NetworkPolicy", "charonia-gateway")["spec"]["egress"][0]
    assert out["to"][0]["podSelector"]["matchLabels"] == {"serving.kserve.io/inferenceservice": name}
    assert [port["port"] for port in out["ports"]] == [33337]
