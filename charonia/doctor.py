"""`charonia doctor`: what this machine has and lacks for `charonia serve`, each with a remedy."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from charonia.bench import machine
from charonia.disk import nearest
from charonia.errors import CharoniaError, ServeError
from charonia.serve import access, checks, run_folder, shared_memory, triton
from charonia.settings import ServeSettings
from charonia.units import spell_bytes

State = Literal["ok", "note", "problem"]
_SHM_BYTES = 256 << 20  # a few processes of preprocessing with long prompts; Docker's default is 64 MB
_DISK_BYTES = 5 << 30
_MEMORY_BYTES = 2 << 30
_CGROUP = Path("/sys/fs/cgroup")
# Files with limit, usage and statistics of a group, and the reclaimable usage in the statistics: version 2, then 1.
_CGROUP_FILES = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
)
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
    ports = access.ports(settings)
    for root in (settings.run_dir.expanduser(), Path("run")):  # the second: of make serve
        if pid := run_folder.running(root, settings.grpc_port):
            yield Finding("ports", "note", f"charonia serve, process {pid}, runs with gRPC port {settings.grpc_port}")
            return
    for at, port in enumerate(ports):
        equal = [one for one in ports[:at] if one.number == port.number][:1]
        yield _checked(f"port {port.number}", lambda ports=(*equal, port): _free(ports))  # type: ignore[misc]


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
    checks.check_packages(
        own_triton=settings.triton_dir is None, gateway=settings.gateway, liveness=settings.hang_timeout_s > 0
    )
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
    total, free, remedy = found["MemTotal"], found["MemAvailable"], "end other programs"
    if (limit := _container_memory()) and limit[0] < total:
        total, free, remedy = limit[0], min(free, limit[1]), "raise the memory limit of this container"
    text = f"{spell_bytes(free)} of {spell_bytes(total)} are available"
    if free < _MEMORY_BYTES:
        return Finding("memory", "problem", f"{text}: {remedy}; charonia plan MODEL says what a model needs")
    return Finding("memory", "ok", f"{text}; charonia plan MODEL says what a model needs")


def _container_memory() -> tuple[int, int] | None:
    """Limit and free bytes of this container's control group; None if there is no limit."""
    for names in _CGROUP_FILES:
        with contextlib.suppress(OSError, ValueError):  # another version, or the limit is "max"
            limit, usage, stat = ((_CGROUP / name).read_text(encoding="utf-8") for name in names[:3])
            reclaimable = dict(line.split() for line in stat.splitlines()).get(names[3], "0")
            return int(limit), int(limit) - int(usage) + int(reclaimable)
    return None


def _writable(folder: Path) -> str:
    place = nearest(folder)
    try:
        with tempfile.TemporaryDirectory(dir=place):
            return str(folder)
    except OSError as error:
        raise ServeError(
            f"{folder} cannot be written ({error.strerror}: {place}): set CHARONIA_RUN_DIR to a folder of yours"
        ) from None


def _space(name: str, folder: Path, needed: int, remedy: str) -> Finding:
    free = shutil.disk_usage(nearest(folder)).free
    text = f"{spell_bytes(free)} are free for {folder}"
    if free < needed:
        return Finding(name, "problem", f"{text}, and {spell_bytes(needed)} should be: {remedy}")
    return Finding(name, "ok", text)


def _free(ports: Sequence[access.Port]) -> str:
    """ports: the last one, after another one with the same number if there is one."""
    checks.check_ports(ports, option=False)
    return f"free at {ports[-1].address} ({ports[-1].number_name})"
