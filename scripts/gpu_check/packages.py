"""Packages that a bare machine with CUDA and PyTorch lacks: which, how they are brought along, how they get there."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from gpu_check.commands import run
from gpu_check.context import ROOT, Context

# What the build and the tests need beside what such machines have: nvcc, cmake, ninja, PyTorch, transformers,
# tokenizers, safetensors, ml-dtypes, jinja2, huggingface-hub, typer, rich, pybind11, pytest and pytest-timeout.
GENERAL = [
    "nlohmann-json",
    "pytest-asyncio",
    "pydantic==2.14.3",
    "pydantic-core==2.50.4",
    "annotated-types",
    "typing-inspection",
    "pydantic-settings",
    "python-dotenv",
    "prompt-toolkit",
    "wcwidth",
]
# What the Triton server, its Python models, the gateway and the client need; used by the piece bench5 alone.
TRITON = [
    "nvidia-pytriton==0.7.0",
    "numpy==1.26.4",
    "tritonclient",
    "python-rapidjson",
    "protobuf<7",
    "fastapi",
    "starlette",
    "uvicorn",
    "httptools",
    "prometheus-client",
    "httpx",
]
_TRITON_NAMES = {re.split("[=<>]", name)[0].replace("-", "_") for name in TRITON}
# Nothing here uses these parts; without them, and compressed harder, the wheels are half as large. libpython is that of
# Python 3.13 in the server's package; the stubs are for all versions of Python.
_UNUSED = re.compile(r"libpython3|python_backend_stubs/(?P<python>3\.\d+)/|/tests/|/caches/")
PLATFORMS = ("manylinux_2_35_x86_64", "manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64",
             "manylinux2014_x86_64", "manylinux1_x86_64")  # fmt: skip


def download_command(folder: str, python: str = "3.12") -> list[str]:
    """pip's command that fetches the wheels for a machine with that Python."""
    platforms = [part for platform in PLATFORMS for part in ("--platform", platform)]
    return ["pip", "download", "--no-deps", "--only-binary=:all:", "--python-version", python, "--implementation", "cp",
            *platforms, "-d", folder, *GENERAL, *TRITON]  # fmt: skip


def pack(folder: Path, python: str = "3.12") -> None:
    """Downloads the wheels into `folder`, makes them small enough to be carried along, and adds GoogleTest."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, "-m", *download_command(str(folder), python)], check=True)
    for wheel in sorted(folder.glob("*.whl")):
        slim(wheel, python)
    _copy_googletest(folder / "googletest")
    _copy_cuda_headers(folder / "cuda_headers")
    total = sum(wheel.stat().st_size for wheel in folder.glob("*.whl"))
    print(f"{folder}: {len(list(folder.glob('*.whl')))} wheels, {total / 1e6:.1f} MB")


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


def _copy_cuda_headers(folder: Path) -> None:
    """cublasLt.h and nccl.h, where they had to be fetched for this machine's build: the other one may lack them too."""
    fetched = ROOT / "build" / "cuda_headers"
    shutil.rmtree(folder, ignore_errors=True)
    if fetched.is_dir():
        shutil.copytree(fetched, folder)


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


def install(context: Context) -> str:
    """Unpacks the wheels that were brought along into folders of this check; says what it did."""
    if not context.wheels.is_dir():
        return f"no {context.wheels}"
    wheels: dict[bool, list[Path]] = {True: [], False: []}
    for wheel in sorted(context.wheels.glob("*.whl")):
        wheels[wheel.name.split("-")[0].lower().replace(".", "_") in _TRITON_NAMES].append(wheel)
    for for_triton, files in wheels.items():
        target = context.triton_packages if for_triton else context.packages
        command: list[str | Path] = [
            sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile",
            "--no-cache-dir", "--upgrade", "--find-links", context.wheels, "--target", target, *files,
        ]  # fmt: skip
        log = context.logs / f"pip_{target.name}.log"
        if files and (done := run(command, log, limit_s=120, env=context.environment())).code != 0:
            raise RuntimeError(f"pip {done.how}:\n{done.text[-1500:]}")
    return f"{len(wheels[False])} + {len(wheels[True])} wheels of {context.wheels.name}"
