"""Tells whether the weights of a folder are still those that something was measured of."""

from __future__ import annotations

import hashlib
from pathlib import Path

from charonia.errors import ModelError

_PIECES, _PIECE_BYTES = 64, 4096


def fingerprint(folder: Path) -> str:
    """32 hex digits of a Hugging Face folder's weight files: of the size of each, and of 64 pieces of 4 KiB that are
    spread evenly over it, the header among them. That is quick for files of any size, and other training or another
    quantisation changes next to all bytes. Names and times do not count: copies and downloads have others.

    Raises ModelError where there are no weights.
    """
    from charonia.weights.checkpoint import weight_files  # with NumPy, which a start takes long to import

    try:
        digests = sorted(_digest(file) for file in weight_files(folder))
    except OSError as error:
        raise ModelError(f"the weights of {folder} cannot be read: {error}") from error
    return hashlib.sha256("".join(digests).encode()).hexdigest()[:32]


def _digest(file: Path) -> str:
    size = file.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    last = max(0, size - _PIECE_BYTES)
    with file.open("rb") as stream:
        for start in sorted({last * piece // (_PIECES - 1) for piece in range(_PIECES)}):
            stream.seek(start)
            digest.update(stream.read(_PIECE_BYTES))
    return digest.hexdigest()
