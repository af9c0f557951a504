"""Room on a disk: checked before much is written, and named if a write fails."""

from __future__ import annotations

import contextlib
import errno
import shutil
from collections.abc import Iterator
from pathlib import Path

from charonia.errors import CharoniaError, ModelError
from charonia.units import spell_bytes

_FULL_OR_READ_ONLY = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


def nearest(folder: Path) -> Path:
    """The folder, or its nearest parent that exists."""
    return next(one for one in (folder, *folder.parents) if one.exists())


def require_space(folder: Path, needed: int, what: str, error: type[CharoniaError] = ModelError) -> None:
    """Raises `error` if the file system of `folder` has less than `needed` bytes free."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise error(
            f"{what} needs about {spell_bytes(needed)} in {folder}, but {spell_bytes(free)} are free: free some space, "
            "or choose another folder"
        )


@contextlib.contextmanager
def explained(folder: Path, what: str) -> Iterator[None]:
    """Raises ModelError, with the free space, if the disk of `folder` is full or read-only, or if the user may not
    write there, or if a file is in the place of a folder. Other errors pass."""
    try:
        yield
    except OSError as error:
        place = Path(error.filename) if error.filename else None
        above = place in (folder, *folder.parents)
        if above and isinstance(error, NotADirectoryError | FileExistsError):
            file = nearest(folder)
            raise ModelError(f"{what} cannot be written: {file} is not a folder: choose another folder") from error
        denied = isinstance(error, PermissionError) and (above or (place is not None and folder in place.parents))
        if not (denied or is_full_or_read_only(error)):
            raise
        raise ModelError(f"{what} cannot be written: {reason(error, folder)}") from error


def is_full_or_read_only(error: OSError) -> bool:
    return error.errno in _FULL_OR_READ_ONLY


def reason(error: OSError, folder: Path | None = None) -> str:
    """The reason, the file, the free space on its disk, and the remedy. folder: where the file is if the error does not
    name it."""
    name = error.filename2 or error.filename  # the second one is the copy, if a file was copied
    place = Path(name) if name else folder
    free = ""
    for known in (place, *place.parents) if place else ():
        with contextlib.suppress(OSError):
            free = f" ({spell_bytes(shutil.disk_usage(known).free)} are free)"
            break
    at = f" at {place}" if place else ""
    return f"{error.strerror}{at}{free}: free some space, correct the permissions, or choose another folder"
