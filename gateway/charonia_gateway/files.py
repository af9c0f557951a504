"""Values that are read from files, and read again when the files change."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

log = logging.getLogger("charonia_gateway")

CHECK_INTERVAL_S = 1.0
Stamp = tuple[tuple[int, ...], ...]


def _stamp(path: Path) -> tuple[int, ...]:
    """Changes when the file does; the same for any that is missing."""
    try:
        found = path.stat()
    except OSError:
        return ()
    # ctime: also who may read it.
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


class FollowedFiles:
    """Files that become invalid leave the last valid value in use."""

    def __init__(self, *paths: Path) -> None:
        """Raises what _read() does."""
        self._paths = paths
        self._read_at = self._stamps()
        self._failed: tuple[Stamp, str] | None = None  # of files that could not be used, and why: said once
        self._read()

    def _read(self) -> None:
        """Read the files. Raises ValueError for files that cannot be used; then nothing has changed."""
        raise NotImplementedError

    def refresh(self) -> None:
        """Read the files again if one has changed."""
        stamps = self._stamps()
        if stamps == self._read_at:
            return
        names = ", ".join(map(str, self._paths))
        try:
            self._read()
        except ValueError as error:
            # It is tried again: the error may be temporary, for example too many open files.
            if self._failed != (failed := (stamps, str(error))):
                log.error("what was read of %s before stays in use: %s", names, error)
            self._failed = failed
            return
        # A file that changed while it was read has another stamp, and is read again next time.
        self._read_at, self._failed = stamps, None
        log.info("%s changed, and was read again", names)

    async def follow(self) -> None:
        """Until it is cancelled."""
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            try:
                await asyncio.to_thread(self.refresh)
            except Exception:
                log.exception("a look at files had an error of the gateway's own; the next follows")

    def _stamps(self) -> Stamp:
        return tuple(map(_stamp, self._paths))
