"""The content of the images, and the steps of building them again."""

from __future__ import annotations

import json
import re
import shutil
import time
from pathlib import Path

from project import BUILD_LIMIT_S, ROOT, docker, run

import charonia

GATEWAY_LIMIT_BYTES = 250_000_000


def modules_of(image: str, *names: str) -> list[str]:
    """Return the modules in `names` that the image contains."""
    look = "import importlib.util, sys; print(*[name for name in sys.argv[1:] if importlib.util.find_spec(name)])"
    python = ("--entrypoint", "/opt/charonia/venv/bin/python", image, "-c", look)
    return docker("run", "--rm", *python, *names).split()


def test_images_have_labels(images: None) -> None:
    for name in ("charonia-server", "charonia-gateway"):
        config = json.loads(docker("image", "inspect", f"{name}:test"))[0]["Config"]
        assert config["Labels"]["org.opencontainers.image.title"] == name
        assert config["Labels"]["org.opencontainers.image.version"] == charonia.__version__
        assert config["Labels"]["org.opencontainers.image.licenses"] == "Apache-2.0"
        assert config["User"] == "1000:1000"


def test_gateway_image_is_small_and_has_no_engine(images: None) -> None:
    size = json.loads(docker("image", "inspect", "charonia-gateway:test"))[0]["Size"]
    print(f"charonia-gateway has {size / 1e6:.0f} MB")
    assert size < GATEWAY_LIMIT_BYTES
    assert modules_of("charonia-gateway:test", "charonia_gateway") == ["charonia_gateway"]
    assert modules_of("charonia-gateway:test", "charonia", "torch", "pytriton", "transformers") == []


def test_server_image_has_no_pytorch(images: None) -> None:
    assert modules_of("charonia-server:test", "torch", "charonia_gateway") == []


def test_images_contain_no_build_secret(images: None, secret_marker: str, tmp_path: Path) -> None:
    docker("save", "--output", str(tmp_path / "images.tar"), "charonia-server:test", "charonia-gateway:test")
    found = run(["grep", "--count", "--text", secret_marker, tmp_path / "images.tar"], check=False)
    assert found.stdout.strip() == "0"


def test_grafana_image_has_every_dashboard(engine: None, build_settings: dict[str, str], tmp_path: Path) -> None:
    """Build without the last stage, whose base image may not be available here."""
    secrets = [f"--secret=id=ca_bundle,src={build_settings['BUILD_CA_BUNDLE']}"] * ("BUILD_CA_BUNDLE" in build_settings)
    command = ["docker", "build", "--target", "dashboards", "--output", str(tmp_path), *secrets]
    run([*command, "--file", ROOT / "docker" / "grafana.Dockerfile", ROOT], limit_s=BUILD_LIMIT_S)
    sources = (ROOT / "monitoring" / "grafana" / "dashboards").glob("*.toml")
    assert {file.stem for file in tmp_path.glob("*.json")} == {file.stem for file in sources}


def copy_of_the_context(folder: Path) -> Path:
    """Copy the files that .dockerignore allows in a build."""
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if line.startswith("!"):
            source, copy = ROOT / line[1:], folder / line[1:]
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copytree(source, copy) if source.is_dir() else shutil.copy2(source, copy)
    shutil.copy2(ROOT / ".dockerignore", folder)
    return folder


def test_change_of_python_code_compiles_nothing(images: None, build_settings: dict[str, str], tmp_path: Path) -> None:
    context = copy_of_the_context(tmp_path)
    for file in (ROOT / "docker").glob("*.Dockerfile"):
        shutil.copy2(file, context / "docker")
    with (context / "charonia" / "errors.py").open("a") as file:
        file.write("\n\nCHANGED = True\n")
    secrets = [f"--secret=id=pip_conf,src={build_settings['BUILD_PIP_CONF']}"]
    if certificates := build_settings.get("BUILD_CA_BUNDLE"):
        secrets.append(f"--secret=id=ca_bundle,src={certificates}")
    began = time.monotonic()
    command = ["docker", "build", "--progress=plain", "--tag", "charonia-server:test-changed", *secrets]
    dockerfile = context / "docker" / "server.Dockerfile"
    done = run([*command, "--file", dockerfile, context], limit_s=BUILD_LIMIT_S)
    print(f"built again in {time.monotonic() - began:.0f} s")
    try:
        (compiled,) = set(re.findall(r"^#(\d+) \[wheels .*ccache.*pip wheel", done.stderr, re.MULTILINE))
        assert f"\n#{compiled} CACHED\n" in done.stderr
        installed = set(re.findall(r"^#(\d+) \[packages .*server\.txt", done.stderr, re.MULTILINE))
        assert all(f"\n#{step} CACHED\n" in done.stderr for step in installed) and installed
        python = ("--entrypoint", "/opt/charonia/venv/bin/python", "charonia-server:test-changed")
        assert docker("run", "--rm", *python, "-c", "import charonia.errors as e; print(e.CHANGED)").strip() == "True"
    finally:
        docker("rmi", "charonia-server:test-changed")
