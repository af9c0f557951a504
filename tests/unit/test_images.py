"""The packages and settings of the container images."""

from __future__ import annotations

import re
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
OWN = ("charonia-client", "charonia-gateway")


def locked(name: str) -> dict[str, Version]:
    """Return exact versions by package, from the entries that apply to this Python."""
    text = (REQUIREMENTS / f"{name}.txt").read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line.partition(" --hash")[0] for line in text.splitlines() if line and not line.startswith((" ", "#"))]
    entries = [Requirement(line) for line in lines]
    here = [entry for entry in entries if entry.marker is None or entry.marker.evaluate()]
    return {entry.name: Version(str(entry.specifier).removeprefix("==")) for entry in here}


def wanted(project: str) -> list[Requirement]:
    with (ROOT / project / "pyproject.toml").open("rb") as file:
        return [Requirement(line) for line in tomllib.load(file)["project"]["dependencies"]]


@pytest.mark.parametrize(
    ("name", "projects"),
    [("server", (".",)), ("gateway", ("gateway", "client")), ("host", (".", "gateway", "client"))],
    ids=["server", "gateway", "host"],
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


@pytest.mark.parametrize("file", sorted(REQUIREMENTS.glob("*.txt")), ids=lambda file: file.stem)
def test_every_pinned_package_has_checksums(file: Path) -> None:
    entries = [line for line in file.read_text(encoding="utf-8").replace("\\\n", " ").splitlines() if line[:1] != "#"]
    assert entries and all("==" in entry and "--hash=sha256:" in entry for entry in entries)


def test_the_server_image_has_the_client_of_the_liveness_probe() -> None:
    assert "grpcio" in locked("server")


def test_the_images_triton_is_the_packages() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        serve = tomllib.load(file)["project"]["optional-dependencies"]["serve"]
    (pinned,) = [entry for entry in serve if entry.startswith("nvidia-pytriton")]
    assert pinned in (REQUIREMENTS / "triton.in").read_text(encoding="utf-8").splitlines()
    assert locked("triton") == {"nvidia-pytriton": Version(pinned.partition("==")[2])}
    assert locked("host")["nvidia-pytriton"] == locked("triton")["nvidia-pytriton"]


@pytest.mark.parametrize("name", ["server", "gateway"])
def test_images_have_the_packages_version(name: str) -> None:
    text = (ROOT / "docker" / f"{name}.Dockerfile").read_text(encoding="utf-8")
    assert re.findall(r"^ARG VERSION=(.*)$", text, re.MULTILINE) == [charonia.__version__]


def test_every_setting_of_the_gateway_can_be_set_in_compose() -> None:
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))["services"]
    given = {name.lower() for name in services["gateway"]["environment"]}
    inside = {"host", "port", "grpc_port"}  # fixed in the container
    inside |= {
        "models_file",
        "control_dir",
        "models_autoload",
        "load_timeout_s",
    }  # of `charonia serve`, which containers do not run
    for name, field in GatewaySettings.model_fields.items():
        names = {str(choice) for choice in field.validation_alias.choices}  # type: ignore[union-attr]
        assert name in inside or names & given, f"{name} is missing in docker-compose.yml"


def test_every_variable_of_compose_is_in_the_example_or_a_setting() -> None:
    example = set(re.findall(r"^#([A-Z_]+)=", (ROOT / ".env.example").read_text(encoding="utf-8"), re.MULTILINE))
    files = sorted(ROOT.glob("docker-compose*.yml"))
    read = {name for file in files for name in re.findall(r"\$\{([A-Z_]+)", file.read_text(encoding="utf-8"))}
    assert read <= example


def test_packages_that_build_the_engine_have_the_versions_of_those_that_serve():
    """Both are installed at the same time (scripts/setup.sh). Another version would replace files that are in use."""
    build, host = locked("build"), locked("host")
    both = build.keys() & host.keys()
    assert "packaging" in both
    assert {name: build[name] for name in both} == {name: host[name] for name in both}
