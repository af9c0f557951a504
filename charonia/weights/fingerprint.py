"""Computes a fingerprint of weight files, to check whether a measurement still belongs to the current weights."""

from __future__ import annotations

import hashlib
import zipfile
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from charonia.errors import ModelError
from charonia.gguf.folder_names import model_file
from charonia.gguf.reader import read_gguf

# preprocessing/ and postprocessing/ look for it. 32 digits alone do not depend on all small tensors.
VERSION = "2-"
_PIECES, _PIECE_BYTES = 64, 4096
_SMALL_BYTES = 64 << 10
_MOST_SMALL_BYTES = 256 << 20
_GAP_BYTES = 4096  # reading these bytes is faster than another call
_READ_BYTES = 1 << 20
_LOCAL_HEADER = 30  # bytes of a zip file before the name of an entry


class _Tensor(NamedTuple):
    """Bytes [begin, end) of a file. about: name, type and shape; in a .bin file the checksum."""

    begin: int
    end: int
    about: str


def fingerprint(folder: Path) -> str:
    """Return VERSION and 32 hex digits from a Hugging Face folder's weight files: the sizes of the files, names, types,
    shapes and places of all tensors, which file counts for a tensor in several, each tensor of up to 64 KiB (norms,
    biases, scales), and 64 pieces of 4 KiB that are spread evenly over each file. Names of files and times do not
    count, because they differ between copies.

    Not seen: changes of a tensor of more than 64 KiB that spare all of these pieces. If the small tensors have more
    than 256 MiB, the largest of them count as large. The checksums in .bin files show every change, but PyTorch can
    write files without them. Only the pieces of files of PyTorch before 1.6 count.

    So a model of 200 files and 100,000 tensors needs at most 306 MiB, and up to 4 KiB for each small tensor that has no
    small tensors beside it. Raises ModelError if there are no weights, or if a file is incomplete.
    """
    try:
        files = _tensors(folder)
        limit = _largest_small(size for tensors in files.values() for size in _sizes(tensors))
        digests = sorted(_digest(file, tensors, limit) for file, tensors in files.items())
    except OSError as error:
        raise ModelError(f"the weights of {folder} cannot be read: {error}") from error
    return VERSION + hashlib.sha256("".join(digests).encode()).hexdigest()[:32]


def _tensors(folder: Path) -> dict[Path, list[_Tensor]]:
    """Return all weight files with their tensors."""
    from charonia.weights.checkpoint import SafetensorsCheckpoint, find_weights  # late: NumPy takes long to import

    if gguf := model_file(folder):
        model = read_gguf(gguf)
        found: dict[Path, list[_Tensor]] = {file: [] for file in model.files}
        for tensor in model.tensors.values():
            about = f"{tensor.name} {tensor.type} {tensor.shape}"
            found[tensor.file].append(_Tensor(tensor.begin, tensor.end, about))
        return found
    found = {}
    files, places = find_weights(folder)
    times: Counter[str] = Counter()  # files that have a tensor of this name
    for file in files:
        if file.suffix == ".bin":
            found[file] = list(_zipped(file))
            continue
        checkpoint = SafetensorsCheckpoint([file])
        times.update(list(checkpoint.tensors))
        found[file] = [
            _Tensor(*checkpoint.place(name), f"{name} {info.dtype} {info.shape}")
            for name, info in checkpoint.tensors.items()
        ]
    for name, file in places.items():
        # Tensors in .bin files have no names here.
        if times[name] > 1 or (len(files) > 1 and file.suffix == ".bin"):
            found[file].append(_Tensor(0, 0, f"{name} is read from here"))
    return found


def _zipped(file: Path) -> Iterator[_Tensor]:
    """Yield the entries of a .bin file, which are tensors and the names of all of them."""
    try:
        if not zipfile.is_zipfile(file):
            return
        with zipfile.ZipFile(file) as content, file.open("rb", _GAP_BYTES) as stream:
            for entry in content.infolist():
                stream.seek(entry.header_offset)
                head = stream.read(_LOCAL_HEADER)
                lengths = (int.from_bytes(head[at : at + 2], "little") for at in (26, 28))  # of the name and of more
                begin = entry.header_offset + _LOCAL_HEADER + sum(lengths)
                yield _Tensor(begin, begin + entry.compress_size, f"{entry.CRC:08x}")
    except OSError:
        raise
    except Exception as error:  # zipfile may raise any error
        raise ModelError(f"{file} is not a complete file of PyTorch weights ({error}): download it again") from error


def _sizes(tensors: Iterable[_Tensor]) -> Iterator[int]:
    return (tensor.end - tensor.begin for tensor in tensors)


def _largest_small(sizes: Iterable[int]) -> int:
    """Return the size of the largest tensors that are read completely."""
    small = sorted(size for size in sizes if size <= _SMALL_BYTES)
    kept = bisect_right(list(accumulate(small)), _MOST_SMALL_BYTES)
    return _SMALL_BYTES if kept == len(small) else small[kept] - 1


def _digest(file: Path, tensors: list[_Tensor], limit: int) -> str:
    size = file.stat().st_size
    digest = hashlib.sha256(f"{size}\n".encode())
    for tensor in sorted(tensors):
        digest.update(f"{tensor.about} {tensor.begin} {tensor.end}\n".encode(errors="surrogatepass"))
    last = max(0, size - _PIECE_BYTES)
    pieces = {last * piece // (_PIECES - 1) for piece in range(_PIECES)}
    ranges = [(begin, begin + _PIECE_BYTES) for begin in pieces]
    ranges += [(tensor.begin, tensor.end) for tensor in tensors if tensor.end - tensor.begin <= limit]
    # With the default, a network file system reads 1 MiB for each small tensor.
    with file.open("rb", _GAP_BYTES) as stream:
        for begin, end in _joined(ranges):
            stream.seek(begin)
            for at in range(begin, end, _READ_BYTES):
                digest.update(stream.read(min(_READ_BYTES, end - at)))
    return digest.hexdigest()


def _joined(ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield ranges in order. Those with small gaps become one, with the gaps."""
    joined: list[int] = []
    for begin, end in sorted(ranges):
        if joined and begin <= joined[1] + _GAP_BYTES:
            joined[1] = max(joined[1], end)
            continue
        if joined:
            yield joined[0], joined[1]
        joined = [begin, end]
    yield joined[0], joined[1]
