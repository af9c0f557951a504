"""What a model family has to say: the engine's model configuration and where each canonical tensor comes from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from charonia.families.model_attributes import ModelAttributes

HfConfig = Mapping[str, Any]


@dataclass(frozen=True)
class ModelConfig(ModelAttributes):
    """The read-only keys of config.ini's section [llama]; definitions/model_attributes.toml defines them."""

    def settings(self) -> dict[str, str]:
        """Every key with its value as config.ini spells it."""
        return {entry.name: _spell(getattr(self, entry.name)) for entry in fields(self)}


def _spell(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return ",".join(str(item) for item in value)
    return repr(value) if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class TensorPart:
    """A Hugging Face tensor or a range of it: its name and the whole tensor's shape that the config promises,
    `(out, in)` or `(out,)`."""

    name: str
    shape: tuple[int, ...]
    rows: tuple[int, int] | None = None  # [begin, end) of dimension 0; None: all
    cols: tuple[int, int] | None = None  # [begin, end) of dimension 1; None: all

    @property
    def taken(self) -> tuple[int, ...]:
        """The shape of the range."""
        ranges = (self.rows, self.cols)[: len(self.shape)]
        return tuple(
            size if taken is None else taken[1] - taken[0] for size, taken in zip(self.shape, ranges, strict=True)
        )

    def take(self, dimension: int, begin: int, end: int) -> TensorPart:
        """[begin, end) of this range along dimension 0 or 1."""
        if not 0 <= begin < end <= self.taken[dimension]:
            raise ValueError(f"[{begin}, {end}) of {self.name} is not within {list(self.taken)}")
        old = (self.rows, self.cols)[dimension]
        first = old[0] if old else 0
        taken = (first + begin, first + end)
        return replace(self, rows=taken) if dimension == 0 else replace(self, cols=taken)


# Canonical name -> the parts that are stacked along dimension 0.
TensorMap = dict[str, tuple[TensorPart, ...]]


def stacked_shape(parts: tuple[TensorPart, ...]) -> tuple[int, ...]:
    """The shape of a canonical tensor."""
    return (sum(part.taken[0] for part in parts), *parts[0].taken[1:])


@dataclass(frozen=True)
class ModelSpec:
    """A model as the engine will run it."""

    config: ModelConfig
    tensors: TensorMap
    # What the files may call the tensors otherwise: (how a name begins there, how it begins in `tensors`).
    prefixes: tuple[tuple[str, str], ...] = ()
    ignored: tuple[str, ...] = ()  # how names of tensors begin that the language model does not need


@dataclass(frozen=True)
class Family:
    """A family: `describe(config, model_name)` raises UnsupportedError for what the engine does not have."""

    name: str
    model_types: tuple[str, ...]  # of config.json
    title: str  # for the list of what is supported
    describe: Callable[[HfConfig, str], ModelSpec]
