"""What a model family has to say: the engine's model configuration and where each canonical tensor comes from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
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
    norm_eps: float = 1e-6
    attn_bias: bool = False  # q, k and v
    attn_output_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    start_id: int = -1
    end_id: tuple[int, ...] = ()
    rotary_embedding: int = 0
    rope_theta: float = 10000.0
    rope_scaling_type: str = "default"
    rope_factor: float = 1.0
    rope_low_freq_factor: float = 1.0
    rope_high_freq_factor: float = 4.0
    rope_original_max_position_embeddings: int = 0
    rope_beta_fast: float = 32.0
    rope_beta_slow: float = 1.0
    rope_truncate: bool = True
    rope_attention_factor: float = 0.0  # 0: by formula
    rope_mscale: float = 0.0
    rope_mscale_all_dim: float = 0.0
    rope_short_factors: tuple[float, ...] = ()
    rope_long_factors: tuple[float, ...] = ()
    rope_local_theta: float = 0.0  # of the layers with a window; 0: rope_theta
    logn_length: int = 0
    alibi: bool = False
    sliding_window: int = 0  # 0: none
    layer_windows: str = ""  # a letter for each layer: s with the window, f without; empty: all s
    attention_scale: float = 0.0  # 0: 1 / sqrt(size_per_head)
    attention_soft_cap: float = 0.0
    logit_soft_cap: float = 0.0
    qk_norm: bool = False
    norm_unit_offset: bool = False
    post_norms: bool = False
    activation: str = "silu"
    embedding_scale: float = 1.0
    normalize_output: bool = False
    num_experts: int = 0
    experts_per_token: int = 0
    expert_inter_size: int = 0
    renormalize_experts: bool = True
    layer_experts: str = ""  # a letter for each layer: m with experts, d dense; empty: all m
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
