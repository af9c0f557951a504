"""The scripts that look a machine over before anything is installed, run on machines that lack something."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


def run(*command: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*map(str, command)], env={**os.environ, **env}, capture_output=True, text=True, timeout=300)


def make_python(folder: Path, name: str, version: str) -> Path:
    """A python that is of another version."""
    file = folder / name
    file.write_text(f'#!/bin/sh\nif [ "$1" = --version ]; then echo "Python {version}"; exit 0; fi\nexit 1\n')
    file.chmod(0o755)
    return file


def test_this_machine_is_in_order() -> None:
    result = run(sys.executable, SCRIPTS / "check_machine.py")
    assert (result.returncode, result.stderr) == (0, "")


def test_a_missing_compiler_is_named_with_the_command_that_installs_it(tmp_path: Path) -> None:
    result = run(sys.executable, SCRIPTS / "check_machine.py", PATH=str(tmp_path), CXX="")
    assert result.returncode == 1
    assert "a C++ compiler" in result.stderr
    assert "apt-get install -y build-essential" in result.stderr


def test_an_old_compiler_is_named(tmp_path: Path) -> None:
    old = tmp_path / "old-g++"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    result = run(sys.executable, SCRIPTS / "check_machine.py", CXX=str(old))
    assert result.returncode == 1
    assert f"{old} is too old" in result.stderr


def test_another_python_is_named(tmp_path: Path) -> None:
    python = make_python(tmp_path, "python3", "3.9.2")
    result = run(SCRIPTS / "find_python.sh", PYTHON=str(python))
    assert result.returncode == 1
    assert f"{python} is Python 3.9.2; Python 3.10, 3.11 or 3.12 is needed" in result.stderr


def test_a_fitting_python_is_found_beside_one_that_does_not_fit(tmp_path: Path) -> None:
    make_python(tmp_path, "python3", "3.14.0")
    fitting = tmp_path / "python3.12"
    fitting.symlink_to(sys.executable)
    result = run(SCRIPTS / "find_python.sh", PATH=f"{tmp_path}:/usr/bin:/bin", PYTHON="")
    assert (result.returncode, result.stdout.strip()) == (0, str(fitting))
