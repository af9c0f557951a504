"""The scripts that check a machine before an installation, on machines that lack something; and the length of
functions."""

from __future__ import annotations

import ast
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import wait_until

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
MOST_LINES = 80  # of a function
KERNELS = "engine/src/ops/cuda/kernels/"  # whose functions may have more


def run(*command: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*map(str, command)], env={**os.environ, **env}, capture_output=True, text=True, timeout=300)


def make_python(folder: Path, name: str, version: str) -> Path:
    """Create a python that reports this version."""
    file = folder / name
    file.write_text(f'#!/bin/sh\nif [ "$1" = --version ]; then echo "Python {version}"; exit 0; fi\nexit 1\n')
    file.chmod(0o755)
    return file


def long_functions(lines: list[str], most: int) -> list[str]:
    """Return the first lines of C++ and CUDA functions that are longer than `most` lines. clang-format puts the closing
    brace of a function in the first column in a namespace, in the third column in a class, and in the fifth column in a
    nested class."""
    found = []
    begin = {"": 0, "  ": 0, "    ": 0}
    for at, line in enumerate(lines):
        for indent in begin:
            if re.match(rf"{indent}[^ #}}/]", line):
                begin[indent] = at
            if line == f"{indent}}}" and at - begin[indent] >= most:
                found.append(lines[begin[indent]])
    return found


@pytest.mark.slow
def test_functions_are_long_only_where_a_kernel_needs_it() -> None:
    assert long_functions(["class A {", "  int f(", "      int x) {", *["    x += 1;"] * 5, "  }", "};"], 7) == [
        "  int f("
    ]
    assert long_functions(["int f() {", *["  x += 1;"] * 5, "}"], 7) == []
    root = SCRIPTS.parent
    names = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=True).stdout
    found: dict[str, list[str]] = {}
    for name in names.split("\0"):
        if name.endswith(".py"):
            tree = ast.walk(ast.parse((root / name).read_text(encoding="utf-8")))
            functions = [node for node in tree if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
            long = [one.name for one in functions if (one.end_lineno or 0) - one.lineno >= MOST_LINES]
        elif name.endswith((".h", ".cpp")) and not name.startswith(KERNELS):
            long = long_functions((root / name).read_text(encoding="utf-8").split("\n"), MOST_LINES)
        else:
            continue
        if long:
            found[name] = long
    assert not found


@pytest.mark.slow
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


def test_uv_fetches_python_if_all_are_too_new(tmp_path: Path) -> None:
    newer = tmp_path / "python3"
    newer.write_text(
        '#!/bin/sh\ncase "$*" in --version) echo Python 3.14.0;; *"< (3, 13)"*) exit 0;; *) exit 1;; esac\n'
    )
    uv = tmp_path / "uv"
    uv.write_text(f'#!/bin/sh\n[ "$2" = install ] && echo "Installed Python" || echo {sys.executable}\n')
    for file in (newer, uv):
        file.chmod(0o755)
    for name in ("bash", "tail", "mkdir"):
        (tmp_path / name).symlink_to(shutil.which(name) or name)
    found = run(SCRIPTS / "find_python.sh", PATH=str(tmp_path), PYTHON="")
    assert (found.returncode, found.stdout.strip()) == (0, sys.executable), found.stderr
    uv.write_text("#!/bin/sh\necho no network >&2\nexit 1\n")
    failed = run(SCRIPTS / "find_python.sh", PATH=str(tmp_path), PYTHON="")
    assert failed.returncode == 1
    assert "no network" in failed.stderr and "UV_PYTHON_INSTALL_MIRROR" in failed.stderr


def test_a_fitting_python_is_found_beside_one_that_does_not_fit(tmp_path: Path) -> None:
    make_python(tmp_path, "python3", "3.14.0")
    fitting = tmp_path / "python3.12"
    fitting.symlink_to(sys.executable)
    result = run(SCRIPTS / "find_python.sh", PATH=f"{tmp_path}:/usr/bin:/bin", PYTHON="")
    assert (result.returncode, result.stdout.strip()) == (0, str(fitting))


def gtest(program: str, folder: Path) -> tuple[Path, list[str]]:
    """Return a GoogleTest program that runs `program`, and the command that sources gtest.sh in front of a script."""
    file = folder / "program"
    file.write_text(f"#!/bin/sh\n{program}\n")
    file.chmod(0o755)
    return file, ["bash", "-c", f'. {SCRIPTS}/gtest.sh; "$@"', "bash"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_shards_end_and_name_the_running_test(number: signal.Signals, tmp_path: Path) -> None:
    program, script = gtest(
        'echo "[ RUN      ] Suite.passes"; echo "[       OK ] Suite.passes (0 ms)"; echo "[ RUN      ] Suite.hangs"\n'
        'echo $$ >"$TEST_TMPDIR/pid-$GTEST_SHARD_INDEX"; exec sleep 3000',
        tmp_path,
    )
    running = subprocess.Popen(
        [*script, "gtest_shards", program, "*", "", tmp_path / "files"], stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    shards = int(run("nproc").stdout)
    files = [tmp_path / f"files/pid-{index}" for index in range(shards)]
    wait_until(lambda: all(file.exists() and file.read_text().endswith("\n") for file in files))
    running.send_signal(number)
    _, errors = running.communicate(timeout=300)
    assert running.returncode == -number
    assert errors.count("the process ended while it ran Suite.hangs") == shards
    wait_until(lambda: not [file for file in files if Path("/proc", file.read_text().strip()).exists()])


def test_gtest_pattern_whose_tests_are_all_excluded_is_an_error(tmp_path: Path) -> None:
    program, script = gtest(
        'case "$*" in *filter=Grid\\*-Grid.\\*) ;; *=None*) ;; *) echo Grid.; echo "  works" ;; esac', tmp_path
    )
    assert run(*script, "gtest_has", program, "", "Grid*").returncode == 0
    excluded = run(*script, "gtest_has", program, "Grid.*", "Grid*")
    assert (excluded.returncode, excluded.stderr) == (1, f"{program}: no test is called Grid*, without Grid.*\n")
    assert run(*script, "gtest_has", program, "", "Grid*", "None*").returncode == 1
