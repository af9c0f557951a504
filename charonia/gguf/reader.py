"""Reads the metadata and the places of the tensors of GGUF files, version 2 and 3, in one file or split into several.

The reader of the package `gguf` is not used, because it makes several NumPy arrays of every string: for the 262144
tokens of Gemma 3 it takes 10 s, and this reader half a second.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from charonia.errors import CharoniaError, ModelError, UnsupportedError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
# Types of metadata: format characters of `struct`, by number. 8 is a string and 9 a list.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _LIST = 8, 9
_MOST_DIMENSIONS = 4
_MOST_HEADER = 64 << 20  # bytes of metadata and names; Gemma's 262144 tokens take 20 MB
_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)


@dataclass(frozen=True)
class Tensor:
    """The place of a tensor. shape: its sizes, the rows first; for a quantised type in elements, not in bytes."""

    name: str
    type: str  # name in ggml, such as Q4_K
    shape: tuple[int, ...]
    file: Path
    begin: int  # bytes [begin, end) of the file
    end: int


@dataclass
class GgufFile:
    """A model in GGUF. files: all of its parts, in order."""

    files: list[Path]
    metadata: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))


def read_gguf(file: Path) -> GgufFile:
    """Read a file, and the other parts of a model whose files are split. file: any of the parts.

    Raises ModelError for a damaged or missing file, and UnsupportedError for types that are not known.
    """
    model = GgufFile([one.resolve() for one in shards_of(file)])
    for index, part in enumerate(model.files):
        metadata, tensors = _read_part(part)
        if index == 0:
            model.metadata = metadata
        if twice := model.tensors.keys() & tensors.keys():
            raise ModelError(f"{part} has tensor {min(twice)}, which another part has too: use parts of one model")
        model.tensors |= tensors
    count = model.metadata.get("split.count", 1)
    if count not in (0, len(model.files)):
        raise ModelError(f"{file} is one of {count} parts: keep their names, which end with -00001-of-{count:05}.gguf")
    return model


def shards_of(file: Path) -> list[Path]:
    """Return all files of a model. file: any of them. Raises ModelError if one is missing."""
    match = _SHARD.fullmatch(file.name)
    if not match:
        return [file]
    count = int(match[3])
    files = [file.with_name(f"{match[1]}-{index + 1:05}-of-{match[3]}.gguf") for index in range(count)]
    if missing := [one.name for one in files if not one.is_file()]:
        raise ModelError(f"{file.parent} lacks {', '.join(missing[:3])} of {count} parts of {match[1]}: download them")
    return files


def stem_of(file: Path) -> str:
    """Return the name of a file without its suffix and the number of a part."""
    match = _SHARD.fullmatch(file.name)
    return match[1] if match else file.stem


def _read_part(file: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    try:
        with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Part(file, data).read()
    except CharoniaError:
        raise
    except (struct.error, UnicodeDecodeError, IndexError, ValueError, OverflowError) as error:
        raise ModelError(f"{file} is not a complete GGUF file ({error}): download it again") from error
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror}") from error


class _Part:
    def __init__(self, file: Path, data: mmap.mmap) -> None:
        self._file = file
        self._data = data
        self._at = 0

    def read(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        if self._data[:4] != _MAGIC:
            raise ModelError(f"{self._file} is not a GGUF file: it does not begin with GGUF")
        self._at = 4
        version = self._number("I")
        if version not in _VERSIONS:
            raise UnsupportedError(f"{self._file} has version {version} of GGUF; supported: 2 and 3, little endian")
        tensors, keys = self._number("Q"), self._number("Q")
        metadata = {}
        for _ in range(keys):
            key = self._string()
            if key in metadata:
                raise ValueError(f"{key} is there twice")
            metadata[key] = self._value(self._number("I"))
        infos = [self._tensor_info() for _ in range(tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0:
            raise ValueError(f"general.alignment is {alignment!r}")
        first = -(-self._at // alignment) * alignment
        places = {info[0]: self._place(first, *info) for info in infos}
        if len(places) < len(infos):
            raise ValueError("two tensors have the same name")
        return metadata, places

    def _take(self, size: int) -> int:
        """Return the place of the next bytes, and go to their end."""
        begin, self._at = self._at, self._at + size
        if self._at > len(self._data):
            raise ValueError(f"{size} bytes at byte {begin} end after the file")
        if self._at > _MOST_HEADER:
            raise ValueError(f"its metadata and names have more than {_MOST_HEADER} bytes")
        return begin

    def _number(self, kind: str) -> Any:
        return struct.unpack_from(f"<{kind}", self._data, self._take(struct.calcsize(f"<{kind}")))[0]

    def _string(self) -> str:
        begin = self._take(self._number("Q"))
        return self._data[begin : self._at].decode("utf-8", "replace")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _LIST:
            return self._number(_scalar(kind))
        of, count = self._number("I"), self._number("Q")
        if of == _STRING:
            return [self._string() for _ in range(count)]
        begin = self._take(count * struct.calcsize(f"<{_scalar(of)}"))  # a list of lists is of an unknown type
        return list(struct.unpack_from(f"<{count}{_scalar(of)}", self._data, begin))

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name, dimensions = self._string(), self._number("I")
        if not 1 <= dimensions <= _MOST_DIMENSIONS:
            raise ValueError(f"tensor {name} has {dimensions} dimensions")
        sizes = [self._number("Q") for _ in range(dimensions)]
        return name, tuple(reversed(sizes)), self._number("I"), self._number("Q")

    def _place(self, first: int, name: str, shape: tuple[int, ...], kind: int, offset: int) -> Tensor:
        type_name, columns, size = _type(kind)
        elements = math.prod(shape)
        if not elements:
            raise ValueError(f"tensor {name} has no elements")
        if shape[-1] % columns:
            raise ValueError(f"tensor {name} has rows of {shape[-1]} columns, not a multiple of {columns}")
        begin = first + offset
        end = begin + elements // columns * size
        if end > len(self._data):
            raise ValueError(f"tensor {name} ends at byte {end}, but the file has {len(self._data)} bytes")
        return Tensor(name, type_name, shape, self._file, begin, end)


def _scalar(kind: int) -> str:
    if kind not in _SCALARS:
        raise ValueError(f"metadata of the unknown type {kind}")
    return _SCALARS[kind]


def _type(kind: int) -> tuple[str, int, int]:
    """Return the name of a tensor type, and the columns and bytes of its blocks."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        known = GGMLQuantizationType(kind)
    except ValueError:
        raise UnsupportedError(f"tensors of ggml's type number {kind} are not supported") from None
    columns, size = GGML_QUANT_SIZES[known]
    return known.name, columns, size
