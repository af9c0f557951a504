"""The description of a model family: the engine's configuration, and the source of each canonical tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any

from charonia.families.layer_attributes import LayerAttributes
from charonia.families.model_attributes import ModelAttributes

HfConfig = Mapping[str, Any]


@dataclass(frozen=True)
class ModelConfig(ModelAttributes):
    """The read-only keys of config.ini's section [llama], and the attributes of each layer, which are in manifest.json;
    definitions/model_attributes.toml and layer_attributes.toml define them."""

    layers: tuple[LayerAttributes, ...] = ()

    def head_size(self, layer: LayerAttributes) -> int:
        return layer.head_size or self.size_per_head

    def kv_heads(self, layer: LayerAttributes) -> int:
        return layer.kv_heads or self.kv_head_num

    def settings(self) -> dict[str, str]:
        """Return every key with its value in the format of config.ini."""
        return {entry.name: _spell(getattr(self, entry.name)) for entry in fields(ModelAttributes)}


def _spell(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return ",".join(str(item) for item in value)
    return repr(value) if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class Quantization:
    """How a weight is quantised and stored; `dtype` and `quantization` of a quantised tensor in the manifest."""

    layout: str  # rows | packed-rows | awq | gptq | mxfp4 | gguf
    dtype: str  # of the codes: U4 | I8 | F8_E4M3 | F4_E2M1
    group_size: int = 0  # columns that share a scale; 0: all
    zeros: bool = False
    activations: str = ""  # int8-token | int8-tensor | fp8-token | fp8-tensor; empty: not quantised
    group_rows: int = 1  # rows that share a scale
    zero_offset: int = 1  # gptq: stored zero + zero_offset = zero
    minimums: bool = False  # gguf: a number is added to each weight of a group

    @property
    def bits(self) -> int:
        """Return the number of bits of a code."""
        return 4 if self.dtype in ("U4", "F4_E2M1") else 8

    def entry(self) -> dict[str, Any]:
        """Return `quantization` of the manifest: the values that differ from their defaults."""
        values = {item.name: getattr(self, item.name) for item in fields(self) if item.name != "dtype"}
        defaults = {item.name: item.default for item in fields(self)}
        return {key: value for key, value in values.items() if value != defaults[key]}


@dataclass(frozen=True)
class Quantised:
    """The quantisation of a weight, and the names of its other tensors besides the codes; empty: it has none."""

    how: Quantization
    scales: str = ""
    zeros: str = ""
    order: str = ""  # the group of each column
    input_scale: str = ""
    block: str = ""  # gguf: the type of its blocks, which contain the scales

    @property
    def beside(self) -> dict[str, str]:
        """Return the names by their keys in the manifest."""
        names = {kind: getattr(self, kind) for kind in ("scales", "zeros", "order", "input_scale")}
        return {kind: name for kind, name in names.items() if name}


@dataclass(frozen=True)
class Scheme:
    """How the weight of a module is quantised. Names are suffixes after the module's name; with several, the first one
    that exists counts."""

    how: Quantization
    codes: str  # suffix of the codes
    scales: tuple[str, ...]
    scale_shapes: tuple[str, ...]  # possible shapes with layout rows: tensor | channel | group | block
    zeros: str = ""
    order: str = ""
    order_expected: bool = False  # false: an order tensor must be the identity
    input_scale: tuple[str, ...] = ()  # empty: none is needed
    input_scale_optional: bool = False  # without the tensor, activations are dynamic by token
    symmetric_zero: int | None = None  # gptq, without zeros: required value of the stored zeros


@dataclass(frozen=True)
class QuantizationConfig:
    """method: compressed-tensors | awq | gptq | fp8 | mxfp4 | modelopt | gguf. scheme_of(names of a module): returns
    None if the module is not quantised; raises UnsupportedError for an unsupported scheme. file: name of the file with
    the settings."""

    method: str
    scheme_of: Callable[[tuple[str, ...]], Scheme | None]
    file: str = "config.json"


@dataclass(frozen=True)
class TensorPart:
    """A Hugging Face tensor or a range of it: its name, and the expected shape of the whole tensor, `(out, in)` or
    `(out,)`. For a quantised weight, the name of its codes and the shape of the weight."""

    name: str
    shape: tuple[int, ...]
    rows: tuple[int, int] | None = None  # [begin, end) of dimension 0; None: all
    cols: tuple[int, int] | None = None  # [begin, end) of dimension 1; None: all
    quantised: Quantised | None = None
    row_step: int = 1  # n: only every n-th row of the range
    # n: the file's tensor has n matrices or n vectors, and `shape` is their shape stacked along dimension 0.
    stack: int = 0
    transposed: bool = False  # with `stack`: each matrix is transposed in the file; a range covers one of them only
    flat: bool = False  # the file's tensor may have any shape with as many elements as `shape`, which has one dimension

    @property
    def file_shape(self) -> tuple[int, ...]:
        """Return the shape of the file's tensor if it is not quantised."""
        if not self.stack:
            return self.shape
        if len(self.shape) == 1:
            return (self.stack, self.shape[0] // self.stack)
        rows, cols = self.shape[0] // self.stack, self.shape[1]
        return (self.stack, cols, rows) if self.transposed else (self.stack, rows, cols)

    @property
    def taken(self) -> tuple[int, ...]:
        """Return the shape of the range."""
        ranges = ((self.rows, self.row_step), (self.cols, 1))[: len(self.shape)]
        return tuple(
            len(range(*(taken or (0, size)), step)) for size, (taken, step) in zip(self.shape, ranges, strict=True)
        )

    def take(self, dimension: int, begin: int, end: int) -> TensorPart:
        """Return [begin, end) of this range along dimension 0 or 1."""
        if not 0 <= begin < end <= self.taken[dimension]:
            raise ValueError(f"[{begin}, {end}) of {self.name} is not within {list(self.taken)}")
        old, step = ((self.rows, self.row_step), (self.cols, 1))[dimension]
        first = old[0] if old else 0
        taken = (first + begin * step, first + (end - 1) * step + 1)
        return replace(self, rows=taken) if dimension == 0 else replace(self, cols=taken)


# Canonical name -> the parts that are stacked along dimension 0.
TensorMap = dict[str, tuple[TensorPart, ...]]


def stacked_shape(parts: tuple[TensorPart, ...]) -> tuple[int, ...]:
    """Return the shape of a canonical tensor."""
    return (sum(part.taken[0] for part in parts), *parts[0].taken[1:])


@dataclass(frozen=True)
class ModelSpec:
    """The description of a model for the engine."""

    config: ModelConfig
    tensors: TensorMap
    # Alternative name prefixes in the files: (prefix in the file, prefix in `tensors`).
    prefixes: tuple[tuple[str, str], ...] = ()
    mtp: TensorMap = field(default_factory=dict)  # of the layer for multi-token prediction, if it is supported
    ignored: tuple[str, ...] = ()  # name prefixes of tensors that the language model does not need
    quantization: QuantizationConfig | None = None  # from config.json; None: weights are not quantised
    interleaved_experts: bool = False  # in tensors with all experts of a layer, rows of gate and up alternate
    quantised_cache: str = ""  # "fp8" or "other" if the model was made for such a KV cache
    unusable_scales: str = ""  # why the scales of keys and values in the files cannot be used
    end_tokens: tuple[str, ...] = ()  # end a response, besides the end tokens of the files, if the tokenizer has them
    score_tokens: tuple[int, ...] = ()  # the rows of the output layer that a score needs; empty: as `tensors` says
    instruction: str = ""  # of a reranker, for requests without one; empty: the chat template has its own
    tied_output: str = ""  # with tied embeddings: name of the output layer's weight, which files may also have
    notes: tuple[str, ...] = ()  # warnings for the user


@dataclass(frozen=True)
class Family:
    """A family. `describe` raises UnsupportedError if the engine does not support the model."""

    name: str
    model_types: tuple[str, ...]  # in config.json
    title: str  # for the list of supported models
    describe: Callable[[HfConfig], ModelSpec]  # without the names of model and family
    keys: frozenset[str]  # keys of config.json that it reads, in addition to config_keys.READ_BY_ALL
    harmless: frozenset[str]  # keys that do not change its results, in addition to HARMLESS
    only: Mapping[str, Any]  # values of keys that change nothing; they override config_keys.ONLY
    mtp: bool = False  # describe() gives the layer for multi-token prediction


def family(
    names: str,
    title: str,
    describe: Callable[[HfConfig], ModelSpec],
    keys: str = "",
    *,
    harmless: str = "",
    only: Mapping[str, Any] = MappingProxyType({}),
    mtp: bool = False,
) -> Family:
    """Return a family. names: its name, then its model_types in config.json if they differ. keys, harmless: as text."""
    name, *types = names.split()
    keys_read, keys_harmless = frozenset(keys.split()), frozenset(harmless.split())
    return Family(name, tuple(types or [name]), title, describe, keys_read, keys_harmless, only, mtp)
