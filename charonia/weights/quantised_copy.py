"""Cuts ranges out of the tensors of quantised weights without decoding them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from charonia.errors import ModelError
from charonia.families import Quantization, TensorPart
from charonia.weights.checkpoint import Array, Checkpoint
from charonia.weights.gguf_checkpoint import LAYOUT, block_sizes

_TOO_LARGE = 253  # MXFP4's stored exponent of 2^126: codes are up to 6, and 4 * 2^126 is infinite in fp32


@dataclass(frozen=True)
class Cut:
    """A tensor to write; `read` returns its values."""

    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], Array]


def cut_parts(checkpoint: Checkpoint, parts: tuple[TensorPart, ...]) -> tuple[Quantization, list[dict[str, Cut]]]:
    """Return the quantisation of the copy, and for each part its tensors: codes, scales and others. The parts must
    belong to a quantised weight without a `cut_obstacle`."""
    how = _how_of(parts[0])
    # If a range starts within a block of rows that share a scale, every row gets its own scale.
    spread = any((part.rows or (0, 0))[0] % how.group_rows for part in parts)
    kept = replace(how, group_rows=1) if spread else how
    return kept, [_cut(checkpoint, part, spread) for part in parts]


def _how_of(part: TensorPart) -> Quantization:
    assert part.quantised is not None
    return part.quantised.how


def _cut(checkpoint: Checkpoint, part: TensorPart, spread: bool) -> dict[str, Cut]:
    assert part.quantised is not None
    how = part.quantised.how
    # With other layouts, a row step would need different scales and zeros.
    assert part.row_step == 1 or how.layout == "mxfp4"
    rows = range(*(part.rows or (0, part.shape[0])), part.row_step)
    cols = range(*(part.cols or (0, part.shape[1])))
    per_number = 32 // how.bits
    group = how.group_size or part.shape[1]
    groups = range(cols.start // group, -(-cols.stop // group))
    packed_rows = range(rows.start // per_number, -(-rows.stop // per_number))
    packed_cols = range(cols.start // per_number, cols.stop // per_number)
    by_rows = {
        "rows": {"codes": (rows, cols)},
        "packed-rows": {"codes": (rows, packed_cols), "scales": (rows, groups), "zeros": (packed_rows, groups)},
        "awq": {"codes": (cols, packed_rows), "scales": (groups, rows), "zeros": (groups, packed_rows)},
        "gptq": {"codes": (packed_cols, rows), "scales": (groups, rows), "zeros": (groups, packed_rows)},
        LAYOUT: {"codes": (rows, _block_bytes(part.quantised.block, cols))},
        "mxfp4": {"codes": (rows, range(cols.start // 2, cols.stop // 2)), "scales": (rows, groups)},
    }[how.layout]
    cuts: dict[str, Cut] = {}
    for kind, name in {"codes": part.name, **part.quantised.beside}.items():
        info = checkpoint.tensors[name]
        if kind in by_rows:
            cuts[kind] = _range(checkpoint, name, *by_rows[kind])
        elif kind == "scales" and len(info.shape) and info.shape != (1,):
            cuts[kind] = _row_scales(checkpoint, name, how, spread, rows, groups)
        else:  # one number for all rows, or the column order of whole rows
            cuts[kind] = Cut(info.dtype, info.shape, lambda name=name: checkpoint.read(name))  # type: ignore[misc]
    return cuts


def _block_bytes(block: str, cols: range) -> range:
    """Return the bytes of a row that have these columns."""
    if not block:
        return range(0)
    columns, size = block_sizes(block)
    return range(cols.start // columns * size, cols.stop // columns * size)


def _range(checkpoint: Checkpoint, name: str, first: range, second: range) -> Cut:
    info = checkpoint.tensors[name]
    # Stacked experts: dimension 1 has the rows of one expert, and the later dimensions are one row.
    height = math.prod(info.shape[: 1 if len(info.shape) < 3 else 2])
    return Cut(
        info.dtype,
        (len(first), len(second)),
        lambda: checkpoint.read(name).reshape(height, -1)[_slice(first), _slice(second)],
    )


def _slice(taken: range) -> slice:
    return slice(taken.start, taken.stop, taken.step)


def _row_scales(checkpoint: Checkpoint, name: str, how: Quantization, spread: bool, rows: range, groups: range) -> Cut:
    """Cut the scales of layout "rows": one per row, or one per block of rows."""
    info = checkpoint.tensors[name]
    block = how.group_rows
    if spread:
        return Cut(
            info.dtype,
            (len(rows), len(groups)),
            lambda: np.repeat(checkpoint.read(name)[:, _slice(groups)], block, axis=0)[_slice(rows)],
        )
    taken = range(rows.start // block, -(-rows.stop // block))
    if len(info.shape) == 1:
        return Cut(info.dtype, (len(taken),), lambda: checkpoint.read(name)[_slice(taken)])
    return _range(checkpoint, name, taken, groups)


def check_values(values: Array, kind: str, how: Quantization, name: str) -> None:
    """Raises ModelError for values that the engine would reject. kind: key of the tensor in Cuts."""
    if kind == "codes" and how.dtype == "F8_E4M3" and ((values.view(np.uint8) & 0x7F) == 0x7F).any():
        raise ModelError(f"tensor {name} has values that are not finite (NaN): download the model again")
    if kind == "scales" and how.layout == "mxfp4" and (values >= _TOO_LARGE).any():
        if (values == 0xFF).any():
            raise ModelError(f"tensor {name} has scales that are not finite (NaN): download the model again")
        raise ModelError(
            f"tensor {name} has scales of 2^126 or more, so weights may be infinite: download the model again"
        )
    if kind == "input_scale" and not (values > 0).all():
        raise ModelError(f"tensor {name} is {float(values.min())}, expected more than 0: download the model again")
    offset = how.zero_offset if how.layout == "gptq" else 0
    if kind == "zeros" and how.bits == 8 and offset and (values.view(np.uint8) == 0xFF).any():
        raise ModelError(f"tensor {name} has zeros of 256, expected 0 to 255: download the model again")


def names_in_copy(canonical: str, cuts: list[dict[str, Cut]]) -> list[Mapping[str, str]]:
    """Return the names of the tensors of each part in the rank's file, by kind."""
    return [{kind: f"{canonical}.{index}.{kind}" for kind in part} for index, part in enumerate(cuts)]
