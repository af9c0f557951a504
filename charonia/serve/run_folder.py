"""The folder of a running server: its logs and the files of its Triton. Two servers never share a folder."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from charonia.errors import ServeError

_LOCK = "lock"


@contextmanager
def held(root: Path, port: int) -> Iterator[Path]:
    """Makes and locks the folder of the server with this gRPC port under `root`, until the context or the process ends.

    Raises ServeError with the process that has the lock, if it is on this machine. Other machines and containers may
    use the same folder `root` with the same port: then this server gets a folder with a number.
    """
    folder, descriptor = _claimed(root, port)
    try:
        with contextlib.suppress(OSError):  # a full disk: then the file does not name the process
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()} {socket.gethostname()}\n".encode(), 0)
        yield folder
    finally:
        os.close(descriptor)


def running(root: Path, port: int) -> str | None:
    """Returns the process that serves with this gRPC port and run folder; None if there is none. Does not try the lock,
    because a server that starts at that moment would fail."""
    folder = root / f"port-{port}"
    with contextlib.suppress(OSError):
        pid, host = _holder(folder)
        if host == socket.gethostname() and _has_open(pid, (folder / _LOCK).stat()):
            return pid
    return None


def ports(root: Path) -> list[int]:
    """Returns the gRPC ports of the servers that run on this machine with this run folder."""
    names = (re.fullmatch(r"port-(\d+)", folder.name) for folder in root.glob("port-*"))
    return sorted(port for port in (int(name[1]) for name in names if name) if running(root, port))


def _has_open(pid: str, file: os.stat_result) -> bool:
    for descriptor in Path("/proc", pid, "fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            if os.path.samestat(descriptor.stat(), file):
                return True
    return False


def _claimed(root: Path, port: int) -> tuple[Path, int]:
    """Returns the folder and its lock."""
    for number in itertools.count(1):
        folder = root / (f"port-{port}" if number == 1 else f"port-{port}-{number}")
        descriptor = _locked(folder)
        if descriptor is not None:
            return folder, descriptor
        pid, host = _holder(folder)
        if host == socket.gethostname():
            raise ServeError(
                f"charonia serve already runs with gRPC port {port}: process {pid} holds {folder}. End that one, or "
                "choose other ports with CHARONIA_GRPC_PORT, CHARONIA_HTTP_PORT, CHARONIA_METRICS_PORT and "
                "CHARONIA_GATEWAY_PORT (--grpc-port, --http-port, --metrics-port and --gateway-port)"
            )
    raise AssertionError("there is no last number")


def _locked(folder: Path) -> int | None:
    """Returns the lock, which the caller closes; None if another process has it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise ServeError(
            f"cannot write to {folder} ({error.strerror}): name another folder with CHARONIA_RUN_DIR"
        ) from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError as error:
        os.close(descriptor)
        raise ServeError(
            f"cannot lock {folder / _LOCK} ({error.strerror}): name a folder of another disk with CHARONIA_RUN_DIR"
        ) from None
    return descriptor


def _holder(folder: Path) -> tuple[str, str]:
    """Process and host name of the owner of the lock. If they are not written yet, the owner is assumed to be here."""
    pid, _, host = (folder / _LOCK).read_text(encoding="utf-8", errors="replace").strip().partition(" ")
    return pid or "unknown", host or socket.gethostname()
