"""service_docker_up.sh: the arguments of `docker run`, and errors without a Docker engine."""

from __future__ import annotations

import itertools
import os
import subprocess
from pathlib import Path

import pytest

from charonia.serve.launcher import AFTER_DRAINS_S

ROOT = Path(__file__).resolve().parents[2]
PRINTS_RUN = '[ "$1" = run ] && printf "%s\\n" "$@" || echo '  # followed by the runtimes for `docker info`


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    weights = tmp_path / "my workspace" / "triton_models" / "weights"
    weights.mkdir(parents=True)
    (weights / "manifest.json").write_text('{"files": {"/models/a b/model.safetensors": {"bytes": 1}}}')
    return tmp_path / "my workspace"


def up(
    workspace: Path, *options: str, programs: dict[str, str], **env: str
) -> tuple[int, str, list[tuple[str, str]], list[str]]:
    """Return exit code and stderr of the script, and the arguments of `docker run` as pairs and single. PATH has
    `programs` by name, and the usual programs without docker and GPU tools."""
    folder = workspace.parent / "bin"
    folder.mkdir()
    for name in ("getopt", "dirname", "grep", "sed", "sort", "tr", "xargs", "bash"):
        (folder / name).symlink_to(next(file for file in (Path("/usr/bin", name), Path("/bin", name)) if file.exists()))
    for name, text in programs.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    command = ["/bin/bash", ROOT / "scripts" / "service_docker_up.sh", "--workspace", workspace, *options]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("CHARONIA_")}
    done = subprocess.run(
        command, capture_output=True, text=True, env={**kept, **env, "PATH": str(folder)}, timeout=300
    )
    words = done.stdout.splitlines()
    return done.returncode, done.stderr, list(itertools.pairwise(words)), words


@pytest.mark.parametrize(
    ("options", "programs", "said"),
    [
        ((), {}, "docker is not installed (Debian and Ubuntu: docker.io)"),
        ((), {"docker": "exit 1"}, "the Docker daemon does not respond"),
        (
            (),
            {"docker": "echo runc io.containerd.runc.v2", "nvidia-smi": "exit 0"},
            "--gpus all needs the NVIDIA runtime, which Docker does not have",
        ),
        (("--gpu", "all", "--cpus", "2"), {}, "options for docker run come after --"),
    ],
)
def test_an_error_names_the_cause(
    options: tuple[str, ...], programs: dict[str, str], said: str, workspace: Path
) -> None:
    code, stderr, *_ = up(workspace, *options, programs=programs)
    assert code == 1 and said in stderr


def test_a_folder_that_is_no_workspace_is_named(tmp_path: Path) -> None:
    code, stderr, *_ = up(tmp_path / "none", programs={})
    assert code == 1
    missing = tmp_path / "none"
    assert f"{missing} is not a workspace: create one with charonia convert MODEL --dst-path {missing}" in stderr


def test_options_and_linked_folders_reach_docker(workspace: Path) -> None:
    options = ("--gpus", "device=0,1", "--tp", "2", "--shm-size", "3g", "--image", "mine:1", "--", "--cpus", "2")
    code, stderr, pairs, words = up(workspace, *options, programs={"docker": f"{PRINTS_RUN} nvidia runc"})
    assert code == 0, stderr
    assert words[-3:] == ["--cpus", "2", "mine:1"]
    assert {
        ("--gpus", "device=0,1"),
        ("--env", "CHARONIA_TENSOR_PARA_SIZE=2"),
        ("--shm-size", "3g"),
        ("--env", "CHARONIA_MAX_RESTARTS=5"),
        ("--volume", "/models/a b:/models/a b:ro"),
        ("--volume", f"{workspace}:/workspace:ro"),
    } <= set(pairs)


@pytest.mark.parametrize(
    ("given", "published"), [("localhost", "127.0.0.1"), ("0.0.0.0", "0.0.0.0"), ("::1", "[::1]"), ("", "127.0.0.1")]
)
def test_ports_are_published_at_the_address(given: str, published: str, workspace: Path) -> None:
    env = {"CHARONIA_GRPC_PORT": "5000", **({"CHARONIA_TRITON_ADDRESS": given} if given else {})}
    code, stderr, pairs, _ = up(workspace, programs={"docker": f"{PRINTS_RUN} runc"}, **env)
    assert code == 0, stderr
    ports = [value for name, value in pairs if name == "--publish"]
    assert ports == [f"{published}:{port}" for port in ("33336:33336", "5000:33337", "33338:33338")]
    assert not [value for name, value in pairs if name == "--env" and "CHARONIA_TRITON_ADDRESS" in value]


@pytest.mark.parametrize(
    ("config", "env", "drain_s"),
    [
        ("[llama]\n", {}, 30),
        ("[llama]\ndrain_timeout_s = 90\n", {}, 90),
        ("[llama]\ndrain_timeout_s = 90\n", {"CHARONIA_DRAIN_TIMEOUT_S": "120"}, 120),
        ("[llama]\n", {"CHARONIA_DRAIN_TIMEOUT_S": "0.5"}, 0.5),
    ],
)
def test_docker_waits_as_long_as_a_drain_takes(
    config: str, env: dict[str, str], drain_s: float, workspace: Path
) -> None:
    (workspace / "triton_models" / "weights" / "config.ini").write_text(config)
    code, stderr, pairs, _ = up(workspace, programs={"docker": f"{PRINTS_RUN} runc"}, **env)
    assert code == 0, stderr
    seconds = int(dict(pairs)["--stop-timeout"])
    assert seconds == 2 * drain_s + AFTER_DRAINS_S
