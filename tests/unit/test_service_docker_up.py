"""What service_docker_up.sh asks of Docker: how long a container that is stopped has to end (twice drain_timeout_s, and
15 s), and at which address its ports are."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from charonia.serve.launcher import _KILL_AFTER_S
from charonia.serve.triton import EXIT_MARGIN_S

ROOT = Path(__file__).resolve().parents[2]
DOCKER = """#!/bin/sh
if [ "$1" = run ]; then printf '%s\\n' "$@"; fi
"""


def docker_run(tmp_path: Path, config: str, **env: str) -> list[str]:
    """What service_docker_up.sh tells Docker for a workspace with this config.ini."""
    docker = tmp_path / "bin" / "docker"
    docker.parent.mkdir()
    docker.write_text(DOCKER)
    docker.chmod(0o755)
    weights = tmp_path / "workspace" / "triton_models" / "weights"
    weights.mkdir(parents=True)
    (weights / "manifest.json").write_text("{}")
    (weights / "config.ini").write_text(config)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("CHARONIA_")}
    done = subprocess.run(
        [ROOT / "charonia" / "service_docker_up.sh", "--workspace", tmp_path / "workspace", "--gpus", "none"],
        env={**kept, **env, "PATH": f"{docker.parent}:{kept['PATH']}"},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    return done.stdout.splitlines()


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
    config: str, env: dict[str, str], drain_s: float, tmp_path: Path
) -> None:
    words = docker_run(tmp_path, config, **env)
    seconds = int(words[words.index("--stop-timeout") + 1])
    assert seconds == 2 * drain_s + 15
    # What charonia serve takes at most: for the ensemble, then for Triton.
    assert seconds >= drain_s + max(drain_s + EXIT_MARGIN_S, drain_s + _KILL_AFTER_S)


@pytest.mark.parametrize(
    ("given", "published"), [("localhost", "127.0.0.1"), ("0.0.0.0", "0.0.0.0"), ("::1", "[::1]"), ("", "127.0.0.1")]
)
def test_ports_are_published_at_addresses(given: str, published: str, tmp_path: Path) -> None:
    words = docker_run(tmp_path, "[llama]\n", **({"CHARONIA_TRITON_ADDRESS": given} if given else {}))
    ports = [words[at + 1] for at, word in enumerate(words) if word == "--publish"]
    assert ports == [f"{published}:{port}:{port}" for port in (33336, 33337, 33338)]


def test_compose_and_the_contracts_say_the_same() -> None:
    compose = (ROOT / "docker-compose.yml").read_text()
    assert set(re.findall(r"stop_grace_period: (.*)", compose)) == {"${CHARONIA_STOP_GRACE_PERIOD:-75s}"}
    for name in ("contracts.md", "operations.md"):
        text = " ".join((ROOT / "docs" / name).read_text().split())
        assert "twice `drain_timeout_s` plus 15 s" in text and "75 s" in text
