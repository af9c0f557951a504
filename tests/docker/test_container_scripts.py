"""service_docker_up.sh on a real engine."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from project import HANG_S, ROOT, TAG, clean_environment, docker, run
from stack import answers, free_ports

CHARONIA = Path(sys.executable).parent / "charonia"
DEMO_MODEL = ROOT / "models" / "demo" / "model"


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model, converted for two ranks."""
    folder = tmp_path_factory.mktemp("converted") / "demo"
    run([CHARONIA, "convert", DEMO_MODEL, "--dst-path", folder, "--tp", "2"])
    run(["chmod", "--recursive", "a+rX", folder])
    return folder


@pytest.fixture
def container() -> Iterator[str]:
    name = f"charonia-test-{uuid.uuid4().hex[:8]}"
    yield name
    docker("rm", "--force", name, check=False)


def up(script: Path, *options: str, check: bool = True, **env: str) -> subprocess.CompletedProcess[str]:
    return run([script, "--image", f"charonia-server:{TAG}", *options], check=check, env=clean_environment(**env))


def test_workspace_is_served_in_container(images: None, workspace: Path, container: str) -> None:
    ports = free_ports(3)
    names = ("CHARONIA_HTTP_PORT", "CHARONIA_GRPC_PORT", "CHARONIA_METRICS_PORT")
    env = {name: str(port) for name, port in zip(names, ports, strict=True)}
    options = ("--detach", "--name", container, "--tp", "2", "--shm-size", "512m", "--gpus", "none")
    up(
        workspace / "service_docker_up.sh",
        *options,
        CHARONIA_CACHE_MAX_ENTRY_COUNT="64",
        CHARONIA_HTTP_INFERENCE="1",
        **env,
    )
    url = f"http://127.0.0.1:{ports[0]}/v2"
    deadline = time.monotonic() + HANG_S
    while not answers(f"{url}/health/ready"):
        assert time.monotonic() < deadline, docker("logs", container)
        time.sleep(0.2)
    asked = {"text_input": "One, two,", "max_tokens": 8}
    answer = httpx.post(f"{url}/models/ensemble/generate", json=asked, timeout=HANG_S)
    assert answer.status_code == 200
    assert answer.json()["text_output"]
    assert answers(f"http://127.0.0.1:{ports[2]}/metrics")
    inspected = json.loads(docker("inspect", container))[0]
    assert inspected["HostConfig"]["ShmSize"] == 512 << 20
    assert {"CHARONIA_TENSOR_PARA_SIZE=2", "CHARONIA_CACHE_MAX_ENTRY_COUNT=64"} <= set(inspected["Config"]["Env"])
    docker("stop", container)
