"""Reads the tensors of a Hugging Face folder: safetensors, sharded or not, and old PyTorch .bin checkpoints."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import ml_dtypes
import numpy as np
import numpy.typing as npt

from charonia.errors import ModelError

Array = npt.NDArray[Any]

# safetensors' names of the float types that weights come in.
DTYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
# config.ini's weight_type to safetensors' name.
WEIGHT_TYPES = {"fp32": "F32", "fp16": "F16", "bf16": "BF16"}


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies and what it is. `dtype` is safetensors' name."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]


class Checkpoint(Protocol):
    """The tensors of a model, read one at a time."""

    linkable: bool  # the engine can map the files themselves
    tensors: dict[str, TensorInfo]

    def read(self, name: str) -> Array:
        """The tensor; valid until the checkpoint goes. The caller must not write to it."""
        ...


@dataclass(frozen=True)
class _Extent:
    """Bytes [begin, end) of a file."""

    begin: int
    end: int


class SafetensorsCheckpoint:
    """Memory-mapped safetensors files."""

    # safetensors' own numpy reader has no bfloat16, hence this reading of its header:
    # u64 length, JSON {name: {dtype, shape, data_offsets}}, data.
    linkable = True

    def __init__(self, files: Iterable[Path]) -> None:
        self.tensors: dict[str, TensorInfo] = {}
        self._extents: dict[str, _Extent] = {}
        self._maps: dict[Path, npt.NDArray[np.uint8]] = {}
        for file in files:
            self._add(file)

    def _add(self, file: Path) -> None:
        if not file.is_file():
            raise ModelError(f"the weight file {file} is missing: was the download complete?")
        data = np.memmap(file, dtype=np.uint8, mode="r") if file.stat().st_size > 8 else np.zeros(0, np.uint8)
        length = int.from_bytes(data[:8].tobytes(), "little")
        try:
            if not 0 < length <= data.size - 8:
                raise ValueError("its header is longer than the file")
            header = json.loads(data[8 : 8 + length].tobytes())
            header.pop("__metadata__", None)
            for name, entry in header.items():
                begin, end = (8 + length + offset for offset in entry["data_offsets"])
                if end > data.size:
                    raise ValueError(f"tensor {name} ends after the file does")
                self.tensors[name] = TensorInfo(name, file, entry["dtype"], tuple(entry["shape"]))
                self._extents[name] = _Extent(begin, end)
        except (ValueError, KeyError, TypeError) as error:
            raise ModelError(f"{file} is no complete safetensors file ({error}): download it again") from error
        self._maps[file] = data

    def read(self, name: str) -> Array:
        info, extent = self.tensors[name], self._extents[name]
        data = self._maps[info.file][extent.begin : extent.end]
        # frombuffer: the data of a file begins at any byte, a view would need alignment.
        return np.frombuffer(data, dtype=DTYPES[info.dtype]).reshape(info.shape)


class TorchCheckpoint:
    """PyTorch .bin files, loaded with weights_only=True; needs torch."""

    linkable = False

    def __init__(self, files: Iterable[Path]) -> None:
        try:
            import torch
        except ImportError as error:
            raise ModelError(
                "this model has only PyTorch .bin weights, and reading them needs PyTorch: "
                "pip install torch --index-url https://download.pytorch.org/whl/cpu"
            ) from error
        names = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
        self.tensors: dict[str, TensorInfo] = {}
        self._values: dict[str, Any] = {}
        for file in files:
            if not file.is_file():
                raise ModelError(f"the weight file {file} is missing: was the download complete?")
            for name, value in torch.load(file, map_location="cpu", weights_only=True, mmap=True).items():
                dtype = names.get(value.dtype, str(value.dtype))
                self.tensors[name] = TensorInfo(name, file, dtype, tuple(value.shape))
                self._values[name] = value

    def read(self, name: str) -> Array:
        value = self._values[name].contiguous()
        dtype = DTYPES[self.tensors[name].dtype]
        if dtype == DTYPES["BF16"]:
            import torch

            return cast(Array, value.view(torch.int16).numpy().view(dtype))
        return cast(Array, value.numpy())


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object; ModelError names the file when it is not there or not one."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"{file} is missing") from error
    except ValueError as error:
        raise ModelError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{file} must hold a JSON object")
    return content


def open_checkpoint(folder: Path) -> Checkpoint:
    """Opens the weights of a Hugging Face folder: safetensors where there are any, else .bin files."""
    for stem, suffix, reader in (
        ("model", "safetensors", SafetensorsCheckpoint),
        ("pytorch_model", "bin", TorchCheckpoint),
    ):
        index, single = folder / f"{stem}.{suffix}.index.json", folder / f"{stem}.{suffix}"
        if index.is_file():
            weight_map = read_json(index).get("weight_map")
            if not isinstance(weight_map, dict) or not weight_map:
                raise ModelError(f"{index} has no weight_map: download it again")
            return reader(folder / name for name in sorted(set(weight_map.values())))
        if single.is_file():
            return reader([single])
    raise ModelError(
        f"{folder} has no weights: expected model.safetensors, model.safetensors.index.json or pytorch_model.bin"
    )
