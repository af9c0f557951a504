"""deploy/kustomize: Kubernetes accepts it, and it agrees with the rest of this repository."""

from __future__ import annotations

import copy
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import schemas
import yaml
from charonia_gateway.settings import Settings
from manifests import (
    GIB,
    KUSTOMIZE,
    OVERLAYS,
    ROOT,
    Manifests,
    Workload,
    bytes_of,
    label_selectors,
    render,
    write_overlay,
)
from pydantic import AliasChoices

import charonia
from charonia import _engine
from charonia.serve.launcher import _KILL_AFTER_S
from charonia.serve.triton import EXIT_MARGIN_S
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


# --- objects that Kubernetes accepts


@pytest.mark.parametrize("version", schemas.VERSIONS)
def test_every_object_is_one_that_kubernetes_takes(rendered: Manifests, version: str) -> None:
    assert {"StatefulSet", "Deployment", "Service", "PodDisruptionBudget", "NetworkPolicy", "ServiceAccount"} <= {
        item["kind"] for item in rendered.objects
    }
    for item in rendered.objects:
        schemas.check(item, version)


def test_a_misspelt_field_is_refused_in_every_object() -> None:
    for item in render(KUSTOMIZE / "overlays" / "autoscale").objects:
        wrong = copy.deepcopy(item)
        wrong.setdefault("spec", wrong)["replikas"] = 2
        with pytest.raises(schemas.NotTakenError):
            schemas.check(wrong, schemas.OLDEST)


def test_every_claim_says_how_it_is_mounted(rendered: Manifests) -> None:
    claims = [*rendered.of("PersistentVolumeClaim"), *rendered.workload(SERVER).spec["volumeClaimTemplates"]]
    for claim in claims:
        assert claim["spec"]["accessModes"] and claim["spec"]["resources"]["requests"]["storage"]


# --- names, labels and ports


def test_selectors_choose_the_pods_of_one_workload(rendered: Manifests) -> None:
    for workload in rendered.workloads:
        assert rendered.selected(workload.spec["selector"]["matchLabels"]) == [workload.name]
        for spread in workload.pod["topologySpreadConstraints"]:
            assert rendered.selected(spread["labelSelector"]["matchLabels"]) == [workload.name]
    for item in rendered.of("Service"):
        assert rendered.selected(item["spec"]["selector"]) == [item["metadata"]["name"]]
    named = rendered.of("PodDisruptionBudget", "PodMonitor")
    assert {item["metadata"]["name"] for item in rendered.of("PodDisruptionBudget")} == {SERVER, GATEWAY}
    for item in named:
        assert rendered.selected(item["spec"]["selector"]["matchLabels"]) == [item["metadata"]["name"]]


def test_ports_are_those_of_the_contracts(rendered: Manifests) -> None:
    page = (ROOT / "docs" / "contracts.md").read_text(encoding="utf-8")
    line = re.search(r"Triton HTTP (\d+), gRPC (\d+), metrics (\d+); gateway (\d+)\.", page)
    assert line is not None
    http, grpc, metrics, gateway = map(int, line.groups())
    assert rendered.workload(SERVER).ports == {"http": http, "grpc": grpc, "metrics": metrics}
    assert rendered.workload(GATEWAY).ports == {"http": gateway}
    assert [ServeSettings.model_fields[f"{name}_port"].default for name in ("http", "grpc", "metrics", "gateway")] == [
        http,
        grpc,
        metrics,
        gateway,
    ]


def test_services_lead_to_ports_that_the_containers_have(rendered: Manifests) -> None:
    for item in rendered.of("Service"):
        ports = rendered.workload(item["metadata"]["name"]).ports
        for port in item["spec"]["ports"]:
            assert ports[port["targetPort"]] == port["port"]
    for item in rendered.of("PodMonitor"):
        ports = rendered.workload(item["metadata"]["name"]).ports
        for endpoint in item["spec"]["podMetricsEndpoints"]:
            assert endpoint["port"] in ports


def test_the_gateway_finds_every_server_that_is_ready_and_no_other(rendered: Manifests) -> None:
    """A headless service has an address for each pod, and removes it when the pod starts to shut down."""
    server = rendered.workload(SERVER)
    service = rendered.one("Service", server.spec["serviceName"])
    assert service["spec"]["clusterIP"] == "None" and not service["spec"].get("publishNotReadyAddresses")
    endpoints = rendered.workload(GATEWAY).settings["CHARONIA_TRITON_ENDPOINTS"]
    assert endpoints == f"dns:///{service['metadata']['name']}:{server.ports['grpc']}"


def test_pods_are_scraped_under_the_names_that_rules_and_dashboards_know() -> None:
    prometheus = ROOT / "monitoring" / "prometheus"
    triton, gateway = yaml.safe_load((prometheus / "prometheus.yml").read_text(encoding="utf-8"))["scrape_configs"][:2]
    (file,) = gateway["file_sd_configs"][0]["files"]
    targets = (triton["static_configs"], yaml.safe_load((prometheus / file).read_text(encoding="utf-8")))
    jobs = {job["job_name"]: of[0]["targets"][0] for job, of in zip((triton, gateway), targets, strict=True)}
    rendered = render(KUSTOMIZE / "overlays" / "autoscale")
    found = {}
    for item in rendered.of("PodMonitor"):
        (endpoint,) = item["spec"]["podMetricsEndpoints"]
        (relabeling,) = endpoint["relabelings"]
        assert relabeling["targetLabel"] == "job"
        port = rendered.workload(item["metadata"]["name"]).ports[endpoint["port"]]
        found[relabeling["replacement"]] = f"{item['metadata']['name'].removeprefix('charonia-')}:{port}"
    assert found == jobs


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


def test_every_variable_is_a_setting(rendered: Manifests) -> None:
    server, gateway = rendered.workload(SERVER), rendered.workload(GATEWAY)
    assert {*gateway.settings, *gateway.references} <= gateway_variables()
    assert {*server.settings, *server.references} <= server_variables() | {"HF_HOME", "HF_TOKEN_PATH"}


def test_the_hubs_library_reads_its_two_variables(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("hf_secret\n", encoding="utf-8")
    code = "from huggingface_hub import constants, get_token; print(constants.HF_HOME, get_token())"
    env = {**os.environ, "HF_HOME": "/var/lib/charonia/hub", "HF_TOKEN_PATH": str(token)}
    env.pop("HF_TOKEN", None)
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["/var/lib/charonia/hub", "hf_secret"]


def test_values_of_settings_are_allowed(rendered: Manifests, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    server, gateway = rendered.workload(SERVER), rendered.workload(GATEWAY)
    for workload, check in ((server, ServeSettings), (gateway, Settings)):
        with monkeypatch.context() as environment:
            for name, value in workload.settings.items():
                environment.setenv(name, value)
            settings = check()
    assert settings.host == "0.0.0.0"  # of the gateway
    keys = {entry.key for entry in _engine.config_fields()}
    inference = {name.removeprefix(PREFIX).lower(): value for name, value in server.settings.items()}
    _engine.check_settings({key: value for key, value in inference.items() if key in keys})


def test_variables_that_kubernetes_makes_of_services_do_not_reach_the_settings(rendered: Manifests) -> None:
    """The service charonia-gateway would make CHARONIA_GATEWAY_PORT = tcp://... in every pod of its namespace."""
    made = {f"{item['metadata']['name'].upper().replace('-', '_')}_PORT" for item in rendered.of("Service")}
    assert made & gateway_variables()
    for workload in rendered.workloads:
        assert workload.pod["enableServiceLinks"] is False


def test_the_engine_has_as_many_threads_and_gpus_as_its_container(rendered: Manifests) -> None:
    server = rendered.workload(SERVER)
    source = server.references["CHARONIA_THREADS"]["resourceFieldRef"]
    assert source == {
        "containerName": server.container["name"],
        "resource": "limits.cpu",
        "divisor": "0",
    } or source == {
        "containerName": server.container["name"],
        "resource": "limits.cpu",
    }
    assert cores_of(server.container["resources"]["limits"]["cpu"]).is_integer()
    gpus = server.container["resources"]["limits"].get("nvidia.com/gpu")
    assert (server.settings["CHARONIA_DEVICE"] == "cuda") == (gpus is not None)
    assert gpus is None or gpus == server.settings["CHARONIA_TENSOR_PARA_SIZE"]


# --- start and end


def probe_seconds(probe: dict[str, Any]) -> int:
    return int(probe["failureThreshold"]) * int(probe["periodSeconds"])


def test_a_start_may_take_as_long_as_the_server_lets_it(rendered: Manifests) -> None:
    server = rendered.workload(SERVER)
    assert probe_seconds(server.container["startupProbe"]) > float(server.settings["CHARONIA_START_TIMEOUT_S"])


def test_readiness_goes_sooner_than_the_life(rendered: Manifests) -> None:
    for workload in rendered.workloads:
        readiness, liveness = workload.container["readinessProbe"], workload.container["livenessProbe"]
        assert "live" in liveness["httpGet"]["path"] and "ready" in readiness["httpGet"]["path"]
        assert probe_seconds(readiness) < probe_seconds(liveness)


def test_pods_may_end_in_order(rendered: Manifests) -> None:
    """The grace period covers preStop, the drain and the rest of the shutdown."""

    def times(workload: Workload) -> tuple[float, float, float]:
        sleep = workload.container["lifecycle"]["preStop"]["sleep"]["seconds"]
        drain = float(workload.settings["CHARONIA_DRAIN_TIMEOUT_S"])
        return workload.pod["terminationGracePeriodSeconds"], sleep, drain

    grace, sleep, drain = times(rendered.workload(GATEWAY))
    assert sleep >= 5 and grace > sleep + drain + 5
    grace, sleep, drain = times(rendered.workload(SERVER))
    assert sleep >= 5 and grace >= sleep + 2 * drain + EXIT_MARGIN_S + _KILL_AFTER_S


def test_nodes_are_emptied_one_pod_at_a_time(rendered: Manifests) -> None:
    for item in rendered.of("PodDisruptionBudget"):
        assert item["spec"]["maxUnavailable"] == 1


# --- resources and privileges


def test_every_container_has_its_share(rendered: Manifests) -> None:
    for workload in rendered.workloads:
        requests, limits = (workload.container["resources"][kind] for kind in ("requests", "limits"))
        for resource in ("cpu", "memory", "ephemeral-storage"):
            of = cores_of if resource == "cpu" else bytes_of
            assert 0 < of(requests[resource]) <= of(limits[resource])


def test_the_servers_memory_holds_what_it_is_told_to_take(rendered: Manifests) -> None:
    server = rendered.workload(SERVER)
    volumes = {volume["name"]: volume for volume in server.pod["volumes"]}
    shm = volumes["shm"]["emptyDir"]
    assert shm["medium"] == "Memory" and bytes_of(shm["sizeLimit"]) >= GIB
    cache = bytes_of(server.settings.get("CHARONIA_CACHE_SIZE", "0"))
    assert bytes_of(server.container["resources"]["limits"]["memory"]) >= cache + bytes_of(shm["sizeLimit"]) + GIB


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
        assert pod["automountServiceAccountToken"] is False
        account = rendered.one("ServiceAccount", pod["serviceAccountName"])
        assert account["automountServiceAccountToken"] is False


def test_what_is_written_is_on_a_volume(rendered: Manifests) -> None:
    for workload in rendered.workloads:
        mounts = workload.container["volumeMounts"]
        claims = {claim["metadata"]["name"] for claim in workload.spec.get("volumeClaimTemplates", [])}
        volumes = {volume["name"] for volume in workload.pod["volumes"]} | claims
        assert {mount["name"] for mount in mounts} == volumes
        writable = [mount["mountPath"] for mount in mounts if not mount.get("readOnly")]
        assert "/tmp" in writable
        for name in {"CHARONIA_RUN_DIR", "HF_HOME"} & workload.settings.keys():
            assert any(Path(workload.settings[name]).is_relative_to(folder) for folder in writable)
            persistent = [mount["mountPath"] for mount in mounts if mount["name"] in claims]
            assert any(Path(workload.settings[name]).is_relative_to(folder) for folder in persistent)


def test_a_secret_is_only_where_it_is_used(rendered: Manifests) -> None:
    """The token of the hub is a file of the server. API keys and a certificate are files of the gateway, which needs
    them to start. No variable contains a secret, and the manifests contain none."""
    readers = {
        "hub-token": ["HF_TOKEN_PATH"],
        "api-keys": ["CHARONIA_GATEWAY_KEYS_FILE"],
        "tls": ["CHARONIA_GATEWAY_TLS_CERT", "CHARONIA_GATEWAY_TLS_KEY"],
    }
    for workload in rendered.workloads:
        assert not [name for name, source in workload.references.items() if "secretKeyRef" in source]
        assert not [source for source in workload.container.get("envFrom", []) if "secretRef" in source]
        secrets = {volume["name"]: volume["secret"] for volume in workload.pod["volumes"] if "secret" in volume}
        assert set(secrets) <= ({"hub-token"} if workload.name == SERVER else {"api-keys", "tls"})
        for name, secret in secrets.items():
            (mount,) = [mount for mount in workload.container["volumeMounts"] if mount["name"] == name]
            assert mount["readOnly"] and secret["defaultMode"] == 0o440
            assert secret.get("optional", False) == (name == "hub-token")
            for setting in readers[name]:
                assert Path(workload.settings[setting]).parent == Path(mount["mountPath"])
    assert not rendered.of("Secret")


# --- images


def test_images_have_this_versions_tag(rendered: Manifests) -> None:
    server = rendered.workload(SERVER)
    suffix = "-gpu" if server.settings["CHARONIA_DEVICE"] == "cuda" else ""
    assert server.container["image"] == f"charonia-server:{charonia.__version__}{suffix}"
    assert rendered.workload(GATEWAY).container["image"] == f"charonia-gateway:{charonia.__version__}"


def test_images_come_from_a_registry_of_the_users(tmp_path: Path) -> None:
    images = [{"name": name, "newName": f"registry.example.com/ai/{name}", "newTag": "7"} for name in (SERVER, GATEWAY)]
    for overlay in OVERLAYS:
        own = render(write_overlay(tmp_path / overlay, [KUSTOMIZE / "overlays" / overlay], images=images))
        found = {workload.name: workload.container["image"] for workload in own.workloads}
        assert found == {name: f"registry.example.com/ai/{name}:7" for name in (SERVER, GATEWAY)}


# --- the network


def _peers(rule: dict[str, Any], side: str, rendered: Manifests) -> list[str]:
    if side not in rule:
        return ["anyone"]
    names = []
    for peer in rule[side]:
        if "ipBlock" in peer:
            names.append(peer["ipBlock"]["cidr"])
            continue
        labels = peer["podSelector"]["matchLabels"]
        if "namespaceSelector" in peer:
            (namespace,) = peer["namespaceSelector"]["matchLabels"].values()
            (label,) = labels.values()
            names.append(f"{label} in {namespace}")
        else:
            names += rendered.selected(labels)
    return names


def flows(rendered: Manifests) -> tuple[set[tuple[str, str, int]], set[tuple[str, str, int]]]:
    """Return (client, server, port) of the connections that policies accept, and of those that they let out."""
    let_in, let_out = set(), set()
    for policy in rendered.of("NetworkPolicy"):
        (own,) = rendered.selected(policy["spec"]["podSelector"]["matchLabels"])
        for rule in policy["spec"].get("ingress", []):
            let_in |= {(who, own, port["port"]) for who in _peers(rule, "from", rendered) for port in rule["ports"]}
        for rule in policy["spec"].get("egress", []):
            let_out |= {(own, whom, port["port"]) for whom in _peers(rule, "to", rendered) for port in rule["ports"]}
    return let_in, let_out


def test_the_network_carries_what_is_needed_and_no_more(rendered: Manifests) -> None:
    let_in, let_out = flows(rendered)
    dns = "kube-dns in kube-system"
    assert let_in == {
        (GATEWAY, SERVER, 33337),
        ("prometheus in monitoring", SERVER, 33338),
        ("anyone", GATEWAY, 23333),
    }
    hub_download = {(SERVER, dns, 53), (SERVER, "0.0.0.0/0", 443)}
    hub_models = "HF_TOKEN_PATH" in rendered.workload(SERVER).settings
    assert let_out == {(GATEWAY, SERVER, 33337), (GATEWAY, dns, 53)} | (hub_download if hub_models else set())
    for workload in rendered.workloads:
        policy = rendered.one("NetworkPolicy", workload.name)
        assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
        assert rendered.selected(policy["spec"]["podSelector"]["matchLabels"]) == [workload.name]


def test_labels_of_this_application_are_on_no_one_elses_pods(rendered: Manifests) -> None:
    """A kustomization that adds labels to selectors would also add them to Prometheus and DNS in the policies."""
    own = {"app.kubernetes.io/name", "app.kubernetes.io/component"}
    for item in rendered.objects:
        for labels in label_selectors(item.get("spec", {})):
            assert set(labels) == own or len(labels) == 1


@pytest.mark.parametrize(
    ("component", "overlay", "variables"),
    [
        ("api-keys", "keys", ["CHARONIA_GATEWAY_KEYS_FILE"]),
        ("tls", "tls", ["CHARONIA_GATEWAY_TLS_CERT", "CHARONIA_GATEWAY_TLS_KEY"]),
    ],
)
def test_the_gateways_files_are_mounted_as_a_folder_so_that_a_change_is_seen(
    tmp_path: Path, component: str, overlay: str, variables: list[str]
) -> None:
    """At the same path as with compose."""
    rendered = render(write_overlay(tmp_path, [KUSTOMIZE / "overlays" / "cpu"], [KUSTOMIZE / "components" / component]))
    gateway = rendered.workload(GATEWAY)
    (mount,) = [one for one in gateway.container["volumeMounts"] if one["name"] == component]
    files = {name: gateway.settings[name] for name in variables}
    assert {str(Path(file).parent) for file in files.values()} == {mount["mountPath"]} and "subPath" not in mount
    assert gateway.pod["securityContext"]["fsGroup"] == gateway.pod["securityContext"]["runAsGroup"], "it may read them"
    compose = yaml.safe_load((ROOT / f"docker-compose.{overlay}.yml").read_text(encoding="utf-8"))
    assert compose["services"]["gateway"]["environment"] == files
    assert compose["services"]["gateway"]["volumes"][0].split(":")[-2:] == [mount["mountPath"], "ro"]


def test_probes_and_prometheus_ask_a_gateway_with_keys_and_tls_as_it_wants(tmp_path: Path) -> None:
    components = [KUSTOMIZE / "components" / name for name in ("podmonitors", "api-keys", "tls")]
    rendered = render(write_overlay(tmp_path, [KUSTOMIZE / "overlays" / "cpu"], components))
    for item in rendered.objects:
        schemas.check(item, schemas.OLDEST)
    gateway, server = rendered.workload(GATEWAY), rendered.workload(SERVER)
    assert {"api-keys", "tls"} <= {volume["name"] for volume in gateway.pod["volumes"]}
    for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert gateway.container[kind]["httpGet"]["scheme"] == "HTTPS"
        assert "scheme" not in server.container[kind]["httpGet"], "Triton's HTTP port has no TLS"
    (port,) = rendered.one("Service", GATEWAY)["spec"]["ports"]
    assert port["appProtocol"] == "https"
    (own,), (other,) = (rendered.one("PodMonitor", name)["spec"]["podMetricsEndpoints"] for name in (GATEWAY, SERVER))
    assert own["scheme"] == "https" and own["tlsConfig"] == {"insecureSkipVerify": True}
    assert own["authorization"]["credentials"] == {"name": "charonia-metrics-key", "key": "key"}
    assert not {"scheme", "tlsConfig", "authorization"} & set(other)


def test_with_tls_compose_has_prometheus_ask_the_same_gateway_by_https() -> None:
    """The targets of the two jobs are exchanged."""
    overlay = yaml.safe_load((ROOT / "docker-compose.tls.yml").read_text(encoding="utf-8"))["services"]["prometheus"]
    base = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))["services"]["prometheus"]
    folder, mounted, _ = base["volumes"][0].split(":")
    config = yaml.safe_load((ROOT / folder / "prometheus.yml").read_text(encoding="utf-8"))
    jobs = {job["job_name"]: job for job in config["scrape_configs"]}
    plain, unchecked = (
        ROOT / folder / jobs[name]["file_sd_configs"][0]["files"][0] for name in ("gateway", "gateway-unchecked")
    )
    places = {}
    for volume in overlay["volumes"]:
        source, target, _ = volume.split(":")
        places[ROOT / source] = ROOT / folder / Path(target).relative_to(mounted)
    assert places == {plain: unchecked, unchecked: plain}
    assert jobs["gateway-unchecked"]["scheme"] == "https" and "tls_config" not in jobs["gateway"]
