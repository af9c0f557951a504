"""scripts/get_page_libraries.py: npm receives the pins, and a failed download does not change existing files."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Creates the files of a package like npm.
NPM = """#!/bin/sh
[ "$1 $2" = "ci --ignore-scripts" ] || exit 9
[ -z "$NPM_FAILS" ] || { echo "integrity checksum failed"; exit 1; }
cp -r "$PACKAGES" node_modules
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("scripts/get_page_libraries.py", "gateway/package.json", "gateway/package-lock.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "gateway/charonia_gateway/page").mkdir(parents=True)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/npm").write_text(NPM)
    (tmp_path / "bin/npm").chmod(0o755)
    return tmp_path


def run(tree: Path, *options: str, **env: str) -> subprocess.CompletedProcess[str]:
    path = f"{tree / 'bin'}{os.pathsep}{os.environ['PATH']}"
    command = [sys.executable, tree / "scripts/get_page_libraries.py", *options]
    return subprocess.run(
        command, env={**os.environ, "PATH": path, "PACKAGES": str(tree / "made"), **env}, capture_output=True, text=True
    )


def test_failed_download_names_the_remedy_and_leaves_nothing(tree: Path) -> None:
    ended = run(tree, NPM_FAILS="1")
    assert ended.returncode == 1
    assert "integrity checksum failed" in ended.stderr and "npm_config_registry" in ended.stderr
    assert list((tree / "gateway/charonia_gateway/page").iterdir()) == []
    (tree / "made").mkdir()  # packages without their files
    assert "see WANTED in" in run(tree).stderr


def test_the_lock_pins_every_package_and_names_no_registry() -> None:
    lock = json.loads((ROOT / "gateway/package-lock.json").read_text())
    packages = {name: package for name, package in lock["packages"].items() if name}
    assert all(package["integrity"].startswith("sha512-") for package in packages.values())
    assert not any("resolved" in package for package in packages.values())
    assert set(json.loads((ROOT / "gateway/package.json").read_text())["dependencies"]) <= {
        name.removeprefix("node_modules/") for name in packages
    }
