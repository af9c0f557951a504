"""The tensors of GGUF files as a checkpoint, and the description of a model with their names and types."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from charonia.errors import ModelError, UnsupportedError
from charonia.families import ModelConfig, ModelSpec, Quantised, Quantization, TensorMap, TensorPart
from charonia.gguf.config import ADDED_ONE, DECAYS, FREQUENCIES, INTERLEAVED, TILED
from charonia.gguf.reader import GgufFile, Tensor, read_gguf
from charonia.weights.checkpoint import DTYPES, NUMPY_TYPES, Array, TensorInfo
from charonia.weights.quantised_tensors import computed_together, is_quantisable

if TYPE_CHECKING:
    from gguf.tensor_mapping import TensorNameMap

LAYOUT = "gguf"
_EXPERT = re.compile(r"model\.layers\.(\d+)\..*experts\.(\d+)\.(\w+)(\.\w+)")
_EXPERT_KINDS = {"w1": "gate", "w2": "down", "w3": "up", "gate_proj": "gate", "down_proj": "down", "up_proj": "up"}
# Tensors of Gemma 4's router and of gated delta nets, whose names do not end with .weight or .bias.
_PLAIN = {
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
}
# The engine dequantises these tables when it loads them.
_TABLES = ("tok_embeddings.weight", "per_layer_embeddings.weight")
# Tensors of Hugging Face's files that are divided in GGUF files, and the names of the parts in order.
_DIVIDED = {
    "self_attn.W_pack": ("attn_q", "attn_k", "attn_v"),
    "linear_attn.in_proj_qkvz": ("attn_qkv", "attn_gate"),
}
# Architectures that the package gguf may not know, and one with the same names of tensors.
_SAME_NAMES = {"hy_v3": "dots1", "mellum": "qwen3moe"}


@dataclass(frozen=True)
class BlockType:
    """A quantised type: the engine's code that has its numbers, and the columns of a group that share a scale."""

    dtype: str
    group: int
    minimums: bool = False


# As in engine/src/model/gguf_blocks.cpp, which decodes the blocks.
BLOCK_TYPES = {
    "Q4_0": BlockType("U4", 32),
    "Q4_1": BlockType("U4", 32, True),
    "Q5_0": BlockType("I8", 32),
    "Q5_1": BlockType("I8", 32, True),
    "Q8_0": BlockType("I8", 32),
    "Q2_K": BlockType("U4", 16, True),
    "Q3_K": BlockType("U4", 16),
    "Q4_K": BlockType("U4", 32, True),
    "Q5_K": BlockType("I8", 32, True),
    "Q6_K": BlockType("I8", 16),
    "IQ4_NL": BlockType("I8", 32),
    "MXFP4": BlockType("F4_E2M1", 32),
}


def block_sizes(block: str) -> tuple[int, int]:
    """Return the columns and the bytes of a block."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    columns, size = GGML_QUANT_SIZES[GGMLQuantizationType[block]]
    return columns, size


class GgufCheckpoint:
    """Memory-mapped GGUF files. A quantised tensor has the type U8, and its last dimension is the bytes of a row."""

    linkable = True

    def __init__(self, file: Path) -> None:
        self.model: GgufFile = read_gguf(file)
        self.notes: tuple[str, ...] = ()
        self.tensors = {name: _info(tensor) for name, tensor in self.model.tensors.items() if name not in FREQUENCIES}
        self._maps: dict[Path, npt.NDArray[np.uint8]] = {}

    def read(self, name: str) -> Array:
        info = self.tensors[name]
        if info.file not in self._maps:
            self._maps[info.file] = np.memmap(info.file, dtype=np.uint8, mode="r")
        assert info.offsets is not None
        data = self._maps[info.file][slice(*info.offsets)]
        return np.frombuffer(data, dtype=NUMPY_TYPES[info.dtype]).reshape(info.shape)


def _info(tensor: Tensor) -> TensorInfo:
    place = (tensor.begin, tensor.end)
    if tensor.type in DTYPES:
        return TensorInfo(tensor.name, tensor.file, tensor.type, tensor.shape, offsets=place)
    if tensor.type not in BLOCK_TYPES:
        raise UnsupportedError(
            f"{tensor.file}: tensor {tensor.name} is of type {tensor.type}, which is not supported; supported: "
            f"{', '.join((*DTYPES, *BLOCK_TYPES))}. Use a file with another quantisation, for example Q4_K_M or Q8_0"
        )
    columns, size = block_sizes(tensor.type)
    shape = (*tensor.shape[:-1], tensor.shape[-1] // columns * size)
    return TensorInfo(tensor.name, tensor.file, "U8", shape, block=tensor.type, offsets=place)


def as_stored(folder: Path, spec: ModelSpec, checkpoint: GgufCheckpoint) -> ModelSpec:
    """Return the spec with the names, the types and the conventions of the file.

    Raises ModelError for missing tensors, and UnsupportedError for a type in a place where the engine has no kernel
    for it.
    """
    from gguf.constants import MODEL_ARCH_NAMES
    from gguf.tensor_mapping import get_tensor_name_map

    architecture = checkpoint.model.architecture
    known = _SAME_NAMES.get(architecture, architecture)
    number = next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == known)
    layers, blocks = spec.config.num_layer, checkpoint.model.metadata[f"{architecture}.block_count"]
    names = get_tensor_name_map(number, blocks)
    tensors: TensorMap = {}
    for canonical, parts in spec.tensors.items():
        if divided := _divided(folder, parts, checkpoint):
            tensors[canonical] = divided
            continue
        theirs = tuple(_renamed(folder, names, part, checkpoint, spec.config.num_experts) for part in parts)
        if ".wkv_b." in canonical and theirs[0].name not in checkpoint.tensors:
            tensors |= _apart(canonical, theirs[0], spec.config)
        else:
            tensors[canonical] = _ranges(theirs, checkpoint) or theirs
    config = replace(
        spec.config,
        rotary_interleaved=spec.config.rotary_interleaved or (architecture in INTERLEAVED and not spec.config.alibi),
        norm_unit_offset=spec.config.norm_unit_offset and architecture not in ADDED_ONE,
        delta_tiled=architecture in TILED,
        delta_decays=architecture in DECAYS,
    )
    _check_there(folder, (part.name for parts in tensors.values() for part in parts), checkpoint.tensors)
    made = _with_types(folder, tensors, checkpoint.tensors)
    ignored = [f"blk.{block}." for block in range(layers, blocks)]  # layers for multi-token prediction
    ignored += [f"{name}." for prefix in spec.ignored if (name := names.get_name(prefix.removesuffix(".")))]
    return replace(spec, config=config, tensors=made, interleaved_experts=False, ignored=tuple(ignored))


def _renamed(
    folder: Path, names: TensorNameMap, part: TensorPart, checkpoint: GgufCheckpoint, experts: int
) -> TensorPart:
    """Return the part of the file's tensor."""
    if match := _EXPERT.fullmatch(part.name):
        return _of_expert(part, match, checkpoint, experts)
    if plain := next((ours for theirs, ours in _PLAIN.items() if part.name.endswith(f".{theirs}")), None):
        return replace(part, name=f"blk.{part.name.split('.')[2]}.{plain}")
    theirs = part.name.replace("_correction_bias", "_correction.bias").replace(".expert_bias", ".expert_bias.bias")
    kinds = (".weight", ".bias")
    name = names.get_name(theirs if theirs.endswith(kinds) else f"{theirs}.weight", kinds)
    if name is None:
        raise UnsupportedError(f"{folder}: GGUF has no name for tensor {part.name}: use the Hugging Face folder")
    if name not in checkpoint.tensors and name.removesuffix(".bias") in checkpoint.tensors:
        name = name.removesuffix(".bias")  # the bias of Hunyuan 3's router
    stored = checkpoint.tensors.get(name)
    if stored and stored.shape == tuple(size for size in part.file_shape if size > 1):
        return replace(part, name=name, shape=stored.shape, stack=0)  # without dimensions of size 1
    return replace(part, name=name)


def _apart(canonical: str, part: TensorPart, config: ModelConfig) -> TensorMap:
    """Return the tensors that the file has instead of wkv_b: W_k of each head, transposed, and W_v."""
    heads, latent, values = config.head_num, config.latent_size, config.value_size_per_head
    sizes = {"k": (latent, part.shape[0] // heads - values), "v": (values, latent)}
    return {
        canonical.replace("kv_b", f"{kind}_b"): (
            TensorPart(part.name.replace("kv_b", f"{kind}_b"), (heads * rows, cols), stack=heads),
        )
        for kind, (rows, cols) in sizes.items()
    }


def _divided(folder: Path, parts: tuple[TensorPart, ...], checkpoint: GgufCheckpoint) -> tuple[TensorPart, ...]:
    """Return the parts of the tensors that the file has instead of the one in the Hugging Face folder, if it has."""
    place = re.fullmatch(r"model\.layers\.(\d+)\.(.*)\.weight", parts[0].name)
    names = [f"blk.{place[1]}.{name}.weight" for name in _DIVIDED.get(place[2], ())] if place else []
    if not names or not all(name in checkpoint.tensors for name in names):
        return ()
    rows = [checkpoint.tensors[name].shape[0] for name in names]
    if sum(rows) != (wanted := sum(part.taken[0] for part in parts)):
        raise ModelError(f"{folder}: tensors {', '.join(names)} have {sum(rows)} rows, but the metadata say {wanted}")
    return tuple(TensorPart(name, (size, *parts[0].shape[1:])) for name, size in zip(names, rows, strict=True))


def _ranges(parts: tuple[TensorPart, ...], checkpoint: GgufCheckpoint) -> tuple[TensorPart, ...]:
    """Return the ranges of a file's tensor with q, k and v, if it has one instead of these parts."""
    both = parts[0].name.replace(".attn_q.", ".attn_qkv.")
    if parts[0].name in checkpoint.tensors or both not in checkpoint.tensors or parts[0].rows:
        return ()
    ends = list(itertools.accumulate(part.shape[0] for part in parts))
    return tuple(
        replace(part, name=both, shape=(ends[-1], *part.shape[1:]), rows=(end - part.shape[0], end))
        for part, end in zip(parts, ends, strict=True)
    )


def _of_expert(part: TensorPart, match: re.Match[str], checkpoint: GgufCheckpoint, experts: int) -> TensorPart:
    """Return the rows of an expert in the tensor of all experts."""
    layer, index, theirs, suffix = match.groups()
    kind, rows = _EXPERT_KINDS[theirs], part.shape[0]
    name, of_expert, first = f"blk.{layer}.ffn_{kind}_exps{suffix}", rows, int(index) * rows
    both = f"blk.{layer}.ffn_gate_up_exps{suffix}"
    if kind != "down" and both in checkpoint.tensors:  # for each expert the rows of gate, then those of up
        name, of_expert, first = both, 2 * rows, (2 * int(index) + (kind == "up")) * rows
    shape = (experts * of_expert, *part.shape[1:])
    return replace(part, name=name, shape=shape, rows=(first, first + rows), stack=experts)


def _check_there(folder: Path, wanted: Iterable[str], tensors: Mapping[str, TensorInfo]) -> None:
    missing = sorted({name for name in wanted if name not in tensors})
    if missing:
        raise ModelError(f"{folder}: {len(missing)} tensors are missing in the GGUF file: {', '.join(missing[:5])}")


def _with_types(
    folder: Path, tensors: Mapping[str, tuple[TensorPart, ...]], infos: Mapping[str, TensorInfo]
) -> dict[str, tuple[TensorPart, ...]]:
    """Return the parts with their quantisation. Weights that are computed together have one: integers of 8 bits if
    one of them needs 8, and the smallest groups."""
    places: dict[str, dict[str, TensorInfo]] = {}
    for canonical, parts in tensors.items():
        place = places.setdefault(computed_together(canonical), {})
        place |= {part.name: infos[part.name] for part in parts}
    shared = {name: _shared(folder, place) for name, place in places.items()}

    def typed(canonical: str, part: TensorPart) -> TensorPart:
        block, how = infos[part.name].block, shared[computed_together(canonical)]
        if how is None:
            return part
        if canonical not in _TABLES and not is_quantisable(canonical):
            raise UnsupportedError(f"{folder}: tensor {part.name} is of type {block}; it must be F32, F16 or BF16")
        _check_size(folder, part, infos[part.name])
        return replace(part, quantised=Quantised(how, block=block), stack=0)

    return {canonical: tuple(typed(canonical, part) for part in parts) for canonical, parts in tensors.items()}


def _shared(folder: Path, infos: Mapping[str, TensorInfo]) -> Quantization | None:
    """Return the quantisation that has the numbers of all these tensors; None if none of them is quantised."""
    types = [BLOCK_TYPES[info.block] for info in infos.values() if info.block]
    codes = {one.dtype for one in types}
    if 0 < len(types) < len(infos) or (len(codes) > 1 and "F4_E2M1" in codes):
        listed = ", ".join(f"{name} is {info.block or info.dtype}" for name, info in list(infos.items())[:4])
        raise UnsupportedError(
            f"{folder}: tensors are computed together, but their types differ too much: {listed}. Use a file with "
            "another quantisation, for example Q4_K_M or Q8_0"
        )
    if not types:
        return None
    return Quantization(
        LAYOUT,
        codes.pop() if len(codes) == 1 else "I8",
        math.gcd(*(one.group for one in types)),
        minimums=any(one.minimums for one in types),
    )


def _check_size(folder: Path, part: TensorPart, info: TensorInfo) -> None:
    columns, size = block_sizes(info.block)
    rows, cols = math.prod(info.shape[:-1]), info.shape[-1] // size * columns
    if (rows, cols) != part.shape:
        raise ModelError(
            f"{folder}: tensor {part.name} has shape {[rows, cols]}, but the metadata say {list(part.shape)}: download "
            "the file again"
        )
