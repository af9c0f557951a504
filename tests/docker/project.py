"""docker compose with a separate project, for the tests."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FILES = (ROOT / "docker-compose.yml", ROOT / "tests" / "docker" / "compose.yml")
TAG = "test"  # so that a user's images do not change
# Timeout for every wait of the tests, on slow and busy machines too: only a hang reaches it.
HANG_S = 300
BUILD_LIMIT_S = 3000


def docker(*arguments: str, check: bool = True) -> str:
    """Return the output of `docker ARGUMENTS`."""
    return run(["docker", *arguments], check=check).stdout


def run(
    command: Sequence[str | Path], *, check: bool = True, env: Mapping[str, str] | None = None, limit_s: float = HANG_S
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=limit_s, env=env)
    said = f"{' '.join(map(str, command))}\nexit code {done.returncode}\n{done.stdout[-8000:]}\n{done.stderr[-8000:]}"
    assert done.returncode == 0 or not check, said
    return done


def clean_environment(**more: str) -> dict[str, str]:
    """Return this process's environment, without variables of Charonia and compose."""
    own = ("CHARONIA_", "MODEL", "COMPOSE_", "GRAFANA_", "HF_", "BUILD_")
    return {**{name: value for name, value in os.environ.items() if not name.startswith(own)}, **more}


@dataclass
class Project:
    """`settings`: the content of a user's .env. `folder`: for files of the tests."""

    folder: Path
    settings: Mapping[str, str] = field(default_factory=dict)
    files: Sequence[Path] = FILES
    name: str = field(default_factory=lambda: f"charonia-test-{uuid.uuid4().hex[:8]}")

    def environment(self) -> dict[str, str]:
        return clean_environment(COMPOSE_FILE=os.pathsep.join(map(str, self.files)), COMPOSE_PROJECT_NAME=self.name)

    def compose(self, *arguments: str, check: bool = True, limit_s: float = HANG_S) -> subprocess.CompletedProcess[str]:
        env_file = self.folder / f"{self.name}.env"
        # Docker chooses free ports for published ports.
        settings = {
            "CHARONIA_TAG": TAG,
            "CHARONIA_GATEWAY_ADDRESS": "127.0.0.1",
            "CHARONIA_GATEWAY_PORT": "0",
            "CHARONIA_CACHE_MAX_ENTRY_COUNT": "512",
            **self.settings,
        }
        env_file.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
        command = ["docker", "compose", "--ansi", "never", "--project-directory", self.files[0].parent]
        return run([*command, "--env-file", env_file, *arguments], check=check, env=self.environment(), limit_s=limit_s)

    def config(self, *arguments: str) -> Any:
        return json.loads(self.compose(*arguments, "config", "--format", "json").stdout)

    def up(self, *, check: bool = True) -> subprocess.CompletedProcess[str]:
        return self.compose("up", "--no-build", "--wait", check=check)

    def logs(self, service: str) -> str:
        """Remove the sequence that clears a line, which compose writes even without a terminal."""
        return self.compose("logs", "--no-log-prefix", "--no-color", service).stdout.replace("\x1b[2K", "")

    def container(self, service: str) -> Any:
        """Return the output of docker inspect for the service's container."""
        found = self.compose("ps", "--all", "--quiet", service).stdout.split()
        assert len(found) == 1, f"{service}: {found}"
        return json.loads(docker("inspect", found[0]))[0]

    def address(self, service: str, port: int) -> str:
        """Return the http://HOST:PORT of a published port on this machine."""
        return f"http://{self.compose('port', service, str(port)).stdout.strip()}"

    @property
    def gateway(self) -> str:
        return self.address("gateway", 23333)


@contextlib.contextmanager
def running(project: Project) -> Iterator[Project]:
    """Start the project, wait until it is healthy, and remove everything at the end."""
    try:
        done = project.up(check=False)
        assert done.returncode == 0, f"{done.stderr}\n{project.compose('logs', '--tail', '60').stdout}"
        yield project
    finally:
        remove(project)


def remove(project: Project) -> None:
    project.compose("--profile", "*", "down", "--volumes", "--timeout", "20", check=False)
