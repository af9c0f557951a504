"""The folder of what the workers of one gateway share. Each of them holds it by a lock, which the kernel takes back
when they die: a folder that nobody holds is of a gateway whose processes were all killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_PREFIX = "charonia-gateway-workers-"


def made() -> Path:
    """A new folder, held by this process. Those that dead gateways of the same user left are removed. Raises
    OSError."""
    _remove_dead(Path(tempfile.gettempdir()))
    folder = Path(tempfile.mkdtemp(prefix=f"new-{_PREFIX}"))
    hold(folder)
    return folder.rename(folder.with_name(folder.name.removeprefix("new-")))  # not before it is held


def hold(folder: Path) -> int:
    """Until this process ends: by that descriptor. Raises OSError where there is no such folder."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    with contextlib.suppress(OSError):  # a file system without locks: then nobody removes it
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    return descriptor


def remove_unheld(folder: Path, descriptor: int) -> None:
    """Unless somebody holds it by another descriptor. Raises OSError then."""
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    shutil.rmtree(folder, ignore_errors=True)


def _remove_dead(parent: Path) -> None:
    for folder in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(descriptor).st_uid == os.getuid():
                    remove_unheld(folder, descriptor)
            finally:
                os.close(descriptor)
