"""scripts/get_xgrammar.py: the sources are those that are pinned, or it says what to do."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A checkout with a pin of an sdist that is nowhere."""
    for name in ("scripts/get_xgrammar.py", "engine/third_party/xgrammar.txt"):
        (tmp_path / name).parent.mkdir(parents=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def run(tree: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, tree / "scripts/get_xgrammar.py", *arguments]
    env = {**os.environ, "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}
    return subprocess.run(command, capture_output=True, text=True, env=env)


def sdist(file: Path) -> str:
    """Writes one, with a file that leads out of it. Returns its checksum."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file, "w:gz") as archive:
        for name in ("x/cpp/a.cc", "x/include/xgrammar/a.h", "x/python/a.py", "x/cpp/../../out.cc"):
            member = tarfile.TarInfo(name)
            member.size = 1
            archive.addfile(member, io.BytesIO(b"a"))
    return hashlib.sha256(file.read_bytes()).hexdigest()


def test_without_an_index_it_says_where_to_put_the_sdist(tree: Path) -> None:
    ended = run(tree)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "pip cannot download xgrammar-" in ended.stderr
    assert "-DCHARONIA_XGRAMMAR=" in ended.stderr and str(tree / "build/xgrammar") in ended.stderr
    assert run(tree, str(tree / "nothing")).stderr.endswith("neither xgrammar's sdist nor its unpacked folder\n")


def test_an_sdist_with_another_checksum_is_refused(tree: Path) -> None:
    checksum = sdist(tree / "other.tar.gz")
    ended = run(tree, str(tree / "other.tar.gz"))
    assert ended.returncode == 1
    assert checksum in ended.stderr and "xgrammar.txt wants" in ended.stderr
    assert [file.name for file in (tree / "build/xgrammar").iterdir()] == []


def test_the_sources_are_unpacked_once_and_a_folder_is_taken_as_it_is(tree: Path) -> None:
    checksum = sdist(tree / "build/xgrammar/xgrammar-1.0.tar.gz")
    (tree / "engine/third_party/xgrammar.txt").write_text(f"xgrammar==1.0 --hash=sha256:{checksum}\n")
    first = run(tree)
    folder = Path(first.stdout.strip())
    assert (first.returncode, folder.parent) == (0, tree / "build/xgrammar")
    found = sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
    assert found == ["cpp/a.cc", "include/xgrammar/a.h"]
    (tree / "build/xgrammar/xgrammar-1.0.tar.gz").unlink()
    assert run(tree).stdout == first.stdout
    assert run(tree, str(folder)).stdout == first.stdout
