"""The log of requests that can be replayed: one JSON object per line. The prompts are in it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

log = logging.getLogger("charonia_gateway")

# As the logs of `charonia serve`: a file that would become larger becomes NAME.1, and NAME.1 becomes NAME.2.
_LOG_BYTES = 20 << 20
_OLD_LOGS = 4


class RequestLog:
    """A file that only its owner can read. Several processes may write to it. A line that cannot be written is
    dropped."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def write(self, entry: dict[str, Any]) -> None:
        text = json.dumps(entry, ensure_ascii=False, separators=(",", ":")) + "\n"
        line = text.encode("utf-8", "backslashreplace")
        try:
            with _opened(self._file.parent, os.O_RDONLY) as folder:
                fcntl.flock(folder, fcntl.LOCK_EX)  # no other process writes or rotates meanwhile
                with contextlib.suppress(FileNotFoundError):
                    if 0 < self._file.stat().st_size > _LOG_BYTES - len(line):
                        self._rotate()
                with _opened(self._file, os.O_WRONLY | os.O_APPEND | os.O_CREAT) as file:
                    os.fchmod(file, 0o600)
                    os.write(file, line)
        except OSError as error:
            log.warning("a request could not be written to %s: %s", self._file, error)

    def _rotate(self) -> None:
        for number in range(_OLD_LOGS, 0, -1):
            newer = self._file if number == 1 else Path(f"{self._file}.{number - 1}")
            with contextlib.suppress(FileNotFoundError):
                newer.replace(f"{self._file}.{number}")


@contextlib.contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
