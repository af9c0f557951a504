"""The images, built once per run, and stacks of them. Without a Docker engine, tests are skipped with the reason; in
continuous integration they fail.

CHARONIA_TEST_DOCKER_UP: a command that starts an engine if none responds. If packages come from a mirror, or TLS is
intercepted, the builds receive pip's settings (PIP_CERT, PIP_INDEX_URL and pip.conf) as secrets.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from missing_tools import missing_tool
from project import BUILD_LIMIT_S, ROOT, Project, running

sys.path.append(str(ROOT / "tests" / "stack"))  # stack


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            # The first one builds the images.
            item.add_marker(pytest.mark.timeout(BUILD_LIMIT_S + 600))


def _answers(*command: str) -> str | None:
    """Return None if the command succeeds, otherwise the reason."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    except OSError as error:
        return f"{command[0]}: {error.strerror}"
    lines = (done.stderr or done.stdout).strip().splitlines()
    return None if done.returncode == 0 else (lines[-1] if lines else f"exit code {done.returncode}")


@pytest.fixture(scope="session")
def engine() -> None:
    """A Docker engine with compose."""
    reason = _answers("docker", "info") or _answers("docker", "compose", "version")
    start = os.environ.get("CHARONIA_TEST_DOCKER_UP")
    if reason and start:
        try:
            done = subprocess.run(shlex.split(start), capture_output=True, text=True, timeout=1200)
        except (OSError, subprocess.TimeoutExpired) as error:
            missing_tool(f"no Docker engine answers ({reason}), and none could be started: {error}")
        reason = _answers("docker", "info") or _answers("docker", "compose", "version")
        if reason:
            missing_tool(f"{start} has started no engine ({reason}): {done.stderr[-1000:]}")
    if reason:
        missing_tool(
            f"no Docker engine with compose answers ({reason}), and CHARONIA_TEST_DOCKER_UP names none to start"
        )


def _pip_setting(name: str) -> str | None:
    done = subprocess.run([sys.executable, "-m", "pip", "config", "get", name], capture_output=True, text=True)
    return done.stdout.strip() or None if done.returncode == 0 else None


@pytest.fixture(scope="session")
def secret_marker() -> str:
    """A text in one build secret. No image may contain it."""
    return f"secret-{uuid.uuid4().hex}"


@pytest.fixture(scope="session")
def build_settings(tmp_path_factory: pytest.TempPathFactory, secret_marker: str) -> dict[str, str]:
    """The build settings in .env."""
    pip_conf = tmp_path_factory.mktemp("build") / "pip.conf"
    index = os.environ.get("PIP_INDEX_URL") or _pip_setting("global.index-url")
    pip_conf.write_text(f"# {secret_marker}\n[global]\n" + (f"index-url = {index}\n" if index else ""))
    certificates = os.environ.get("PIP_CERT") or _pip_setting("global.cert")
    return {"BUILD_PIP_CONF": str(pip_conf), **({"BUILD_CA_BUNDLE": certificates} if certificates else {})}


@pytest.fixture(scope="session")
def images(engine: None, build_settings: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> None:
    """Every image, built from this checkout."""
    project = Project(tmp_path_factory.mktemp("images"), build_settings)
    # One after the other, because they share downloads and the compiler's time.
    for service in ("prometheus", "gateway", "server"):
        project.compose("build", "--quiet", service, limit_s=BUILD_LIMIT_S)


@pytest.fixture(scope="module")
def demo(images: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """`docker compose up` with only the model, the ports and two secrets set."""
    folder = tmp_path_factory.mktemp("demo")
    token = folder / "hf_token"
    token.write_text("hub-token")
    token.chmod(0o644)
    settings = {"MODEL": "demo", "GRAFANA_ADMIN_PASSWORD": "grafanas-password", "HF_TOKEN_FILE": str(token)}
    with running(Project(folder, settings)) as project:
        yield project
