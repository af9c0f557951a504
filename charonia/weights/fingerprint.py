"""Computes a fingerprint of weight files, to check whether a measurement still belongs to the current weights."""

from __future__ import annotations

import hashlib
from pathlib import Path

from charonia.errors import ModelError

_PIECES, _PIECE_BYTES = 64, 4096


def fingerprint(folder: Path) -> str:
    """Return 32 hex digits from the sizes of a Hugging Face folder's weight files, and from 64 pieces of 4 KiB that are
    spread evenly over each file, the header included. This is fast for files of any size, and a changed model changes
    almost all bytes. Names and times do not count, because they differ between copies.

    Raises ModelError if there are no weights.
    """
    from charonia.weights.checkpoint import weight_files  # late import: NumPy takes long to import

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
