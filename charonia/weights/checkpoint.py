"""Reads the tensors of a Hugging Face folder: safetensors (one file or sharded) and old PyTorch .bin checkpoints."""

from __future__ import annotations

import json
import math
import re
import zipfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import ml_dtypes
import numpy as np
import numpy.typing as npt

from charonia.errors import ModelError, UnsupportedError
from charonia.gguf.folder_names import model_file
from charonia.gguf.reader import shards_of
from charonia.json_files import read_json

Array = npt.NDArray[Any]

# The float types of weights, by their names in safetensors.
DTYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
# All types that can be read, also those of quantised weights.
NUMPY_TYPES: dict[str, np.dtype[Any]] = {
    **DTYPES,
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "F8_E8M0": np.dtype(np.uint8),  # exponents + 127
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
}
# Old file names of AutoGPTQ. A large model has several files.
_GPTQ_FILE = re.compile(r"(gptq_model-.+?)(?:-\d{5}-of-\d{5})?\.safetensors(?:\.index\.json)?")
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
# From weight_type in config.ini to the name in safetensors.
WEIGHT_TYPES = {"fp32": "F32", "fp16": "F16", "bf16": "BF16"}


@dataclass(frozen=True)
class TensorInfo:
    """The file and the type of a tensor. `dtype` is the name in safetensors.

    Only in GGUF files: `block` is the quantised type, and `offsets` are the first byte in the file and the end.
    """

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    block: str = ""
    offsets: tuple[int, int] | None = None


class Checkpoint(Protocol):
    """The tensors of a model, read one at a time."""

    linkable: bool  # whether the engine can map the files directly
    tensors: dict[str, TensorInfo]
    notes: tuple[str, ...]  # warnings for the user

    def read(self, name: str) -> Array:
        """Return the tensor; valid as long as the checkpoint exists. The caller must not write to it."""
        ...


@dataclass(frozen=True)
class _Extent:
    """Bytes [begin, end) of a file."""

    begin: int
    end: int


class SafetensorsCheckpoint:
    """Memory-mapped safetensors files."""

    # The numpy reader of safetensors does not support bfloat16, so this class parses the header itself:
    # u64 length, JSON {name: {dtype, shape, data_offsets}}, data.
    linkable = True

    def __init__(self, files: Iterable[Path], places: Mapping[str, Path] | None = None) -> None:
        """places: the file of each tensor according to an index. It decides if several files have the same tensor."""
        self.tensors: dict[str, TensorInfo] = {}
        self.notes: tuple[str, ...] = ()
        self._extents: dict[str, _Extent] = {}
        self._maps: dict[Path, npt.NDArray[np.uint8]] = {}
        for file in files:
            self._add(file, places or {})

    def _add(self, file: Path, places: Mapping[str, Path]) -> None:
        if not _is_file(file):
            raise ModelError(f"the weight file {file} is missing: was the download complete?")
        data = np.memmap(file, dtype=np.uint8, mode="r") if file.stat().st_size > 8 else np.zeros(0, np.uint8)
        length = int.from_bytes(data[:8].tobytes(), "little")
        try:
            if not 0 < length <= data.size - 8:
                raise ValueError("its header is longer than the file")
            if length > _MAX_HEADER_BYTES:
                raise ValueError(f"its header of {length} bytes is longer than {_MAX_HEADER_BYTES}")
            header = json.loads(data[8 : 8 + length].tobytes())
            if not isinstance(header, dict):
                raise ValueError("its header is not a JSON object")
            header.pop("__metadata__", None)
            for name, entry in header.items():
                info = TensorInfo(name, file, entry["dtype"], tuple(entry["shape"]))
                begin, end = entry["data_offsets"]
                _check_entry(info, begin, end, data.size - 8 - length)
                if name in self.tensors and not _replaces(self, info, places):
                    continue
                self.tensors[name], self._extents[name] = info, _Extent(8 + length + begin, 8 + length + end)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ModelError(f"{file} is not a complete safetensors file ({error}): download it again") from error
        self._maps[file] = data

    def place(self, name: str) -> tuple[int, int]:
        """Return the first byte of a tensor in its file, and the end."""
        extent = self._extents[name]
        return extent.begin, extent.end

    def read(self, name: str) -> Array:
        info, extent = self.tensors[name], self._extents[name]
        data = self._maps[info.file][extent.begin : extent.end]
        # frombuffer: the data may start at any byte, but a view needs alignment.
        return np.frombuffer(data, dtype=NUMPY_TYPES[info.dtype]).reshape(info.shape)


def _replaces(checkpoint: Checkpoint, info: TensorInfo, places: Mapping[str, Path]) -> bool:
    """Whether a tensor replaces the tensor of the same name in an earlier file. Adds a note that names both files.

    Raises ModelError if the index names neither file.
    """
    first, place = checkpoint.tensors[info.name].file, places.get(info.name)
    if place not in (first, info.file):
        raise ModelError(
            f"tensor {info.name} is in {first} and in {info.file}, and no index says which one is the model's: "
            "remove one of the two files, or name the right one in weight_map"
        )
    checkpoint.notes += (
        f"tensor {info.name} is in {first} and in {info.file}: {place.name} is used, as the index says",
    )
    return place == info.file


def _check_entry(info: TensorInfo, begin: Any, end: Any, size: int) -> None:
    """Raises ValueError unless the tensor has `size` or fewer bytes of data at [begin, end)."""
    if not isinstance(info.dtype, str) or not all(_is_count(number) for number in (*info.shape, begin, end)):
        raise ValueError(f"tensor {info.name} has no valid dtype, shape and data_offsets")
    if not begin <= end <= size:
        raise ValueError(f"tensor {info.name} ends after the file does")
    dtype = NUMPY_TYPES.get(info.dtype)
    if dtype is not None and math.prod(info.shape) * dtype.itemsize != end - begin:
        raise ValueError(f"tensor {info.name} has {end - begin} bytes, which does not match its shape")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


class TorchCheckpoint:
    """PyTorch .bin files, loaded with weights_only=True; needs torch. Files of PyTorch before 1.6 are not zip archives,
    so they cannot be mapped and are read into memory completely."""

    linkable = False

    def __init__(self, files: Iterable[Path], places: Mapping[str, Path] | None = None) -> None:
        """places: same as in SafetensorsCheckpoint."""
        try:
            import torch
        except ImportError as error:
            raise ModelError(
                "this model has only PyTorch .bin weights, and reading them needs PyTorch: "
                "pip install torch --index-url https://download.pytorch.org/whl/cpu"
            ) from error
        names = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64"}
        self.tensors: dict[str, TensorInfo] = {}
        self.notes: tuple[str, ...] = ()
        self._values: dict[str, Any] = {}
        for file in files:
            if not _is_file(file):
                raise ModelError(f"the weight file {file} is missing: was the download complete?")
            try:
                content = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
            except Exception as error:  # the unpickler may raise any error
                reason = next(iter(str(error).splitlines()), "") or type(error).__name__
                raise ModelError(
                    f"{file} cannot be read as PyTorch weights ({reason}): download it again, or convert the model's "
                    "safetensors files"
                ) from error
            if not isinstance(content, Mapping):
                raise ModelError(f"{file} holds a {type(content).__name__}; it must hold tensors by name")
            for name, value in content.items():
                dense = isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_nested
                if not isinstance(name, str) or not dense or value.device.type != "cpu":
                    raise ModelError(
                        f"{file} holds a {type(value).__name__} under {name!r}; it must hold dense tensors by name, "
                        "nothing else and nothing nested"
                    )
                dtype = names.get(value.dtype, str(value.dtype))
                info = TensorInfo(name, file, dtype, tuple(value.shape))
                if name in self.tensors and not _replaces(self, info, places or {}):
                    continue
                self.tensors[name], self._values[name] = info, value.detach()

    def read(self, name: str) -> Array:
        value = self._values[name].contiguous()
        dtype = NUMPY_TYPES[self.tensors[name].dtype]
        if dtype == DTYPES["BF16"]:
            import torch

            return cast(Array, value.view(torch.int16).numpy().view(dtype))
        return cast(Array, value.numpy())


def _is_file(path: Path) -> bool:
    """Whether the path is a file. False also for names that are too long for a file."""
    try:
        return path.is_file()
    except OSError:
        return False


def _file_names(index: Path, weight_map: dict[str, Any]) -> set[str]:
    """Return the files that an index names. They are inside the folder: links may lead out of it, names may not."""
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not name:
            raise ModelError(f"{index}: weight_map says {name!r} for {tensor}; it must be the name of a file")
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ModelError(
                f"{index}: weight_map names {name}, which is outside of the model's folder: put the file there, or a "
                "link to it"
            )
    return set(weight_map.values())


def open_checkpoint(folder: Path) -> Checkpoint:
    """Open the weights of a Hugging Face folder."""
    if gguf := model_file(folder):
        from charonia.weights.gguf_checkpoint import GgufCheckpoint

        return GgufCheckpoint(gguf)
    files, places = find_weights(folder)
    return (TorchCheckpoint if files[0].suffix == ".bin" else SafetensorsCheckpoint)(files, places)


def weight_files(folder: Path) -> list[Path]:
    """Return the weight files of a Hugging Face folder: safetensors if there are any, otherwise .bin files. Files that
    an index names may be missing. Raises ModelError or UnsupportedError if there are no weights."""
    if gguf := model_file(folder):
        return [one.resolve() for one in shards_of(gguf)]
    return find_weights(folder)[0]


def find_weights(folder: Path) -> tuple[list[Path], dict[str, Path]]:
    """Return the weight files of a folder without a GGUF file, and the file of each tensor if there is an index."""
    for name in _names_of_weights(folder):
        index = folder / f"{name}.index.json"
        if index.is_file():
            weight_map = read_json(index).get("weight_map")
            if not isinstance(weight_map, dict) or not weight_map:
                raise ModelError(f"{index} has no weight_map: download it again")
            files = [folder / file for file in sorted(_file_names(index, weight_map))]
            return files, {tensor: folder / file for tensor, file in weight_map.items()}
        if _is_file(folder / name):
            return [folder / name], {}
    for pattern in ("gptq_model*.bin", "gptq_model*.pt"):
        for file in sorted(folder.glob(pattern)):
            raise UnsupportedError(
                f"{file}: quantised weights in .{pattern.rpartition('.')[2]} files are not supported: use a copy with "
                "safetensors files"
            )
    raise ModelError(
        f"{folder} has no weights: expected model.safetensors, model.safetensors.index.json or pytorch_model.bin"
    )


def _names_of_weights(folder: Path) -> Iterator[str]:
    """Yield the possible names of an unsharded file. AutoGPTQ's old names come after the usual name, because
    gptq_stem() raises an error if there are several."""
    yield "model.safetensors"
    old = gptq_stem(folder, {file.name for file in folder.glob("*")})
    if old is not None:
        yield f"{old}.safetensors"
    yield "pytorch_model.bin"


def gptq_stem(folder: Path, names: Collection[str]) -> str | None:
    """Return the file name, without suffix, of weights in the old format of AutoGPTQ, like gptq_model-4bit-128g.

    folder: has quantize_config.json. names: the files of the model. Raises ModelError if there are several such names.
    """
    config = folder / "quantize_config.json"
    if not config.is_file():
        return None
    named = read_json(config).get("model_file_base_name")
    if isinstance(named, str) and not {f"{named}.safetensors", f"{named}.safetensors.index.json"}.isdisjoint(names):
        return named
    stems = sorted({match[1] for match in map(_GPTQ_FILE.fullmatch, names) if match})
    if len(stems) > 1:
        raise ModelError(
            f"{folder} has the weights of several quantisations, {', '.join(stems)}: keep only the one that "
            "quantize_config.json describes"
        )
    return stems[0] if stems else None


def gptq_shards(stem: str, names: Iterable[str]) -> list[str]:
    """Return the files whose name starts with the result of gptq_stem()."""
    return [name for name in names if re.fullmatch(rf"{re.escape(stem)}(-\d{{5}}-of-\d{{5}})?\.safetensors", name)]
