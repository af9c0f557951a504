"""`charonia doctor`: what this machine has and lacks for `charonia serve`, each with a remedy."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from charonia.bench import machine
from charonia.errors import CharoniaError, ServeError
from charonia.serve import access, checks, shared_memory, triton
from charonia.settings import ServeSettings

State = Literal["ok", "note", "problem"]
_SHM_BYTES = 256 << 20  # a few processes of preprocessing with long prompts; Docker's default is 64 MB
_DISK_BYTES = 5 << 30
_MEMORY_BYTES = 2 << 30
_PYTHONS = ((3, 10), (3, 11), (3, 12))


class Finding(NamedTuple):
    """note: nothing fails because of it, but the user should know. text: the fact, and the remedy of a problem."""

    name: str
    state: State
    text: str


def examine(settings: ServeSettings) -> Iterator[Finding]:
    """Look at everything that `charonia serve` needs."""
    yield _checked("Python", _python)
    yield _checked("packages", lambda: _packages(settings))
    yield _checked("Triton", lambda: str(triton.Distribution.find(settings.triton_dir).server))
    yield _checked("engine", lambda: str(triton.backend_library()))
    yield _compiler()
    about = machine.read()
    yield Finding("processor", "ok", f"{about['processor']}, {about['processors']} threads, {about['instructions']}")
    yield _gpu(about["gpu"])
    yield _memory()
    yield _space("/dev/shm", shared_memory.FOLDER, _SHM_BYTES, "start the container with --shm-size 1g")
    yield _checked("run folder", lambda: _writable(settings.run_dir.expanduser()))
    yield _space("disk", settings.run_dir.expanduser(), _DISK_BYTES, "free some space, or set CHARONIA_RUN_DIR")
    for port in access.ports(settings):
        yield _checked(f"port {port.number}", lambda port=port: _free(port))  # type: ignore[misc]


def show(findings: list[Finding]) -> None:
    signs = {"ok": "ok", "note": "note", "problem": "PROBLEM"}
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        print(f"{signs[finding.state]:<8} {finding.name:<{width}}  {finding.text}")


def _checked(name: str, check: Callable[[], str]) -> Finding:
    try:
        return Finding(name, "ok", check())
    except (CharoniaError, OSError) as error:
        return Finding(name, "problem", str(error))


def _python() -> str:
    if sys.version_info[:2] not in _PYTHONS:
        raise ServeError(f"Python {platform.python_version()} is not supported by Triton: use 3.10, 3.11 or 3.12")
    checks.check_python()
    return f"{platform.python_version()} ({sys.executable})"


def _packages(settings: ServeSettings) -> str:
    checks.check_packages(own_triton=settings.triton_dir is None, gateway=settings.gateway, liveness=True)
    return "all that serving needs"


def _compiler() -> Finding:
    found = next(filter(None, map(shutil.which, (os.environ.get("CXX", "g++"), "c++", "clang++"))), None)
    if found:
        return Finding("compiler", "ok", found)
    return Finding("compiler", "note", "none; only building from source needs one: sudo apt-get install g++")


def _gpu(found: str) -> Finding:
    if found:
        return Finding("GPU", "ok", found)
    if triton.has_gpu():
        return Finding(
            "GPU", "problem", "there is a GPU, but nvidia-smi does not respond: install or restart its driver"
        )
    return Finding("GPU", "note", "none, so models run on the CPU; in a container, start it with --gpus all")


def _memory() -> Finding:
    lines = (line.split() for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines())
    found = {line[0].rstrip(":"): int(line[1]) * 1024 for line in lines}
    text = f"{found['MemAvailable'] / 1e9:.1f} GB of {found['MemTotal'] / 1e9:.1f} GB are available"
    if found["MemAvailable"] < _MEMORY_BYTES:
        return Finding("memory", "problem", f"{text}: end other programs; charonia plan MODEL says what a model needs")
    return Finding("memory", "ok", f"{text}; charonia plan MODEL says what a model needs")


def _writable(folder: Path) -> str:
    place = next(one for one in (folder, *folder.parents) if one.exists())
    if not os.access(place, os.W_OK):
        raise ServeError(f"{place} cannot be written: set CHARONIA_RUN_DIR (--run-dir) to a folder of yours")
    return str(folder)


def _space(name: str, folder: Path, needed: int, remedy: str) -> Finding:
    place = next(one for one in (folder, *folder.parents) if one.exists())
    free = shutil.disk_usage(place).free
    text = f"{free / 1e9:.1f} GB are free in {place}"
    if free < needed:
        return Finding(name, "problem", f"{text}, and {needed / 1e9:.1f} GB should be: {remedy}")
    return Finding(name, "ok", text)


def _free(port: access.Port) -> str:
    checks.check_ports([port])
    return f"free at {port.address} ({port.number_name})"
