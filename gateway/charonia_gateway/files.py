"""Values from files, which are read again when the files change."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

log = logging.getLogger("charonia_gateway")

CHECK_INTERVAL_S = 1.0
Stamp = tuple[tuple[int, ...], ...]


def _stamp(path: Path) -> tuple[int, ...]:
    """A value that changes with the file. All missing files have the same value."""
    try:
        found = path.stat()
    except OSError:
        return ()
    # ctime: a change of the permissions counts as a change.
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


class FollowedFiles:
    """Base class of a value from files. If the files become invalid, the last valid value stays in use."""

    def __init__(self, *paths: Path) -> None:
        """Raises the errors of _read()."""
        self._paths = paths
        self._refreshing = threading.Lock()
        self._read_at = self._stamps()
        self._failed: tuple[Stamp, str] | None = None  # of unusable files, with the reason: logged once
        self._read()

    def _read(self) -> None:
        """Read the files. Raises ValueError for unusable files, and then changes nothing."""
        raise NotImplementedError

    def refresh(self) -> None:
        """Read the files again if one has changed. Any thread may call."""
        with self._refreshing:
            self._refresh()

    def _refresh(self) -> None:
        stamps = self._stamps()
        if stamps == self._read_at:
            return
        names = ", ".join(map(str, self._paths))
        try:
            self._read()
        except ValueError as error:
            # Tried again later: the error may be temporary, for example too many open files.
            if self._failed != (failed := (stamps, str(error))):
                log.error("%s cannot be used; the last valid content stays in use: %s", names, error)
            self._failed = failed
            return
        # A file that changed while it was read has another stamp, and is read again next time.
        self._read_at, self._failed = stamps, None
        log.info("%s has changed and was read again", names)

    async def follow(self, then: Callable[[], Awaitable[None]] | None = None) -> None:
        """Call refresh() and `then` periodically, until the task is cancelled."""
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            try:
                await asyncio.to_thread(self.refresh)
                if then:
                    await then()
            except Exception:
                log.exception("checking files failed with an internal error; the check will be repeated")

    def _stamps(self) -> Stamp:
        return tuple(map(_stamp, self._paths))
