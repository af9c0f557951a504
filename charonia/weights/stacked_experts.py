"""Tensors with all experts of a layer. In GPT-OSS checkpoints rows of gate and up alternate, in MXFP4 or in 16 bits. In
others all gate rows come before the up rows."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import replace

from charonia.families import ModelSpec, QuantizationConfig, TensorMap, TensorPart

CODES = "_blocks"  # name suffix of the codes: [experts, rows, groups, bytes of a group]
_STACKED = re.compile(r"(?:.*\.)?experts\.(?:gate_up|down)_proj_(?:blocks|scales)")
_EXPERT = re.compile(r"(?:mtp\.)?layers\.\d+\.feed_forward\.experts\.(\d+)\.(w[123])\.0\.weight")
# By canonical weight: the stacked tensor, the first row within an expert's part, and the row step.
_PLACES = {"w1": ("gate_up_proj", 0, 2), "w3": ("gate_up_proj", 1, 2), "w2": ("down_proj", 0, 1)}
_BIAS = re.compile(r"(?:mtp\.)?layers\.\d+\.feed_forward\.experts\.(\d+)\.(w[123])\.0\.bias")


def stacked_experts(spec: ModelSpec, config: QuantizationConfig, tensors: Collection[str]) -> TensorMap:
    """Return the spec's tensors with experts' weights as ranges of the stacked tensors, named by their codes. Experts
    with separate tensors, and experts that `config` keeps in 16 bits, are unchanged."""
    made: TensorMap = {}
    for canonical, parts in spec.tensors.items():
        match = _EXPERT.fullmatch(canonical)
        made[canonical] = (
            (_place(parts[0], int(match[1]), match[2], spec.config.num_experts, config, tensors),) if match else parts
        )
    return made


def fused_experts(spec: ModelSpec, shape_of: Callable[[str], tuple[int, ...] | None]) -> ModelSpec:
    """Return the spec with experts' weights as ranges of `gate_up_proj` [experts, 2 * inter, hidden] and `down_proj`
    [experts, hidden, inter], if these exist and the expert has no tensor of its own. The last two dimensions of both
    may be swapped, as in Qwen3-VL and GPT-OSS. The same for biases, `gate_up_proj_bias` [experts, 2 * inter] and
    `down_proj_bias` [experts, hidden]. shape_of: returns a tensor's shape, or None if it does not exist."""
    made: TensorMap = {}
    for canonical, parts in spec.tensors.items():
        weight, bias = _EXPERT.fullmatch(canonical), _BIAS.fullmatch(canonical)
        fused = None
        if weight and shape_of(parts[0].name) is None:
            fused = _fused(parts[0], int(weight[1]), weight[2], spec, shape_of)
        if bias and shape_of(parts[0].name) is None:
            fused = _fused_bias(parts[0], int(bias[1]), bias[2], spec)
        made[canonical] = parts if fused is None else (fused,)
    return replace(spec, tensors=made)


def _fused(
    part: TensorPart, index: int, kind: str, spec: ModelSpec, shape_of: Callable[[str], tuple[int, ...] | None]
) -> TensorPart | None:
    count, inter, hidden = spec.config.num_experts, spec.config.expert_inter_size, spec.config.hidden_units
    module = _module(part.name, index)
    names = (f"{module}.gate_up_proj", f"{module}.down_proj")
    found = tuple(map(shape_of, names))
    if None in found:
        return None
    # Compare both shapes, because one matrix may be square.
    transposed = found == ((count, hidden, 2 * inter), (count, inter, hidden))
    transposed = transposed and found != ((count, 2 * inter, hidden), (count, hidden, inter))
    rows, step = _rows(index, kind, spec)
    if kind == "w2":
        name, shape = names[1], (count * hidden, inter)
    else:
        name, shape = names[0], (2 * count * inter, hidden)
    return TensorPart(name, shape, rows, row_step=step, stack=count, transposed=transposed)


def _fused_bias(part: TensorPart, index: int, kind: str, spec: ModelSpec) -> TensorPart:
    rows, step = _rows(index, kind, spec)
    size = spec.config.hidden_units if kind == "w2" else 2 * spec.config.expert_inter_size
    name, count = f"{_module(part.name, index)}.{_PLACES[kind][0]}_bias", spec.config.num_experts
    return TensorPart(name, (count * size,), rows, row_step=step, stack=count)


def _rows(index: int, kind: str, spec: ModelSpec) -> tuple[tuple[int, int], int]:
    """Return the rows of an expert's matrix in the stacked tensor, and their step."""
    inter, hidden = spec.config.expert_inter_size, spec.config.hidden_units
    if kind == "w2":
        return (index * hidden, (index + 1) * hidden), 1
    if spec.interleaved_experts:
        first = 2 * index * inter + _PLACES[kind][1]
        return (first, first + 2 * inter - 1), 2
    first = 2 * index * inter + (inter if kind == "w3" else 0)
    return (first, first + inter), 1


def is_stacked(name: str) -> bool:
    """Whether the name belongs to a tensor with all experts of a layer."""
    return _STACKED.fullmatch(name) is not None


def expert_modules(spec: ModelSpec) -> list[str]:
    """Return the module names of each layer's experts in the files."""
    found = ((_EXPERT.fullmatch(canonical), parts[0].name) for canonical, parts in spec.tensors.items())
    return list(dict.fromkeys(_module(name, int(match[1])) for match, name in found if match))


def _module(name: str, index: int) -> str:
    return name.rpartition(f".{index}.")[0]


def _place(
    part: TensorPart, index: int, kind: str, count: int, config: QuantizationConfig, tensors: Collection[str]
) -> TensorPart:
    name, first, step = _PLACES[kind]
    module = _module(part.name, index)
    codes = f"{module}.{name}{CODES}"
    if part.name in tensors or (codes not in tensors and config.scheme_of((module,)) is None):
        return part
    rows, cols = part.shape
    begin = index * rows * step + first
    return TensorPart(codes, (count * rows * step, cols), (begin, begin + (rows - 1) * step + 1), row_step=step)
