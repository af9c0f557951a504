"""What container images are made of, and what their scripts say before they need a Docker engine."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from charonia_gateway.settings import Settings as GatewaySettings
from packaging.requirements import Requirement
from packaging.version import Version

import charonia

if sys.version_info >= (3, 11):
    import tomllib
else:
    pytest.skip("reads pyproject.toml with Python 3.11's tomllib", allow_module_level=True)

ROOT = Path(__file__).resolve().parents[2]
REQUIREMENTS = ROOT / "docker" / "requirements"
SERVICE_UP = ROOT / "scripts" / "service_docker_up.sh"
OWN = ("charonia-client", "charonia-gateway")


def locked(name: str) -> dict[str, Version]:
    """Exact versions by package, of the entries that count for this Python."""
    text = (REQUIREMENTS / f"{name}.txt").read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line.partition(" --hash")[0] for line in text.splitlines() if line and not line.startswith((" ", "#"))]
    entries = [Requirement(line) for line in lines]
    here = [entry for entry in entries if entry.marker is None or entry.marker.evaluate()]
    return {entry.name: Version(str(entry.specifier).removeprefix("==")) for entry in here}


def wanted(project: str) -> list[Requirement]:
    with (ROOT / project / "pyproject.toml").open("rb") as file:
        return [Requirement(line) for line in tomllib.load(file)["project"]["dependencies"]]


@pytest.mark.parametrize(
    ("name", "projects"), [("server", (".",)), ("gateway", ("gateway", "client"))], ids=["server", "gateway"]
)
def test_pinned_versions_are_those_that_the_packages_ask_for(name: str, projects: tuple[str, ...]) -> None:
    versions = locked(name)
    asked = [entry for project in projects for entry in wanted(project) if entry.name not in OWN]
    beside = REQUIREMENTS / f"{name}.in"
    lines = beside.read_text(encoding="utf-8").splitlines() if beside.exists() else []
    asked += [Requirement(line) for line in lines if not line.startswith("#")]
    assert asked
    missing = [str(entry) for entry in asked if entry.name not in versions]
    assert not missing, f"run scripts/lock_images.sh: {missing}"
    unfit = [f"{entry}: {versions[entry.name]}" for entry in asked if versions[entry.name] not in entry.specifier]
    assert not unfit, f"run scripts/lock_images.sh: {unfit}"


def test_the_server_image_has_the_client_of_the_liveness_probe() -> None:
    assert "grpcio" in locked("server")


def test_the_images_triton_is_the_packages() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        serve = tomllib.load(file)["project"]["optional-dependencies"]["serve"]
    (pinned,) = [entry for entry in serve if entry.startswith("nvidia-pytriton")]
    assert pinned in (REQUIREMENTS / "triton.in").read_text(encoding="utf-8").splitlines()
    assert locked("triton") == {"nvidia-pytriton": Version(pinned.partition("==")[2])}


@pytest.mark.parametrize("name", ["server", "gateway"])
def test_images_have_the_packages_version(name: str) -> None:
    text = (ROOT / "docker" / f"{name}.Dockerfile").read_text(encoding="utf-8")
    assert re.findall(r"^ARG VERSION=(.*)$", text, re.MULTILINE) == [charonia.__version__]


def test_every_setting_of_the_gateway_can_be_set_in_compose() -> None:
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))["services"]
    given = {name.lower() for name in services["gateway"]["environment"]}
    inside = {"host", "port", "grpc_port"}  # the container's own business
    for name, field in GatewaySettings.model_fields.items():
        names = {str(choice) for choice in field.validation_alias.choices}  # type: ignore[union-attr]
        assert name in inside or names & given, f"{name} is missing in docker-compose.yml"


def test_every_variable_of_compose_is_in_the_example_or_a_setting() -> None:
    example = set(re.findall(r"^#([A-Z_]+)=", (ROOT / ".env.example").read_text(encoding="utf-8"), re.MULTILINE))
    files = sorted(ROOT.glob("docker-compose*.yml"))
    read = {name for file in files for name in re.findall(r"\$\{([A-Z_]+)", file.read_text(encoding="utf-8"))}
    assert read <= example


def up(*options: str | Path, path: str) -> subprocess.CompletedProcess[str]:
    command = ["/bin/bash", str(SERVICE_UP), *map(str, options)]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PATH": path}, timeout=300)


def programs(folder: Path, **scripts: str) -> str:
    """A PATH with the usual programs, without docker and GPUs, and the given ones."""
    folder.mkdir()
    for name in ("getopt", "dirname", "grep", "sed", "sort", "tr", "xargs", "bash"):
        (folder / name).symlink_to(next(file for file in (Path("/usr/bin", name), Path("/bin", name)) if file.exists()))
    for name, text in scripts.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    return str(folder)


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    weights = tmp_path / "my workspace" / "triton_models" / "weights"
    weights.mkdir(parents=True)
    (weights / "manifest.json").write_text('{"files": {"/models/a b/model.safetensors": {"bytes": 1}}}')
    return tmp_path / "my workspace"


def test_no_docker_is_named_with_what_installs_it(workspace: Path, tmp_path: Path) -> None:
    done = up("--workspace", workspace, path=programs(tmp_path / "bin"))
    assert done.returncode == 1
    assert "docker is not installed (Debian and Ubuntu: docker.io)" in done.stderr


def test_a_silent_daemon_is_named(workspace: Path, tmp_path: Path) -> None:
    done = up("--workspace", workspace, path=programs(tmp_path / "bin", docker="exit 1"))
    assert done.returncode == 1
    assert "the Docker daemon does not answer" in done.stderr


def test_gpus_without_the_nvidia_runtime_are_named(workspace: Path, tmp_path: Path) -> None:
    path = programs(tmp_path / "bin", docker="echo runc io.containerd.runc.v2", **{"nvidia-smi": "exit 0"})
    done = up("--workspace", workspace, path=path)
    assert done.returncode == 1
    assert "Docker has no NVIDIA runtime, and --gpus all needs it" in done.stderr
    assert "--gpus none" in done.stderr


def test_a_folder_that_is_no_workspace_is_named(tmp_path: Path) -> None:
    done = up("--workspace", tmp_path, path=programs(tmp_path / "bin"))
    assert done.returncode == 1
    assert f"{tmp_path} is no workspace: charonia convert MODEL --dst-path {tmp_path} makes one" in done.stderr


def test_an_unknown_option_is_named(workspace: Path, tmp_path: Path) -> None:
    done = up("--workspace", workspace, "--gpu", "all", "--cpus", "2", path=programs(tmp_path / "bin"))
    assert done.returncode == 1
    assert "--cpus" in done.stderr
    assert "options for docker run come after --" in done.stderr


def test_options_and_linked_folders_reach_docker(workspace: Path, tmp_path: Path) -> None:
    path = programs(tmp_path / "bin", docker='[ "$1" = run ] && printf "%s\\n" "$@" || echo nvidia runc')
    options = ("--gpus", "device=0,1", "--tp", "2", "--shm-size", "3g", "--image", "mine:1", "--", "--cpus", "2")
    done = up("--workspace", workspace, *options, path=path)
    assert done.returncode == 0, done.stderr
    arguments = done.stdout.splitlines()
    assert arguments[-3:] == ["--cpus", "2", "mine:1"]
    pairs = list(itertools.pairwise(arguments))
    assert ("--gpus", "device=0,1") in pairs
    assert ("--env", "CHARONIA_TENSOR_PARA_SIZE=2") in pairs
    assert ("--shm-size", "3g") in pairs
    assert ("--env", "CHARONIA_MAX_RESTARTS=5") in pairs
    assert ("--volume", "/models/a b:/models/a b:ro") in pairs
    assert ("--volume", f"{workspace}:/workspace:ro") in pairs
    for port in (33336, 33337, 33338):
        assert ("--publish", f"127.0.0.1:{port}:{port}") in pairs


def test_ports_of_a_container_are_opened_by_an_address_that_stays_here(
    workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CHARONIA_TRITON_ADDRESS", "::")
    monkeypatch.setenv("CHARONIA_GRPC_PORT", "5000")
    path = programs(tmp_path / "bin", docker='[ "$1" = run ] && printf "%s\\n" "$@" || echo runc')
    done = up("--workspace", workspace, path=path)
    assert done.returncode == 0, done.stderr
    assert "[::]:5000:33337" in done.stdout.splitlines()
    assert "CHARONIA_TRITON_ADDRESS" not in done.stdout
