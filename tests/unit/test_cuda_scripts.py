"""Reading and checking the build's output for CUDA kernels."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"

GOOD = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z4calmv' for 'sm_80'
ptxas info    : Function properties for _Z4calmv
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 2048 bytes smem, 384 bytes cmem[0]
"""
SPILLING = """\
ptxas info    : Compiling entry function '_Z6crowdv' for 'sm_90a'
ptxas info    : Function properties for _Z6crowdv
    24 bytes stack frame, 16 bytes spill stores, 20 bytes spill loads
ptxas info    : Used 255 registers, used 0 barriers
"""


def check(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPTS / "check_spills.py"), str(folder), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_kernels_without_spills_pass_and_are_in_the_table(tmp_path: Path) -> None:
    (tmp_path / "good.cu.o.ptxas").write_text(GOOD)
    result = check(tmp_path, "--table")
    assert result.returncode == 0
    assert re.search(r"good sm_80 (calm|_Z4calmv): 40 registers, 2048 bytes of shared memory", result.stdout)


def test_a_kernel_that_spills_is_named(tmp_path: Path) -> None:
    (tmp_path / "good.cu.o.ptxas").write_text(GOOD)
    (tmp_path / "bad.cu.o.ptxas").write_text(SPILLING)
    result = check(tmp_path)
    assert result.returncode == 1
    assert "bad sm_90a" in result.stdout and "36 spilled" in result.stdout
    assert "2 kernels of 2 files, of which 1 spill registers" in result.stdout


def test_ptxas_output_is_kept_beside_the_object_and_the_rest_is_shown(tmp_path: Path) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text(f"#!/bin/sh\ncat >&2 <<'END'\n{GOOD}warning: something else\nEND\nexit $CODE\n")
    compiler.chmod(0o755)
    command = [SCRIPTS / "keep_ptxas_output.sh", compiler, "-c", "a.cu", "-o", tmp_path / "a.cu.o"]
    kept = tmp_path / "a.cu.o.ptxas"
    for code in (0, 3):
        result = subprocess.run(
            command, env={"CODE": str(code), "PATH": "/usr/bin:/bin"}, capture_output=True, text=True
        )
        assert result.returncode == code
        assert result.stderr == "warning: something else\n"
        assert kept.exists() == (code == 0)  # a failed build leaves no output to check
