"""The next stack removes shared memory of a killed one, but not of a running one."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from charonia.serve import shared_memory

OWNER = """
import sys, time
from pathlib import Path
from charonia.serve import shared_memory
folder, prefix = Path(sys.argv[1]), shared_memory.new_prefix()
with shared_memory.owned(prefix, folder):
    (folder / f"{prefix}stub").touch()
    print(prefix, flush=True)
    time.sleep(600)
"""


def names(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


def test_shared_memory_of_a_killed_stack_is_removed(tmp_path: Path) -> None:
    other = {"charonia_1_old_stub", "psm_of_another_program"}  # without a known owner
    for name in other:
        (tmp_path / name).touch()
    with subprocess.Popen([sys.executable, "-c", OWNER, tmp_path], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        prefix = owner.stdout.readline().strip()
        left = {f"{prefix}stub", f"owner_of_{prefix}"}
        own = shared_memory.new_prefix()
        with shared_memory.owned(own, tmp_path):
            assert names(tmp_path) == other | left | {f"owner_of_{own}"}, "it lives"
        assert names(tmp_path) == other | left
        owner.send_signal(signal.SIGKILL)
    assert names(tmp_path) == other | left
    with shared_memory.owned(own, tmp_path):
        (tmp_path / f"{own}stub").touch()
        assert names(tmp_path) == other | {f"owner_of_{own}", f"{own}stub"}
    assert names(tmp_path) == other


@pytest.mark.parametrize("name", ["owner_of_charonia_", "owner_of_charonia_*", "owner_of_charonia_[a-z]_00000000_"])
def test_foreign_owner_file_removes_nothing(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    own = shared_memory.new_prefix()
    with shared_memory.owned(own, tmp_path):
        (tmp_path / f"{own}stub").touch()
        shared_memory.remove_left(tmp_path)
        assert names(tmp_path) == {name, f"owner_of_{own}", f"{own}stub"}


def test_files_of_the_prefix_become_private(tmp_path: Path) -> None:
    own = shared_memory.new_prefix()
    target = tmp_path / "target"
    with shared_memory.owned(own, tmp_path):
        for file in (target, tmp_path / f"{own}stub"):
            file.touch()
            file.chmod(0o644)
        (tmp_path / f"{own}link").symlink_to(target)
        while (tmp_path / f"{own}stub").stat().st_mode & 0o777 != 0o600:
            time.sleep(0.01)
    assert target.stat().st_mode & 0o777 == 0o644


def test_unwritable_shared_memory_folder_is_ignored(tmp_path: Path) -> None:
    with shared_memory.owned(shared_memory.new_prefix(), tmp_path / "missing"):
        assert not (tmp_path / "missing").exists()
