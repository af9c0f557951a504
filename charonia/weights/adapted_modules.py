"""Describes, for LoRA adapters, where the linear modules of the Hugging Face model are in the canonical tensors."""

from __future__ import annotations

import re
from typing import Any

from charonia.families import ModelSpec, TensorMap

# The weights that the engine loads with WeightLoader::linear(), in layers. Adapters cannot change experts, routers and
# wkv_b, which other operations compute.
_TENSOR = re.compile(
    r"(layers\.\d+\.("
    r"attention\.(w_qkv|w_gate|wo|wq|wq_a|wkv_a)|conv\.(w_in|w_out)|delta\.(w_qkvz|w_ba|w_out)|"
    r"feed_forward\.(shared\.)?w[123]|per_layer\.(gate|projection))(\.\d+)?|per_layer_projection)\.weight"
)


def module_places(spec: ModelSpec, tensors: TensorMap) -> dict[str, list[dict[str, Any]]]:
    """Return `modules` of the manifest: by name of a module, its places. tensors: of all ranks, from split()."""
    modules: dict[str, list[dict[str, Any]]] = {}
    for canonical, parts in tensors.items():
        if not _TENSOR.fullmatch(canonical):
            continue
        first_row = 0
        for part in parts:
            if len(part.shape) == 2 and not part.stack:
                place = {
                    "tensor": canonical,
                    "shape": list(part.shape),
                    "first_row": first_row,
                    "rows": part.rows,
                    "row_step": part.row_step if part.row_step > 1 else 0,
                    "cols": part.cols,
                }
                name = _usual_name(spec, part.name.rpartition(".")[0])
                modules.setdefault(name, []).append({key: value for key, value in place.items() if value})
            first_row += part.taken[0]
    return modules


def _usual_name(spec: ModelSpec, name: str) -> str:
    """Replace the beginning of a name in the files by the family's."""
    for theirs, ours in spec.prefixes:
        if theirs and name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return name
