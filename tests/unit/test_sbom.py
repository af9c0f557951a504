"""scripts/sbom.sh: what it lists is what the images' requirements pin."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
REQUIREMENTS = ROOT / "docker" / "requirements"


def pinned(*names: str) -> set[tuple[str, str]]:
    text = "\n".join((REQUIREMENTS / f"{name}.txt").read_text() for name in names)
    return set(re.findall(r"^([\w.-]+)==([\w.+!-]+)", text, re.MULTILINE))


def libraries_of_the_page() -> set[tuple[str, str]]:
    wanted = json.loads((ROOT / "gateway" / "package.json").read_text())["dependencies"]
    locked = json.loads((ROOT / "gateway" / "package-lock.json").read_text())["packages"]
    within = ("entities", "linkify-it", "mdurl", "punycode.js", "uc.micro")  # markdown-it's file
    return {(name, locked[f"node_modules/{name}"]["version"]) for name in (*wanted, *within)}


@pytest.fixture(scope="module")
def written() -> dict[str, set[tuple[str, str]]]:
    subprocess.run([ROOT / "scripts" / "sbom.sh"], check=True, capture_output=True, text=True)
    found = {}
    for image in ("server", "gateway"):
        bill = json.loads((ROOT / "build" / "sbom" / f"{image}.cdx.json").read_text())
        assert bill["bomFormat"] == "CycloneDX"
        found[image] = {(one["name"], one["version"]) for one in bill["components"]}
    return found


def test_the_bills_of_materials_have_every_package_of_the_images(written: dict[str, set[tuple[str, str]]]) -> None:
    assert written["gateway"] == pinned("gateway") | libraries_of_the_page()
    compiled_in = {(name, version) for name, version in pinned("build") if name in ("nlohmann-json", "pybind11")}
    compiled_in |= set(
        re.findall(r"^(xgrammar)==([\d.]+)", (ROOT / "engine/third_party/xgrammar.txt").read_text(), re.M)
    )
    assert len(compiled_in) == 3
    assert written["server"] == pinned("server", "triton") | compiled_in


def test_without_the_test_environment_it_names_the_command_that_makes_it(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    script = shutil.copy(ROOT / "scripts" / "sbom.sh", tmp_path / "scripts")
    ended = subprocess.run([script], capture_output=True, text=True)
    assert ended.returncode == 1
    assert "needs the test environment: scripts/setup.sh test" in ended.stderr
