"""Writes safetensors files with one tensor in memory at a time. The library's own writer needs all of them in memory.

Format: u64 length of the header, little-endian; the header, JSON {name: {dtype, shape, data_offsets}}; the data.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from charonia.weights.checkpoint import NUMPY_TYPES, Array


def write_safetensors(
    file: Path,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: str | Mapping[str, str],
    values: Callable[[str], Iterable[Array]],
    advance: Callable[[int], None] = lambda _: None,
    *,
    checksum: bool = True,
) -> dict[str, Any]:
    """Write the tensors of `shapes` in this order. dtype: one safetensors type for all of them, or one for each name.

    values(name): yields the pieces of a tensor along dimension 0, in its type. advance: called with the bytes of each
    piece. Returns {"bytes", "sha256"} of the file; without `checksum`, which takes longer than writing, no sha256.
    """
    header: dict[str, Any] = {}
    offset = 0
    types = {name: dtype if isinstance(dtype, str) else dtype[name] for name in shapes}
    for name, shape in shapes.items():
        size = math.prod(shape) * NUMPY_TYPES[types[name]].itemsize
        header[name] = {"dtype": types[name], "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + 8) % 64)  # aligns the data to 64 bytes
    digest = hashlib.sha256()
    with file.open("wb") as stream:

        def write(data: bytes | memoryview) -> None:
            stream.write(data)
            if checksum:
                digest.update(data)

        write(len(text).to_bytes(8, "little") + text)
        for name, shape in shapes.items():
            start = stream.tell()
            for piece in values(name):
                if piece.dtype != NUMPY_TYPES[types[name]]:
                    raise TypeError(f"{name} is of type {piece.dtype}, not {types[name]}")
                write(np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data)
                advance(piece.nbytes)
            if stream.tell() - start != math.prod(shape) * NUMPY_TYPES[types[name]].itemsize:
                raise ValueError(f"the pieces of {name} do not add up to {shape}")
        return {"bytes": stream.tell(), **({"sha256": digest.hexdigest()} if checksum else {})}
