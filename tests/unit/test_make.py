"""The Makefile's commands without the setup: how make's variables are passed on."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "stack"))
from stack import free_ports

from charonia.bench.random_model import SHAPES, write_random_model

ROOT = Path(__file__).resolve().parents[2]


def make(*words: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run `make WORDS` with this interpreter's programs. The setup is treated as done."""
    program = shutil.which("make")
    if program is None:
        pytest.skip("there is no make")
    command = [program, "--old-file=setup", f"BIN={Path(sys.executable).parent}", *map(str, words)]
    own = ("CHARONIA_", "MODEL", "DST", "MAKE", "TOOLS")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    return subprocess.run(
        command, cwd=ROOT, env={**inherited, **env}, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.slow
def test_make_convert_writes_the_given_workspace(tmp_path: Path) -> None:
    model = tmp_path / "a model"
    write_random_model(model, SHAPES["tiny"])
    done = make("convert", f"MODEL={model}", f"DST={tmp_path / 'w'}")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "w" / "model_repository" / "ensemble" / "config.pbtxt").is_file()
    again = make("convert", MODEL=str(model), DST=str(tmp_path / "w"))
    assert again.returncode != 0
    assert "--force" in again.stderr


def test_make_convert_without_a_model_says_how_to_name_one() -> None:
    done = make("convert")
    assert done.returncode != 0
    assert "make convert MODEL=<folder or hub id>" in done.stderr


@pytest.mark.slow
def test_make_chat_takes_the_functions_of_a_file(tmp_path: Path) -> None:
    """Runs until it reads the file, which is not Python code."""
    file = tmp_path / "a file.txt"
    file.write_text("")
    done = make("chat", TOOLS=str(file), CHARONIA_GRPC_PORT=str(free_ports(1)[0]))
    assert done.returncode != 0
    assert "is not a Python file" in " ".join(done.stderr.replace("│", "").split())
