"""docker compose up: its defaults, its published ports, and its internal ports."""

from __future__ import annotations

import json
import os
import re
import shutil
import ssl
import time
from dataclasses import replace
from pathlib import Path

import httpx
import openai
import pytest
from certificates import Authority
from project import HANG_S, ROOT, Project, docker, remove, run
from waiting import wait_until

SERVICES = ("server", "gateway", "prometheus")


def test_one_command_starts_healthy_services(demo: Project) -> None:
    for service in SERVICES:
        assert demo.container(service)["State"]["Health"]["Status"] == "healthy"


def test_gateway_answers_chat(demo: Project) -> None:
    with openai.OpenAI(base_url=f"{demo.gateway}/v1", api_key="none", max_retries=0, timeout=HANG_S) as client:
        question = [{"role": "user", "content": "What is the capital of France?"}]
        answer = client.chat.completions.create(model="demo", messages=question, temperature=0, max_tokens=64)
        assert "Paris" in answer.choices[0].message.content
        assert answer.choices[0].finish_reason == "stop"
        chunks = client.chat.completions.create(
            model="demo", messages=question, temperature=0, max_tokens=64, stream=True
        )
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert streamed == answer.choices[0].message.content


def test_gateway_serves_chat_page_with_libraries(demo: Project) -> None:
    with httpx.Client(base_url=demo.gateway, timeout=HANG_S) as gateway:
        page = gateway.get("/")
        assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
        files = re.findall(r'(?:src|href)="(page/[^"]+)"', page.text)
        assert any("/libraries/" in file for file in files)
        assert {file: gateway.get(f"/{file}").status_code for file in files} == dict.fromkeys(files, 200)


def test_prometheus_scrapes_services_and_has_rules(demo: Project) -> None:
    with httpx.Client(base_url=demo.address("prometheus", 9090), timeout=HANG_S) as prometheus:
        for query in ('up{job="triton"} == 1', 'up{job="gateway"} == 1', "charonia_num_requests_running"):
            deadline = time.monotonic() + HANG_S
            while not prometheus.get("/api/v1/query", params={"query": query}).json()["data"]["result"]:
                assert time.monotonic() < deadline, f"{query} has no answer"
                time.sleep(0.5)
        groups = prometheus.get("/api/v1/rules").json()["data"]["groups"]
    kinds = {rule["type"] for group in groups for rule in group["rules"]}
    assert kinds == {"recording", "alerting"}
    assert not [rule for group in groups for rule in group["rules"] if rule["health"] == "err"]


def test_only_gateway_and_grafana_are_published(demo: Project) -> None:
    services = Project(demo.folder, files=[ROOT / "docker-compose.yml"]).config("--profile", "*")["services"]
    published = {name: service["ports"] for name, service in services.items() if service.get("ports")}
    assert set(published) == {"gateway", "grafana"}
    assert [port["host_ip"] for port in published["grafana"]] == ["127.0.0.1"]
    assert demo.container("server")["HostConfig"]["PortBindings"] == {}


def test_secrets_reach_only_their_service(demo: Project) -> None:
    services = demo.config("--profile", "*")["services"]
    with_password = {name for name, service in services.items() if "grafanas-password" in json.dumps(service)}
    assert with_password == {"grafana"}
    with_token = {name for name, service in services.items() if service.get("secrets")}
    assert with_token == {"model", "server"}
    for service in SERVICES:
        environment = demo.container(service)["Config"]["Env"]
        assert not [entry for entry in environment if "hub-token" in entry or "grafanas-password" in entry]
    assert demo.compose("exec", "--no-TTY", "server", "cat", "/run/secrets/hf_token").stdout == "hub-token"


@pytest.mark.parametrize("service", SERVICES)
def test_containers_have_minimal_rights(demo: Project, service: str) -> None:
    container = demo.container(service)
    host = container["HostConfig"]
    assert service != "server" or host["ShmSize"] == 1 << 30  # for Triton's Python models
    assert host["ReadonlyRootfs"]
    assert host["CapDrop"] == ["ALL"]
    assert "no-new-privileges:true" in host["SecurityOpt"]
    assert host["RestartPolicy"]["Name"] == "unless-stopped"
    assert demo.compose("exec", "--no-TTY", service, "id", "--user").stdout.strip() != "0"
    (first,) = [line for line in docker("top", container["Id"], "-eo", "pid,comm").splitlines()[1:2]]
    assert first.split()[1] in ("tini", "docker-init")
    refused = demo.compose("exec", "--no-TTY", service, "touch", "/etc/written", check=False)
    assert refused.returncode != 0
    assert "Read-only" in refused.stderr


def test_killed_server_is_started_again(demo: Project) -> None:
    """In a container `charonia serve` restarts nothing, but ends, and Docker starts the container again."""
    program = (
        "import os, pathlib\n"
        "for folder in pathlib.Path('/proc').glob('[0-9]*'):\n"
        "    if (folder / 'comm').read_text().strip() == 'tritonserver':\n"
        "        os.kill(int(folder.name), 9)"
    )
    demo.compose("exec", "--no-TTY", "server", "python3", "-c", program)
    wait_until(lambda: demo.container("server")["RestartCount"] >= 1)
    body = {"model": "demo", "prompt": "One,", "max_tokens": 1}
    with httpx.Client(base_url=demo.gateway, timeout=HANG_S) as gateway:
        wait_until(lambda: gateway.post("/v1/completions", json=body).status_code == 200)


@pytest.fixture
def closed(demo: Project, tmp_path: Path) -> Project:
    """The demo with API keys, and with TLS for REST and to Triton. The key in the file `alice` allows inference."""
    authority = Authority(tmp_path)
    for service, name in (("gateway", "localhost"), ("server", "server")):
        pair = authority.issue(service, name)
        folder = tmp_path / "certificates" / service
        folder.mkdir(parents=True)
        for source, file in ((pair.cert, "tls.crt"), (pair.key, "tls.key"), (authority.ca, "ca.crt")):
            shutil.copy(source, folder / file)
    keys = tmp_path / "keys" / "keys.json"
    keys.parent.mkdir()
    # As described in docs/security.md for users with Docker only.
    make = ["run", "--rm", "--no-deps", "--no-TTY", "--user", f"{os.getuid()}:{os.getgid()}"]
    make += ["--volume", f"{keys.parent}:/keys", "--entrypoint", "charonia_gateway_keys", "gateway"]
    for name, access in (("alice", "inference"), ("prometheus", "metrics")):
        made = demo.compose(*make, "create", name, "--access", access, "--file", "/keys/keys.json")
        (tmp_path / name).write_text(made.stdout)
    run(["chmod", "--recursive", "a+rX", tmp_path])  # the containers run as other users
    settings = {
        "CHARONIA_KEYS": keys.parent,
        "CHARONIA_METRICS_KEY": tmp_path / "prometheus",
        "CHARONIA_CERTIFICATES": tmp_path / "certificates",
        "CHARONIA_GRPC_TLS_CERT": "/run/secrets/tls/tls.crt",
        "CHARONIA_GRPC_TLS_KEY": "/run/secrets/tls/tls.key",
        "CHARONIA_TRITON_TLS_CA": "/run/secrets/tls/ca.crt",
        "CHARONIA_TRITON_TLS_NAME": "server",
    }
    overlays = [ROOT / f"docker-compose.{name}.yml" for name in ("keys", "tls")]
    more = {name: str(value) for name, value in settings.items()}
    return replace(demo, folder=tmp_path, settings={**demo.settings, **more}, files=[*demo.files, *overlays])


def test_down_is_graceful_and_second_start_reuses_workspace(demo: Project, closed: Project) -> None:
    """The second start has API keys and TLS, and the demo keeps them for the next tests."""
    look = "stat -c '%i %Y' /var/lib/charonia/workspaces/*/triton_models/weights/manifest.json"

    def workspaces() -> str:
        return demo.compose("exec", "--no-TTY", "server", "sh", "-c", look).stdout

    before = workspaces()
    assert len(before.splitlines()) == 1
    try:
        # `down` would also remove the containers, and with them their exit codes.
        demo.compose("stop")
        ended = {service: demo.container(service)["State"]["ExitCode"] for service in SERVICES}
        assert ended == dict.fromkeys(SERVICES, 0), "137 is a container that had to be killed"
        demo.compose("down")
    finally:
        closed.up()
    assert workspaces() == before
    check_keys_and_tls(closed)


def check_keys_and_tls(closed: Project) -> None:
    port = closed.gateway.rpartition(":")[2]
    trust = ssl.create_default_context(cafile=closed.folder / "certificates" / "gateway" / "ca.crt")
    with httpx.Client(base_url=f"https://localhost:{port}", verify=trust, timeout=HANG_S) as gateway:
        asked = {"model": "demo", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
        assert gateway.post("/v1/chat/completions", json=asked).status_code == 401
        key = {"Authorization": f"Bearer {(closed.folder / 'alice').read_text().strip()}"}
        answer = gateway.post("/v1/chat/completions", json=asked, headers=key)
        assert answer.status_code == 200 and answer.json()["choices"][0]["message"]["content"]
        assert gateway.get("/metrics", headers=key).status_code == 403
    with httpx.Client(base_url=closed.address("prometheus", 9090), timeout=HANG_S) as prometheus:
        deadline = time.monotonic() + HANG_S
        while True:
            targets = prometheus.get("/api/v1/targets").json()["data"]["activeTargets"]
            found = [(one["scrapeUrl"], one["health"]) for one in targets if one["labels"]["job"] == "gateway"]
            if found == [("https://gateway:23333/metrics", "up")]:
                break
            assert time.monotonic() < deadline, targets
            time.sleep(0.5)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"MODEL": "/models/nowhere"}, r"error: /models/nowhere does not exist, and '/models/nowhere' is not a hub id"),
        ({"CHARONIA_THREADS": "many"}, r".*threads.*many"),
    ],
)
def test_wrong_model_or_setting_is_one_log_line(
    images: None, tmp_path: Path, setting: dict[str, str], said: str
) -> None:
    project = Project(tmp_path, setting)
    try:
        done = project.up(check=False)
        assert done.returncode != 0 and "model" in done.stderr
        log = project.logs("model").strip()
        assert "\n" not in log and re.match(said, log), log
        assert project.logs("server") == ""
    finally:
        remove(project)


def test_gpu_file_reserves_and_builds_for_gpus(engine: None, tmp_path: Path) -> None:
    files = [ROOT / "docker-compose.yml", ROOT / "docker-compose.gpu.yml"]
    services = Project(tmp_path, {"TRITON_IMAGE": "triton:24.10"}, files).config()["services"]
    server = services["server"]
    assert server["build"]["args"]["CHARONIA_CUDA"] == "ON"
    assert server["build"]["args"]["TRITON_IMAGE"] == "triton:24.10"
    assert server["environment"]["CHARONIA_DEVICE"] == "cuda"
    (devices,) = server["deploy"]["resources"]["reservations"]["devices"]
    assert (devices["driver"], devices["capabilities"]) == ("nvidia", ["gpu"])
    assert services["model"]["image"] == server["image"]
    assert "gateway" in services and "deploy" not in services["gateway"]
