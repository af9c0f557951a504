"""The folder of one running stack: its logs and what is made for its Triton. Two stacks never share one."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from charonia.serve.errors import ServeError

_LOCK = "lock"


@contextmanager
def held(root: Path, port: int) -> Iterator[Path]:
    """Makes and locks the folder of the stack with this gRPC port under `root`, until the context ends; a process that
    dies holds it no longer.

    Raises ServeError naming who holds it, where that is a process of this machine. Other machines and containers may
    have the same folder `root`, and the same port of their own: beside theirs, this one gets another folder.
    """
    folder, descriptor = _claimed(root, port)
    try:
        with contextlib.suppress(OSError):  # a full disk: who has the lock is then not said
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()} {socket.gethostname()}\n".encode(), 0)
        yield folder
    finally:
        os.close(descriptor)


def _claimed(root: Path, port: int) -> tuple[Path, int]:
    """The folder and its lock."""
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
    """The lock, to be closed; None where another one has it."""
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
    """Process and host name of who has the lock. It may not have written them yet: then it is a process here."""
    pid, _, host = (folder / _LOCK).read_text(encoding="utf-8", errors="replace").strip().partition(" ")
    return pid or "unknown", host or socket.gethostname()
