"""The shared memory between Triton and its Python models.

It consists of files in /dev/shm whose names begin with a prefix of this server. A killed server does not remove them.
So each server locks a file next to them, and the next server that starts removes files whose lock is free. A process
id instead of a lock is not enough: another container may have the same process id and the same /dev/shm.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FOLDER = Path("/dev/shm")
_CHECK_INTERVAL_S = 0.2
_OWNER = "owner_of_"  # followed by the prefix: the name of the locked file
# Every user of the machine can make files there, so only prefixes of this form are accepted.
_PREFIX = re.compile(r"charonia_\d+_[0-9a-f]{8}_")


def new_prefix() -> str:
    """A unique prefix."""
    return f"charonia_{os.getpid()}_{secrets.token_hex(4)}_"


def option(prefix: str) -> str:
    """Triton's option that sets the prefix."""
    return f"--backend-config=python,shm-region-prefix-name={prefix}"


@contextmanager
def owned(prefix: str, folder: Path = FOLDER) -> Iterator[None]:
    """Owns `prefix` until the context ends, and keeps its files private. First removes the files of killed stacks.
    If the folder cannot be written, the prefix has no owner, and its files stay after a kill."""
    remove_left(folder)
    ended = threading.Event()
    keeper = threading.Thread(target=_keep_private, args=(prefix, folder, ended), daemon=True)
    keeper.start()
    lock = folder / f"{_OWNER}{prefix}"
    descriptor = None
    with contextlib.suppress(OSError):
        # The file gets its name after the lock, so that it never looks like a file of a killed server.
        unnamed = lock.with_name(f".{lock.name}")
        descriptor = os.open(unnamed, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        unnamed.rename(lock)
    try:
        yield
    finally:
        ended.set()
        keeper.join()
        remove(prefix, folder)
        with contextlib.suppress(OSError):
            lock.unlink(missing_ok=True)
        if descriptor is not None:
            os.close(descriptor)


def _keep_private(prefix: str, folder: Path, ended: threading.Event) -> None:
    """Takes all files of the prefix from other users. Triton sets mode 0644 on each new file, whatever the umask is."""
    while not ended.wait(_CHECK_INTERVAL_S):
        for file in folder.glob(f"{prefix}*"):
            with contextlib.suppress(OSError):
                found = file.lstat()
                if stat.S_ISREG(found.st_mode) and found.st_mode & 0o077:
                    descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW)
                    os.fchmod(descriptor, 0o600)
                    os.close(descriptor)


def remove(prefix: str, folder: Path = FOLDER) -> None:
    """Removes the files with this prefix. A killed server does not remove them itself."""
    for file in folder.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            file.unlink()


def remove_left(folder: Path = FOLDER) -> None:
    """Removes the files of servers that do not run any more."""
    for lock in folder.glob(f"{_OWNER}charonia_*"):
        prefix = lock.name.removeprefix(_OWNER)
        if not _PREFIX.fullmatch(prefix):
            continue
        with contextlib.suppress(OSError):  # another user's file, or locked, or being removed by another server
            descriptor = os.open(lock, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove(prefix, folder)
                lock.unlink()
            finally:
                os.close(descriptor)
