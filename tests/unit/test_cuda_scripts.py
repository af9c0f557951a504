"""Reading and checking the build's output for CUDA kernels."""

from __future__ import annotations

import re
import shutil
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
SERIALISED = """\
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to a wait
"""
# As of cuobjdump -sass.
CODE = """\
        code for sm_90a
                Function : _Z4calmv
        .headerflags    @"EF_CUDA_SM90"
        /*0000*/                   LDC R1, c[0x0][0x28] ;              /* 0x00000a00ff017b82 */
                                                                       /* 0x000fe20000000800 */
        /*0010*/                   HMMA.16816.F32.BF16 R4, R4, R8, R4 ;  /* 0x1 */
        /*0020*/              @!P0 HMMA.16816.F32.BF16 R4, R4, R8, R4 ;  /* 0x1 */
        /*0030*/              @UP1 UTMALDG.2D [UR8], [UR4] ;           /* 0x1 */
                Function : _Z6crowdv
        /*0000*/                   STL [R1], R2 ;                      /* 0x1 */
        /*0010*/                   LDL.64 R2, [R1] ;                   /* 0x1 */
"""


def check(folder: Path, *options: str, code: str = "", ci: str = "") -> subprocess.CompletedProcess[str]:
    """Run a copy of the script with programs that print the code, and the version of nvcc."""
    copy = folder / "scripts"
    if not copy.exists():
        copy.mkdir()
        shutil.copy2(SCRIPTS / "check_machine_code.py", copy)
        (copy / "machine_code.tsv").write_text("nvcc\t0.0\n")
    bin_folder = folder / "bin"
    bin_folder.mkdir(exist_ok=True)
    for name, output in (("cuobjdump", code), ("nvcc", "Cuda compilation tools, release 13.0, V13.0.88\n")):
        (bin_folder / name).write_text(f"#!/bin/sh\ncat <<'END'\n{output}END\n")
        (bin_folder / name).chmod(0o755)
    command = [sys.executable, str(copy / "check_machine_code.py"), str(folder), *options]
    env = {"PATH": f"{bin_folder}:/usr/bin:/bin", "CI": ci}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)


def test_kernels_without_spills_pass_and_are_printed(tmp_path: Path) -> None:
    (tmp_path / "good.cu.o.ptxas").write_text(GOOD)
    result = check(tmp_path, "--print")
    assert result.returncode == 0
    assert re.search(r"good sm_80 (calm|_Z4calmv).*: 40 registers, 2048 bytes of shared memory", result.stdout)
    assert "no code for sm_90a" in result.stdout


def test_a_kernel_that_spills_or_uses_local_memory_is_named(tmp_path: Path) -> None:
    (tmp_path / "good.cu.o.ptxas").write_text(GOOD)
    (tmp_path / "bad.cu.o.ptxas").write_text(SPILLING)
    result = check(tmp_path, code=CODE[CODE.index("                Function : _Z6crowdv") :])
    assert result.returncode == 1
    assert "bad sm_90a" in result.stdout and "36 spilled" in result.stdout
    assert re.search(r"bad sm_90a (crowd|_Z6crowdv).* accesses local memory: 1 LDL, 1 STL", result.stdout)
    assert "2 kernels of 2 files, of which 1 spill registers" in result.stdout


def test_a_warning_about_serialised_wgmma_or_ignored_setmaxnreg_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "slow.cu.o.ptxas").write_text(GOOD + SERIALISED)
    result = check(tmp_path)
    assert result.returncode == 1 and "slow: (C7510) Potential Performance Loss" in result.stdout
    (tmp_path / "slow.cu.o.ptxas").write_text(GOOD + SERIALISED.replace("C7510", "C7507"))
    assert "slow: (C7507)" in check(tmp_path).stdout
    (tmp_path / "slow.cu.o.ptxas").write_text(GOOD + SERIALISED.replace("C7510", "C7509"))
    assert check(tmp_path).returncode == 0


HOPPER = GOOD.replace("sm_80", "sm_90a")
ONE_KERNEL = CODE[: CODE.index("                Function : _Z6crowdv")]


def test_counts_of_instructions_are_compared_with_the_table(tmp_path: Path) -> None:
    (tmp_path / "gemm.cu.o.ptxas").write_text(HOPPER)
    table = tmp_path / "scripts" / "machine_code.tsv"
    written = check(tmp_path, "--write", code=ONE_KERNEL)
    assert written.returncode == 0, written.stdout
    assert table.read_text() == "nvcc\t13.0\ngemm\t1 x HMMA=2 UTMALDG=1\n"
    assert "1 compared" in check(tmp_path, code=ONE_KERNEL).stdout
    fewer = check(tmp_path, code=ONE_KERNEL.replace("@!P0 HMMA", "@!P0 FFMA"))
    assert fewer.returncode == 1
    assert "gemm: 1 x HMMA=1 UTMALDG=1, but machine_code.tsv has 1 x HMMA=2 UTMALDG=1" in fewer.stdout
    table.write_text(table.read_text().replace("13.0", "12.8"))
    other = check(tmp_path, code=ONE_KERNEL.replace("HMMA", "FFMA"))
    assert other.returncode == 0, other.stdout
    in_ci = check(tmp_path, code=ONE_KERNEL, ci="true")
    assert in_ci.returncode == 1 and "machine_code.tsv is for nvcc 12.8, not 13.0: not compared" in in_ci.stdout


def test_kernels_that_are_not_in_the_table_are_errors(tmp_path: Path) -> None:
    (tmp_path / "gemm.cu.o.ptxas").write_text(HOPPER)
    assert check(tmp_path, "--write", code=ONE_KERNEL).returncode == 0
    (tmp_path / "gemm.cu.o.ptxas").write_text(HOPPER + HOPPER.replace("calm", "more"))
    code = ONE_KERNEL + ONE_KERNEL.replace("calm", "more").replace("UTMALDG", "FFMA")
    more = check(tmp_path, code=code)
    assert more.returncode == 1 and "gemm: 1 x HMMA=2, 1 x HMMA=2 UTMALDG=1, but" in more.stdout
    (tmp_path / "gemm.cu.o.ptxas").rename(tmp_path / "new.cu.o.ptxas")
    renamed = check(tmp_path, code=code)
    assert renamed.returncode == 1 and "new: 1 x HMMA=2, 1 x HMMA=2 UTMALDG=1, but machine_code.tsv has none" in (
        renamed.stdout
    )
    assert "gemm: none, but machine_code.tsv has 1 x HMMA=2 UTMALDG=1" in renamed.stdout


def test_kernels_that_only_ptxas_or_only_cuobjdump_names_are_errors(tmp_path: Path) -> None:
    (tmp_path / "gemm.cu.o.ptxas").write_text(HOPPER)
    result = check(tmp_path, "--write", code=ONE_KERNEL.replace("_Z4calmv", "_Z5callsv"))
    assert result.returncode == 1
    assert "gemm: cuobjdump shows no code of _Z4calmv" in result.stdout
    assert "gemm: ptxas has not printed the registers of _Z5callsv" in result.stdout


def test_all_folders_are_checked_and_each_must_have_output(tmp_path: Path) -> None:
    for name, text in (("one", GOOD), ("two", SPILLING)):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.cu.o.ptxas").write_text(text)
    result = check(tmp_path / "one", str(tmp_path / "two"))
    assert result.returncode == 1 and "2 kernels of 2 files, of which 1 spill" in result.stdout
    (tmp_path / "empty").mkdir()
    result = check(tmp_path / "one", str(tmp_path / "empty"))
    assert result.returncode == 1 and "empty has no output of ptxas" in result.stdout


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
