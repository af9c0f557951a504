"""What a model family has to say: the engine's model configuration and where each canonical tensor comes from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

HfConfig = Mapping[str, Any]


@dataclass(frozen=True)
class ModelConfig:
    """The read-only keys of config.ini's section [llama]; names, order and meaning are those of the engine's table."""

    model_name: str
    model_family: str
    head_num: int
    kv_head_num: int
    size_per_head: int
    hidden_units: int
    inter_size: int
    num_layer: int
    vocab_size: int
    max_position_embeddings: int
    norm_eps: float
    attn_bias: bool
    attn_output_bias: bool
    mlp_bias: bool
    tie_word_embeddings: bool
    start_id: int
    end_id: tuple[int, ...]
    rotary_embedding: int
    rope_theta: float
    rope_scaling_type: str
    rope_factor: float
    rope_low_freq_factor: float
    rope_high_freq_factor: float
    rope_original_max_position_embeddings: int
    weight_type: str = "bf16"
    group_size: int = 0

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


@dataclass(frozen=True)
class ModelSpec:
    """A model as the engine will run it."""

    config: ModelConfig
    tensors: TensorMap
    session_len: int = 0  # longest sequence in tokens where less than max_position_embeddings; 0: no limit of its own
    warnings: tuple[str, ...] = field(default=())


@dataclass(frozen=True)
class Family:
    """A family: `describe(config, model_name)` raises UnsupportedError for what the engine does not have."""

    name: str
    model_types: tuple[str, ...]  # of config.json
    title: str  # for the list of what is supported
    describe: Callable[[HfConfig, str], ModelSpec]
