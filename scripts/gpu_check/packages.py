"""What a bare machine with CUDA and PyTorch lacks: how it is packed, carried in trips of limited size, installed."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from gpu_check.commands import run
from gpu_check.context import ROOT, Context

# What the build and the tests need beside what such machines have: nvcc, cmake, ninja, PyTorch, transformers,
# tokenizers, safetensors, ml-dtypes, numpy, jinja2, huggingface-hub, typer, rich, psutil, pytest, pytest-timeout and
# -xdist. A test holds both lists against what the packages of this repository need.
GENERAL = [
    "nlohmann-json",
    "pybind11",
    "pytest-asyncio",
    "pydantic==2.14.3",
    "pydantic-core==2.50.4",
    "annotated-types",
    "typing-inspection",
    "pydantic-settings",
    "python-dotenv",
    "prompt-toolkit",
    "wcwidth",
    "gguf",
    "google-re2",
    "compressed-tensors",
    "loguru",
]
# Of what such machines have, the modules to look for.
MODULES = ("torch", "transformers", "tokenizers", "safetensors", "ml_dtypes", "numpy", "jinja2", "huggingface_hub",
           "typer", "rich", "psutil", "pytest", "pytest_timeout", "xdist")  # fmt: skip
# What the Triton server, its Python models, the gateway and the client need; used by the stage bench5 alone.
TRITON = [
    "nvidia-pytriton==0.7.0",
    "lazy-importer",
    "pyzmq",
    "sh",
    "typing-inspect",
    "mypy-extensions",
    "numpy==1.26.4",
    "tritonclient",
    "grpcio",
    "python-rapidjson",
    "urllib3",
    "protobuf<7",
    "fastapi",
    "annotated-doc",
    "starlette",
    "uvicorn",
    "uvloop",
    "httptools",
    "limits",
    "deprecated",
    "wrapt",
    "redis",
    "async-timeout",  # redis wants it before Python 3.11.3
    "python-json-logger",
    "opentelemetry-api",
    "opentelemetry-sdk",
    "opentelemetry-semantic-conventions",
    "opentelemetry-proto",
    "opentelemetry-exporter-otlp-common",
    "opentelemetry-exporter-http-transport",
    "opentelemetry-exporter-otlp-proto-common",
    "opentelemetry-exporter-otlp-proto-http",
    "googleapis-common-protos",
    "importlib-metadata",
    "zipp",
    "requests",
    "certifi",
    "charset-normalizer",
    "prometheus-client",
    "httpx",
]
_TRITON_NAMES = {re.split("[=<>]", name)[0].replace("-", "_") for name in TRITON}
# Nothing here uses these parts; without them, and compressed harder, the wheels are half as large. libpython is that of
# Python 3.13 in the server's package; the stubs are for all versions of Python.
_UNUSED = re.compile(r"libpython3|python_backend_stubs/(?P<python>3\.\d+)/|/tests/|/caches/")
PLATFORMS = ("manylinux_2_35_x86_64", "manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64",
             "manylinux2014_x86_64", "manylinux1_x86_64")  # fmt: skip
# Of the 64 MiB that such a machine takes at a time; the checkout goes along each time.
TRIP_BYTES = 44 << 20
# Archives whose content is used as a folder: what was compiled, what it needs to compile there, the peer llama.cpp.
COMPILED, GOOGLETEST, CUDA_HEADERS, LLAMA_CPP = "compiled", "googletest", "cuda_headers", "llama_cpp"
XGRAMMAR = "xgrammar"


def download_command(folder: str, python: str = "3.12") -> list[str]:
    """pip's command that fetches the wheels for a machine with that Python."""
    platforms = [part for platform in PLATFORMS for part in ("--platform", platform)]
    return ["pip", "download", "--no-deps", "--only-binary=:all:", "--python-version", python, "--implementation", "cp",
            *platforms, "-d", folder, *GENERAL, *TRITON]  # fmt: skip


def pack(folder: Path, python: str, compiled: Path | None, more: Sequence[Path]) -> list[Path]:
    """Fetches the wheels, makes them small, adds the folder of what was compiled, GoogleTest, xgrammar, headers of
    CUDA and `more` (folders as archives), and lays all of it out in trips: folder/1, folder/2, ..., first what is
    needed first.
    """
    staging = folder / "all"
    shutil.rmtree(staging, ignore_errors=True)  # two releases of a package would not install
    staging.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, "-m", *download_command(str(staging), python)], check=True)
    wheels = sorted(staging.glob("*.whl"), key=_for_triton)
    for wheel in wheels:
        print(f"packing {wheel.name}", flush=True)  # large ones take minutes
        slim(wheel, python)
    _copy_googletest(staging / GOOGLETEST)
    folders = [(compiled, COMPILED), (staging / GOOGLETEST, GOOGLETEST), (_xgrammar(), XGRAMMAR)]
    # Where they had to be fetched for this machine's build, the other one may lack them too.
    folders.append((ROOT / "build" / "cuda_headers", CUDA_HEADERS))
    archives = [_archive(source, staging / name) for source, name in folders if source and source.is_dir()]
    others = [_archive(each, staging / each.name) if each.is_dir() else each for each in more]
    general = sum(not _for_triton(wheel) for wheel in wheels)
    trips = lay_out([*archives, *wheels[:general], *others, *wheels[general:]], folder)
    shutil.rmtree(staging)
    for trip in trips:
        size = sum(file.stat().st_size for file in trip.iterdir())
        print(f"{trip}: {len(list(trip.iterdir()))} files, {size / 2**20:.1f} MiB")
    return trips


def _archive(source: Path, at: Path) -> Path:
    file = at.with_name(at.name + ".tar.xz")
    with tarfile.open(file, "w:xz", preset=6) as archive:
        archive.add(source, ".")
    return file


def lay_out(files: Sequence[Path], folder: Path, limit: int = TRIP_BYTES) -> list[Path]:
    """Fills folder/1, folder/2, ... with `limit` bytes each at most, in the order of the files; larger ones are cut."""
    for old in folder.glob("[0-9]*"):
        shutil.rmtree(old)
    trips: list[Path] = []
    left = 0
    for file in files:
        content = file.read_bytes()
        count = max(1, -(-len(content) // limit))
        digest = hashlib.sha256(content).hexdigest()[:8]
        for part in range(count):
            some = content[part * limit : (part + 1) * limit]
            if not trips or len(some) > left:
                trips.append(folder / str(len(trips) + 1))
                trips[-1].mkdir(parents=True)
                left = limit
            name = file.name if count == 1 else f"{file.name}.{digest}.part{part + 1:02}of{count:02}"
            (trips[-1] / name).write_bytes(some)
            left -= len(some)
    return trips


def gather(brought: Path, carried: Path) -> None:
    """Keeps what was brought along beside what was before, in place of other versions of the same, and joins files of
    which all parts are there."""
    carried.mkdir(parents=True, exist_ok=True)
    # One trip, or the folder of all of them as pack() has laid it out.
    folders = [brought, *sorted(brought.glob("[0-9]*"))]
    files = [file for folder in folders if folder.is_dir() for file in sorted(folder.iterdir()) if file.is_file()]
    for file in files:
        for other in carried.iterdir():
            if other.name != file.name and _replaces(file.name, other.name):
                other.unlink()
        shutil.copy2(file, carried / file.name)
    for last in sorted(carried.glob("*.part01of*")):
        found = _PART.fullmatch(last.name)
        if found is None:
            continue
        parts = sorted(carried.glob(f"{found['file']}.{found['digest']}.part*"))
        if len(parts) == int(found["count"]):
            with (carried / found["file"]).open("wb") as whole:
                for part in parts:
                    whole.write(part.read_bytes())
                    part.unlink()


def incomplete(carried: Path) -> list[str]:
    """Files of which some parts only are there, a line each."""
    seen: dict[str, list[re.Match[str]]] = {}
    for file in sorted(carried.iterdir()) if carried.is_dir() else ():
        if found := _PART.fullmatch(file.name):
            seen.setdefault(found["file"], []).append(found)
    return [
        f"{name} is not whole: {len(parts)} of {int(parts[0]['count'])} parts are here; bring the other trips along too"
        for name, parts in seen.items()
    ]


# As lay_out() names them; the digest is the whole file's.
_PART = re.compile(r"(?P<file>.+)\.(?P<digest>[0-9a-f]{8})\.part\d+of(?P<count>\d+)")


def _replaces(new: str, old: str) -> bool:
    """Whether these files hold the same package, or the same file cut into parts, at different times."""
    if new.endswith(".whl") and old.endswith(".whl"):
        return _project(new) == _project(old)
    ours, theirs = _PART.fullmatch(new), _PART.fullmatch(old)
    if ours is None or theirs is None:
        return False
    return ours["file"] == theirs["file"] and ours["digest"] != theirs["digest"]


def _project(wheel: str) -> str:
    return wheel.split("-")[0].lower().replace(".", "_")


def unpacked(carried: Path, name: str) -> Path | None:
    """The folder of an archive that was brought along, or None."""
    archive, folder = carried / f"{name}.tar.xz", carried / name
    if archive.is_file():
        shutil.rmtree(folder, ignore_errors=True)
        with tarfile.open(archive) as content:
            content.extractall(folder, filter="data")
        archive.unlink()
    return folder if folder.is_dir() else None


def _xgrammar() -> Path:
    """Its sources, which the engine is compiled with."""
    command = [sys.executable, str(ROOT / "scripts" / "get_xgrammar.py")]
    return Path(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())


def fetch_for_compiling() -> None:
    """GoogleTest, and headers of cuBLASLt and NCCL: without them there would be no C++ tests, or nothing at all."""
    for script in ("get_googletest.sh", "get_cuda_headers.sh"):
        subprocess.run([ROOT / "scripts" / script], stdout=subprocess.DEVNULL, check=True)


def _copy_googletest(folder: Path) -> None:
    """Headers, libraries and CMake's files of Debian's package, which links on newer Linuxes too."""
    found = subprocess.run([ROOT / "scripts" / "get_googletest.sh"], capture_output=True, text=True, check=True)
    prefix = Path(found.stdout.strip())
    shutil.rmtree(folder, ignore_errors=True)
    for name in ("gtest", "gmock"):
        shutil.copytree(prefix / "include" / name, folder / "include" / name)
        for library in prefix.glob(f"lib/*/lib{name}*.a"):
            (folder / library.relative_to(prefix)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(library, folder / library.relative_to(prefix))
    for cmake in prefix.glob("lib/*/cmake/GTest"):
        shutil.copytree(cmake, folder / cmake.relative_to(prefix))


def slim(wheel: Path, python: str) -> None:
    """Packs a wheel again, as LZMA and without what is not used. Large ones only: the others would gain nothing."""
    if wheel.stat().st_size < 4_000_000:
        return

    def unused(name: str) -> bool:
        found = _UNUSED.search(name)
        return found is not None and found["python"] != python

    smaller = wheel.with_suffix(".slim")
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(smaller, "w", zipfile.ZIP_LZMA) as new:
        for entry in old.infolist():
            if unused(entry.filename):
                continue
            content = old.read(entry)
            if entry.filename.endswith(".dist-info/RECORD"):
                lines = content.splitlines(keepends=True)
                content = b"".join(line for line in lines if not unused(line.decode()))
            kept = zipfile.ZipInfo(entry.filename, entry.date_time)
            kept.external_attr = entry.external_attr
            new.writestr(kept, content, zipfile.ZIP_LZMA)
    smaller.replace(wheel)


def _for_triton(wheel: Path) -> bool:
    return _project(wheel.name) in _TRITON_NAMES


def install(context: Context) -> str:
    """Unpacks the wheels that were brought along into folders of this check; says what it did."""
    wheels: dict[bool, list[Path]] = {True: [], False: []}
    for wheel in sorted(context.carried.glob("*.whl")):
        wheels[_for_triton(wheel)].append(wheel)
    for for_triton, files in wheels.items():
        target = context.triton_packages if for_triton else context.packages
        if files:  # of a machine that was used before: other versions would be found there
            shutil.rmtree(target, ignore_errors=True)
        command: list[str | Path] = [
            sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile",
            "--no-cache-dir", "--find-links", context.carried, "--target", target, *files,
        ]  # fmt: skip
        log = context.logs / f"pip_{target.name}.log"
        if files and (done := run(command, log, limit_s=120, env=context.environment())).code != 0:
            raise RuntimeError(f"pip {done.how}:\n{done.text[-1500:]}")
    sys.path.append(str(context.packages))  # of this process, which began before they were there
    return "; ".join([f"{len(wheels[False])} + {len(wheels[True])} wheels", *incomplete(context.carried)])
