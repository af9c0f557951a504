"""deploy/kustomize: Kubernetes accepts it, and it agrees with the rest of this repository."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemas
import yaml
from charonia_gateway.settings import Settings
from huggingface_hub import constants
from manifests import DEPLOY, GIB, KUSTOMIZE, OVERLAYS, ROOT, Manifests, Workload, bytes_of, render, write_overlay
from pydantic import AliasChoices

import charonia
from charonia import _engine
from charonia.serve.launcher import AFTER_DRAINS_S
from charonia.settings import PREFIX, ServeSettings, env_name

SERVER, GATEWAY = "charonia-server", "charonia-gateway"
COMPONENTS = sorted(path.name for path in (KUSTOMIZE / "components").iterdir())


def cores_of(quantity: str) -> float:
    return float(quantity[:-1]) / 1000 if quantity.endswith("m") else float(quantity)


@pytest.fixture(scope="module", params=[*OVERLAYS, *(f"cpu with {name}" for name in COMPONENTS)])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each overlay, and each component on top of the overlay cpu, as a user would add it."""
    overlay, _, component = request.param.partition(" with ")
    folder = KUSTOMIZE / "overlays" / overlay
    if component:
        own = tmp_path_factory.mktemp("overlay")
        folder = write_overlay(own, [folder], [KUSTOMIZE / "components" / component])
    return folder


@pytest.fixture
def rendered(folder: Path) -> Manifests:
    return render(folder)


@pytest.mark.parametrize("version", schemas.VERSIONS)
def test_kubernetes_takes_every_object(rendered: Manifests, version: str) -> None:
    assert {"StatefulSet", "Deployment", "Service", "PodDisruptionBudget", "NetworkPolicy", "ServiceAccount"} <= {
        item["kind"] for item in rendered.objects
    }
    for item in rendered.objects:
        schemas.check(item, version)


@pytest.mark.parametrize(
    "folder", [KUSTOMIZE / "overlays" / "autoscale", DEPLOY / "inference-extension", DEPLOY / "kserve"], ids=str
)
def test_a_misspelt_field_is_refused_in_every_object(folder: Path) -> None:
    for item in render(folder).objects:
        wrong = copy.deepcopy(item)
        wrong.setdefault("spec", wrong)["replikas"] = 2
        with pytest.raises(schemas.NotTakenError):
            schemas.check(wrong, schemas.OLDEST)


# --- names, labels and ports


def test_selectors_choose_the_pods_of_one_workload(rendered: Manifests) -> None:
    for workload in rendered.workloads:
        spread = [one["labelSelector"] for one in workload.pod["topologySpreadConstraints"]]
        policy = rendered.one("NetworkPolicy", workload.name)["spec"]["podSelector"]
        for selector in (workload.spec["selector"], policy, *spread):
            assert rendered.selected(selector["matchLabels"]) == [workload.name]
    for item in rendered.of("Service"):
        assert rendered.selected(item["spec"]["selector"]) == [item["metadata"]["name"]]
    for item in rendered.of("PodDisruptionBudget", "PodMonitor"):
        assert rendered.selected(item["spec"]["selector"]["matchLabels"]) == [item["metadata"]["name"]]


def test_ports_are_the_settings_defaults_and_services_lead_to_them(rendered: Manifests) -> None:
    http, grpc, metrics, gateway = (
        ServeSettings.model_fields[f"{name}_port"].default for name in ("http", "grpc", "metrics", "gateway")
    )
    assert rendered.workload(SERVER).ports == {"http": http, "grpc": grpc, "metrics": metrics}
    assert rendered.workload(GATEWAY).ports == {"http": gateway}
    for item in rendered.of("Service", "PodMonitor"):
        ports = rendered.workload(item["metadata"]["name"]).ports
        for port in item["spec"].get("ports", ()):
            assert ports[port["targetPort"]] == port["port"]
        for endpoint in item["spec"].get("podMetricsEndpoints", ()):
            assert endpoint["port"] in ports


def test_the_gateway_finds_every_server_that_is_ready_and_no_other(rendered: Manifests) -> None:
    """A headless service has an address for each pod, and removes it when the pod starts to shut down."""
    server = rendered.workload(SERVER)
    service = rendered.one("Service", server.spec["serviceName"])
    assert service["spec"]["clusterIP"] == "None" and not service["spec"].get("publishNotReadyAddresses")
    endpoints = rendered.workload(GATEWAY).settings["CHARONIA_TRITON_ENDPOINTS"]
    assert endpoints == f"dns:///{service['metadata']['name']}:{server.ports['grpc']}"


def test_pods_are_scraped_under_the_names_that_rules_and_dashboards_know() -> None:
    config = yaml.safe_load((ROOT / "monitoring" / "prometheus" / "prometheus.yml").read_text(encoding="utf-8"))
    jobs = {job["job_name"] for job in config["scrape_configs"]}
    monitors = render(KUSTOMIZE / "overlays" / "autoscale").of("PodMonitor")
    found = {}
    for item in monitors:
        (endpoint,) = item["spec"]["podMetricsEndpoints"]
        (relabeling,) = endpoint["relabelings"]
        assert relabeling["targetLabel"] == "job"
        found[relabeling["replacement"]] = (item["metadata"]["name"], endpoint["port"])
    assert found == {"triton": (SERVER, "metrics"), "gateway": (GATEWAY, "http")} and found.keys() <= jobs


# --- settings


def gateway_variables() -> set[str]:
    names = set()
    for field in Settings.model_fields.values():
        alias = field.validation_alias
        names |= {str(choice).upper() for choice in alias.choices} if isinstance(alias, AliasChoices) else {str(alias)}
    return {name for name in names if name.startswith(PREFIX)}


def server_variables() -> set[str]:
    inference = {PREFIX + entry.key.upper() for entry in _engine.config_fields() if not entry.model_attribute}
    return inference | {env_name(field) for field in ServeSettings.model_fields}


def test_every_variable_is_a_setting_and_has_an_allowed_value(
    rendered: Manifests, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    server, gateway = rendered.workload(SERVER), rendered.workload(GATEWAY)
    hub = {"HF_HOME", "HF_TOKEN_PATH"}
    assert hub <= vars(constants).keys()
    assert {*gateway.settings, *gateway.references} <= gateway_variables()
    assert {*server.settings, *server.references} <= server_variables() | hub
    for workload, check in ((server, ServeSettings), (gateway, Settings)):
        with monkeypatch.context() as environment:
            for name, value in workload.settings.items():
                environment.setenv(name, value)
            settings = check()
    assert settings.host == "0.0.0.0"  # of the gateway
    keys = {entry.key for entry in _engine.config_fields()}
    inference = {name.removeprefix(PREFIX).lower(): value for name, value in server.settings.items()}
    _engine.check_settings({key: value for key, value in inference.items() if key in keys})


def test_kubernetes_service_variables_are_not_settings(rendered: Manifests) -> None:
    """The service charonia-gateway would make CHARONIA_GATEWAY_PORT = tcp://... in every pod of its namespace."""
    made = {f"{item['metadata']['name'].upper().replace('-', '_')}_PORT" for item in rendered.of("Service")}
    assert made & gateway_variables()
    for workload in rendered.workloads:
        assert workload.pod["enableServiceLinks"] is False


def test_the_engine_has_the_threads_gpus_and_memory_of_its_container(rendered: Manifests) -> None:
    server = rendered.workload(SERVER)
    source = server.references["CHARONIA_THREADS"]["resourceFieldRef"]
    assert (source["containerName"], source["resource"]) == (server.container["name"], "limits.cpu")
    limits = server.container["resources"]["limits"]
    assert cores_of(limits["cpu"]).is_integer()
    gpus = limits.get("nvidia.com/gpu")
    assert (server.settings["CHARONIA_DEVICE"] == "cuda") == (gpus is not None)
    assert gpus is None or gpus == server.settings["CHARONIA_TENSOR_PARA_SIZE"]
    (shm,) = [volume["emptyDir"]["sizeLimit"] for volume in server.pod["volumes"] if volume["name"] == "shm"]
    cache = bytes_of(server.settings.get("CHARONIA_CACHE_SIZE", "0"))
    assert bytes_of(shm) >= GIB and bytes_of(limits["memory"]) >= cache + bytes_of(shm) + GIB
    for workload in rendered.workloads:
        requests, limits = (workload.container["resources"][kind] for kind in ("requests", "limits"))
        for resource in ("cpu", "memory", "ephemeral-storage"):
            of = cores_of if resource == "cpu" else bytes_of
            assert 0 < of(requests[resource]) <= of(limits[resource])


# --- start and end


def test_probes_and_grace_periods_last_as_long_as_the_settings_allow(rendered: Manifests) -> None:
    """The grace period covers preStop, the drain and the rest of the shutdown."""

    def seconds(workload: Workload, probe: str) -> int:
        found = workload.container[probe]
        return int(found["failureThreshold"]) * int(found["periodSeconds"])

    def times(workload: Workload) -> tuple[float, float, float]:
        sleep = workload.container["lifecycle"]["preStop"]["sleep"]["seconds"]
        drain = float(workload.settings["CHARONIA_DRAIN_TIMEOUT_S"])
        return workload.pod["terminationGracePeriodSeconds"], sleep, drain

    server, gateway = rendered.workload(SERVER), rendered.workload(GATEWAY)
    assert seconds(server, "startupProbe") > float(server.settings["CHARONIA_START_TIMEOUT_S"])
    for workload in (server, gateway):
        assert seconds(workload, "readinessProbe") < seconds(workload, "livenessProbe")
    grace, sleep, drain = times(gateway)
    assert sleep >= 5 and grace > sleep + drain + 5
    grace, sleep, drain = times(server)
    assert sleep >= 5 and grace >= sleep + 2 * drain + AFTER_DRAINS_S


# --- privileges, files and secrets


def test_pods_have_no_more_rights_than_they_need(rendered: Manifests) -> None:
    """Kubernetes' profile `restricted`, a read-only root file system, and no token."""
    for workload in rendered.workloads:
        pod, container = workload.pod, workload.container
        assert pod["securityContext"]["runAsNonRoot"] is True and pod["securityContext"]["runAsUser"] > 0
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
        account = rendered.one("ServiceAccount", pod["serviceAccountName"])
        assert pod["automountServiceAccountToken"] is account["automountServiceAccountToken"] is False


def test_written_files_are_on_a_volume(rendered: Manifests) -> None:
    for workload in rendered.workloads:
        mounts = workload.container["volumeMounts"]
        claims = {claim["metadata"]["name"] for claim in workload.spec.get("volumeClaimTemplates", [])}
        volumes = {volume["name"] for volume in workload.pod["volumes"]} | claims
        assert {mount["name"] for mount in mounts} == volumes
        assert "/tmp" in [mount["mountPath"] for mount in mounts if not mount.get("readOnly")]
        for name in {"CHARONIA_RUN_DIR", "HF_HOME"} & workload.settings.keys():
            kept = [one["mountPath"] for one in mounts if one["name"] in claims and not one.get("readOnly")]
            assert any(Path(workload.settings[name]).is_relative_to(folder) for folder in kept)


def test_a_secret_is_only_where_it_is_used(rendered: Manifests) -> None:
    """The token of the hub is a file of the server. API keys and a certificate are files of the gateway, which needs
    them to start. No variable contains a secret, and the manifests contain none."""
    readers = {
        "hub-token": ["HF_TOKEN_PATH"],
        "api-keys": ["CHARONIA_GATEWAY_KEYS_FILE"],
        "tls": ["CHARONIA_GATEWAY_TLS_CERT", "CHARONIA_GATEWAY_TLS_KEY"],
    }
    assert not rendered.of("Secret")
    for workload in rendered.workloads:
        assert not [name for name, source in workload.references.items() if "secretKeyRef" in source]
        assert not [source for source in workload.container.get("envFrom", []) if "secretRef" in source]
        secrets = {volume["name"]: volume["secret"] for volume in workload.pod["volumes"] if "secret" in volume}
        assert set(secrets) <= ({"hub-token"} if workload.name == SERVER else {"api-keys", "tls"})
        for name, secret in secrets.items():
            (mount,) = [mount for mount in workload.container["volumeMounts"] if mount["name"] == name]
            # A folder and not a `subPath`, so that the process sees a change.
            assert mount["readOnly"] and "subPath" not in mount and secret["defaultMode"] == 0o440
            assert secret.get("optional", False) == (name == "hub-token")
            for setting in readers[name]:
                assert Path(workload.settings[setting]).parent == Path(mount["mountPath"])
        if secrets:  # the process may read them
            assert workload.pod["securityContext"]["fsGroup"] == workload.pod["securityContext"]["runAsGroup"]


@pytest.mark.parametrize(("component", "overlay"), [("api-keys", "keys"), ("tls", "tls")])
def test_the_gateways_files_have_the_paths_of_compose(tmp_path: Path, component: str, overlay: str) -> None:
    added = [KUSTOMIZE / "components" / component]
    gateway = render(write_overlay(tmp_path, [KUSTOMIZE / "overlays" / "cpu"], added)).workload(GATEWAY)
    compose = yaml.safe_load((ROOT / f"docker-compose.{overlay}.yml").read_text(encoding="utf-8"))["services"]
    assert compose["gateway"]["environment"].items() <= gateway.settings.items()


def test_images_have_this_versions_tag(rendered: Manifests) -> None:
    server = rendered.workload(SERVER)
    suffix = "-gpu" if server.settings["CHARONIA_DEVICE"] == "cuda" else ""
    assert server.container["image"] == f"charonia-server:{charonia.__version__}{suffix}"
    assert rendered.workload(GATEWAY).container["image"] == f"charonia-gateway:{charonia.__version__}"


# --- the network


def peers(rule: dict[str, Any], side: str, rendered: Manifests) -> Iterator[str]:
    for peer in rule.get(side, [{"ipBlock": {"cidr": "anyone"}}]):
        if "ipBlock" in peer:
            yield peer["ipBlock"]["cidr"]
        elif "namespaceSelector" in peer:
            (namespace,) = peer["namespaceSelector"]["matchLabels"].values()
            (label,) = peer["podSelector"]["matchLabels"].values()  # not also the labels of this application
            yield f"{label} in {namespace}"
        else:
            yield from rendered.selected(peer["podSelector"]["matchLabels"])


def connections(rendered: Manifests, kind: str, side: str) -> set[tuple[str, str, int]]:
    """Return the connections that policies allow: the pod of the policy, its peer, and the port."""
    return {
        (own, peer, port["port"])
        for policy in rendered.of("NetworkPolicy")
        for own in rendered.selected(policy["spec"]["podSelector"]["matchLabels"])
        for rule in policy["spec"].get(kind, [])
        for peer in peers(rule, side, rendered)
        for port in rule["ports"]
    }


def test_network_policies_allow_only_the_needed_connections(rendered: Manifests) -> None:
    assert connections(rendered, "ingress", "from") == {
        (SERVER, GATEWAY, 33337),
        (SERVER, "prometheus in monitoring", 33338),
        (GATEWAY, "anyone", 23333),
    }
    needed = {(GATEWAY, SERVER, 33337), (GATEWAY, "kube-dns in kube-system", 53)}
    if "HF_TOKEN_PATH" in rendered.workload(SERVER).settings:  # downloads models
        needed |= {(SERVER, "kube-dns in kube-system", 53), (SERVER, "0.0.0.0/0", 443)}
    assert connections(rendered, "egress", "to") == needed
    for workload in rendered.workloads:
        assert rendered.one("NetworkPolicy", workload.name)["spec"]["policyTypes"] == ["Ingress", "Egress"]


def test_probes_and_prometheus_send_requests_as_keys_and_tls_require(tmp_path: Path) -> None:
    components = [KUSTOMIZE / "components" / name for name in ("podmonitors", "api-keys", "tls")]
    rendered = render(write_overlay(tmp_path, [KUSTOMIZE / "overlays" / "cpu"], components))
    for item in rendered.objects:
        schemas.check(item, schemas.OLDEST)
    gateway, server = rendered.workload(GATEWAY), rendered.workload(SERVER)
    for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert gateway.container[kind]["httpGet"]["scheme"] == "HTTPS"
        assert "scheme" not in server.container[kind]["httpGet"], "Triton's HTTP port has no TLS"
    (own,), (other,) = (rendered.one("PodMonitor", name)["spec"]["podMetricsEndpoints"] for name in (GATEWAY, SERVER))
    assert own["scheme"] == "https" and own["tlsConfig"] == {"insecureSkipVerify": True}
    assert own["authorization"]["credentials"] == {"name": "charonia-metrics-key", "key": "key"}
    assert not {"scheme", "tlsConfig", "authorization"} & set(other)
