"""The layer for multi-token prediction (MTP) of a checkpoint, for speculative_method = mtp (docs/speculation.md)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

from charonia.errors import UnsupportedError
from charonia.families import FAMILIES, MTP, ModelSpec
from charonia.gguf.folder_names import model_file
from charonia.weights.draft_model import METHOD
from charonia.weights.tensor_parallel import ranks_of

_METHOD = "mtp"
_OTHERWISE = f"choose another {METHOD} than {_METHOD}"
_JOIN = f"{MTP}eh_proj.weight"


def mtp_of(settings: Mapping[str, str]) -> bool:
    """Whether the settings need the MTP layer. Raises UnsupportedError if they contradict it."""
    if settings.get(METHOD) != _METHOD:
        return False
    if (ranks := ranks_of(settings)) > 1:
        raise UnsupportedError(
            f"{METHOD} = {_METHOD} needs tensor_para_size = 1, and it is {ranks}: set tensor_para_size = 1, or "
            f"{_OTHERWISE}"
        )
    return True


def with_mtp(folder: Path, spec: ModelSpec) -> ModelSpec:
    """Return the spec with the tensors of its MTP layer. Raises UnsupportedError for a GGUF file, and if the family or
    the task has none."""
    if model_file(folder) is not None:
        raise UnsupportedError(
            f"{folder}: {METHOD} = {_METHOD} is not supported for GGUF files: use the Hugging Face checkpoint, or "
            f"{_OTHERWISE}"
        )
    if not spec.mtp:
        raise UnsupportedError(
            f"{folder}: {METHOD} = {_METHOD} is not supported for this model of family {spec.config.model_family}; "
            f"supported, if config.json describes a usual layer: {', '.join(_families())}. For this model {_OTHERWISE}"
        )
    if spec.config.model_task != "generate":
        raise UnsupportedError(
            f"{folder}: {METHOD} = {_METHOD} needs a model that generates text, and the task is "
            f"{spec.config.model_task}: {_OTHERWISE}"
        )
    return replace(spec, tensors={**spec.tensors, **spec.mtp})


def check_mtp(folder: Path, spec: ModelSpec, tensors: Collection[str]) -> None:
    """Raises UnsupportedError if the spec needs an MTP layer, and the files have none."""
    if _JOIN not in spec.tensors:
        return
    name = spec.tensors[_JOIN][0].name
    if not any(one.startswith(name.removesuffix("weight")) for one in tensors):
        raise UnsupportedError(f"{folder}: the checkpoint has no MTP layer ({name} is missing): {_OTHERWISE}")


def _families() -> list[str]:
    return sorted({name for family in FAMILIES if family.mtp for name in family.model_types})
