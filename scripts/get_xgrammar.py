"""Prints the folder with xgrammar's C++ sources, for CMake: under build/xgrammar/, downloaded where they are not there.

    python scripts/get_xgrammar.py [SDIST OR FOLDER]

Version and checksum are those of engine/third_party/xgrammar.txt. pip downloads, from the index that it is configured
for.
Without an index, name the sdist, or put it into build/xgrammar/ (CMake: -DCHARONIA_XGRAMMAR=...).
"""

import hashlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PIN = ROOT / "engine" / "third_party" / "xgrammar.txt"
CACHE = ROOT / "build" / "xgrammar"
# What the build reads, and the licences.
WANTED = re.compile(
    r"LICENSE|NOTICE|cpp/.*|include/.*|3rdparty/picojson/picojson\.h|3rdparty/dlpack/(LICENSE|include/.*)"
)


class Missing(Exception):
    """Why the sources cannot be had; the text says what to do."""


def pinned() -> tuple[str, str]:
    """Version and SHA-256."""
    found = re.search(r"^xgrammar==(\S+) --hash=sha256:([0-9a-f]{64})$", PIN.read_text(), re.MULTILINE)
    if not found:
        raise Missing(f"{PIN} has no line `xgrammar==<version> --hash=sha256:<checksum>`")
    return found[1], found[2]


def download(name: str) -> Path:
    """With pip, which prepares the package's metadata too: that takes scikit-build-core and setuptools-scm."""
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "--quiet", "download"]
        command += [
            "--no-deps",
            "--no-build-isolation",
            "--require-hashes",
            "--requirement",
            str(PIN),
            "--dest",
            folder,
        ]
        print(f"get_xgrammar: downloading {name}", file=sys.stderr)
        ran = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if ran.returncode:
            raise Missing(
                f"pip cannot download {name}:\n{ran.stdout}\nWithout a package index, fetch {name} elsewhere and put "
                f"it into {CACHE}, or pass -DCHARONIA_XGRAMMAR=<file> to CMake (CMAKE_ARGS for pip install)"
            )
        return Path(shutil.move(Path(folder) / name, CACHE / name))


def unpack(sdist: Path, checksum: str, target: Path) -> None:
    found = hashlib.sha256(sdist.read_bytes()).hexdigest()
    if found != checksum:
        raise Missing(f"{sdist} has the SHA-256 {found}, and {PIN} wants {checksum}: remove it, or fetch it again")
    # Beside it and then renamed, so that what is there is whole whoever else unpacks it at the same time.
    work = Path(tempfile.mkdtemp(dir=CACHE))
    try:
        with tarfile.open(sdist) as archive:
            for member in archive:
                inner = member.name.partition("/")[2]
                if member.isfile() and WANTED.fullmatch(inner) and ".." not in Path(inner).parts:
                    file = archive.extractfile(member)
                    assert file is not None
                    (work / inner).parent.mkdir(parents=True, exist_ok=True)
                    (work / inner).write_bytes(file.read())
        work.chmod(0o755)
        try:
            work.rename(target)
        except OSError:
            if not target.is_dir():  # nobody else was faster
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)


def sources(given: Path | None) -> Path:
    if given is not None and (given / "include" / "xgrammar").is_dir():
        return given.resolve()
    if given is not None and not given.is_file():
        raise Missing(f"{given} is neither xgrammar's sdist nor its unpacked folder")
    version, checksum = pinned()
    target = CACHE / f"{version}-{checksum[:12]}"
    if target.is_dir():
        return target
    CACHE.mkdir(parents=True, exist_ok=True)
    name = f"xgrammar-{version}.tar.gz"
    sdist = given or CACHE / name
    unpack(sdist if sdist.is_file() else download(name), checksum, target)
    return target


def main() -> int:
    given = Path(sys.argv[1]) if len(sys.argv) > 1 and sys.argv[1] else None
    try:
        print(sources(given))
    except Missing as missing:
        print(f"get_xgrammar: {missing}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
