"""Cuts ranges out of the tensors of quantised weights as they are stored, without decoding them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from charonia.errors import ModelError
from charonia.families import Quantization, TensorPart
from charonia.weights.checkpoint import Array, Checkpoint


@dataclass(frozen=True)
class Cut:
    """A tensor to write; `read` gives its values."""

    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], Array]


def cut_parts(checkpoint: Checkpoint, parts: tuple[TensorPart, ...]) -> tuple[Quantization, list[dict[str, Cut]]]:
    """The quantisation of the copy, and of each part its tensors: codes, scales and what else it has. The parts are of
    a quantised weight, and `cut_obstacle` finds none."""
    how = _how_of(parts[0])
    # Where a range begins within a block of rows that share a scale, every row gets its own.
    spread = any((part.rows or (0, 0))[0] % how.group_rows for part in parts)
    kept = replace(how, group_rows=1) if spread else how
    return kept, [_cut(checkpoint, part, spread) for part in parts]


def _how_of(part: TensorPart) -> Quantization:
    assert part.quantised is not None
    return part.quantised.how


def _cut(checkpoint: Checkpoint, part: TensorPart, spread: bool) -> dict[str, Cut]:
    assert part.quantised is not None
    how = part.quantised.how
    rows, cols = part.rows or (0, part.shape[0]), part.cols or (0, part.shape[1])
    per_number = 32 // how.bits
    group = how.group_size or part.shape[1]
    groups = (cols[0] // group, -(-cols[1] // group))
    packed_rows = (rows[0] // per_number, -(-rows[1] // per_number))
    packed_cols = (cols[0] // per_number, cols[1] // per_number)
    by_rows = {
        "rows": {"codes": (rows, cols)},
        "packed-rows": {"codes": (rows, packed_cols), "scales": (rows, groups), "zeros": (packed_rows, groups)},
        "awq": {"codes": (cols, packed_rows), "scales": (groups, rows), "zeros": (groups, packed_rows)},
        "gptq": {"codes": (packed_cols, rows), "scales": (groups, rows), "zeros": (groups, packed_rows)},
        "mxfp4": {"codes": (rows, (cols[0] // 2, cols[1] // 2)), "scales": (rows, groups)},
    }[how.layout]
    cuts: dict[str, Cut] = {}
    for kind, name in {"codes": part.name, **part.quantised.beside}.items():
        info = checkpoint.tensors[name]
        if kind in by_rows:
            cuts[kind] = _range(checkpoint, name, *by_rows[kind])
        elif kind == "scales" and len(info.shape) and info.shape != (1,):
            cuts[kind] = _row_scales(checkpoint, name, how, spread, rows, groups)
        else:  # one number for all, or the order, which goes with whole rows
            cuts[kind] = Cut(info.dtype, info.shape, lambda name=name: checkpoint.read(name))  # type: ignore[misc]
    return cuts


def _range(checkpoint: Checkpoint, name: str, first: tuple[int, int], second: tuple[int, int]) -> Cut:
    shape = (first[1] - first[0], second[1] - second[0])
    return Cut(
        checkpoint.tensors[name].dtype,
        shape,
        lambda: checkpoint.read(name)[first[0] : first[1], second[0] : second[1]],
    )


def _row_scales(
    checkpoint: Checkpoint, name: str, how: Quantization, spread: bool, rows: tuple[int, int], groups: tuple[int, int]
) -> Cut:
    """Scales of layout rows: of each row, or of blocks of them."""
    info = checkpoint.tensors[name]
    block = how.group_rows
    if spread:
        return Cut(
            info.dtype,
            (rows[1] - rows[0], groups[1] - groups[0]),
            lambda: np.repeat(checkpoint.read(name)[:, groups[0] : groups[1]], block, axis=0)[rows[0] : rows[1]],
        )
    taken = (rows[0] // block, -(-rows[1] // block))
    if len(info.shape) == 1:
        return Cut(info.dtype, (taken[1] - taken[0],), lambda: checkpoint.read(name)[taken[0] : taken[1]])
    return _range(checkpoint, name, taken, groups)


def check_values(values: Array, kind: str, how: Quantization, name: str) -> None:
    """ModelError for what the engine would refuse when it loads the copy. kind: of the tensor, as Cuts have it."""
    if kind == "codes" and how.dtype == "F8_E4M3" and ((values.view(np.uint8) & 0x7F) == 0x7F).any():
        raise ModelError(f"tensor {name} has values that are not finite (NaN): download the model again")
    if kind == "scales" and how.layout == "mxfp4" and (values == 0xFF).any():
        raise ModelError(f"tensor {name} has scales that are not finite (NaN): download the model again")
    if kind == "input_scale" and not (values > 0).all():
        raise ModelError(f"tensor {name} is {float(values.min())}, expected more than 0: download the model again")
    offset = how.zero_offset if how.layout == "gptq" else 0
    if kind == "zeros" and how.bits == 8 and offset and (values.view(np.uint8) == 0xFF).any():
        raise ModelError(f"tensor {name} has zeros of 256, expected 0 to 255: download the model again")


def names_in_copy(canonical: str, cuts: list[dict[str, Cut]]) -> list[Mapping[str, str]]:
    """What each tensor of each part is called in the rank's file, by its kind."""
    return [{kind: f"{canonical}.{index}.{kind}" for kind in part} for index, part in enumerate(cuts)]
