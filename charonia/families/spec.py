"""What a model family has to say: the engine's model configuration and where each canonical tensor comes from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
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
class Quantization:
    """How a weight is quantised and stored: a quantised tensor's `dtype` and `quantization` in the manifest."""

    layout: str  # rows | packed-rows | awq | gptq | mxfp4
    dtype: str  # of the codes: U4 | I8 | F8_E4M3 | F4_E2M1
    group_size: int = 0  # columns that share a scale; 0: all
    zeros: bool = False
    activations: str = ""  # int8-token | int8-tensor | fp8-token | fp8-tensor; empty: as they are
    group_rows: int = 1  # rows that share a scale
    zero_offset: int = 1  # gptq: what the stored zeros are less than the zeros

    @property
    def bits(self) -> int:
        """Of a code."""
        return 4 if self.dtype in ("U4", "F4_E2M1") else 8

    def entry(self) -> dict[str, Any]:
        """`quantization` of the manifest: what differs from its defaults."""
        values = {item.name: getattr(self, item.name) for item in fields(self) if item.name != "dtype"}
        defaults = {item.name: item.default for item in fields(self)}
        return {key: value for key, value in values.items() if value != defaults[key]}


@dataclass(frozen=True)
class Quantised:
    """A quantised weight's quantisation and the names of its tensors beside the codes; empty: there is none."""

    how: Quantization
    scales: str
    zeros: str = ""
    order: str = ""  # the group of each column
    input_scale: str = ""

    @property
    def beside(self) -> dict[str, str]:
        """Names by what they are called in the manifest."""
        names = {kind: getattr(self, kind) for kind in ("scales", "zeros", "order", "input_scale")}
        return {kind: name for kind, name in names.items() if name}


@dataclass(frozen=True)
class Scheme:
    """How a module's weight is quantised. Names are those of tensors behind the module's name; of several the first
    counts that the module has."""

    how: Quantization
    codes: str  # their name
    scales: tuple[str, ...]
    scale_shapes: tuple[str, ...]  # of layout rows: tensor | channel | group | block, which may be found
    zeros: str = ""
    order: str = ""
    order_expected: bool = False  # without it, an order that is there is the columns' own
    input_scale: tuple[str, ...] = ()  # empty: none is needed
    symmetric_zero: int | None = None  # gptq, without zeros: what the stored zeros must be


@dataclass(frozen=True)
class QuantizationConfig:
    """method: compressed-tensors | awq | gptq | fp8 | mxfp4. scheme_of(names of a module) raises UnsupportedError for a
    scheme that is not supported; None: the module is not quantised. file: the name of the one that says so."""

    method: str
    scheme_of: Callable[[tuple[str, ...]], Scheme | None]
    file: str = "config.json"


@dataclass(frozen=True)
class TensorPart:
    """A Hugging Face tensor or a range of it: its name and the whole tensor's shape that the config promises,
    `(out, in)` or `(out,)`. Of a quantised weight the name is that of its codes, and the shape still the weight's."""

    name: str
    shape: tuple[int, ...]
    rows: tuple[int, int] | None = None  # [begin, end) of dimension 0; None: all
    cols: tuple[int, int] | None = None  # [begin, end) of dimension 1; None: all
    quantised: Quantised | None = None
    row_step: int = 1  # n: of the rows the first and every n-th after it; 1 but of quantised weights
    stack: int = 0  # n: the file's tensor has n matrices, and `shape` is that of all above one another
    transposed: bool = False  # with `stack`: each matrix lies transposed in the file. A range is then of one of them

    @property
    def file_shape(self) -> tuple[int, ...]:
        """The shape of the file's tensor, where it is not quantised."""
        if not self.stack:
            return self.shape
        rows, cols = self.shape[0] // self.stack, self.shape[1]
        return (self.stack, cols, rows) if self.transposed else (self.stack, rows, cols)

    @property
    def taken(self) -> tuple[int, ...]:
        """The shape of the range."""
        ranges = ((self.rows, self.row_step), (self.cols, 1))[: len(self.shape)]
        return tuple(
            len(range(*(taken or (0, size)), step)) for size, (taken, step) in zip(self.shape, ranges, strict=True)
        )

    def take(self, dimension: int, begin: int, end: int) -> TensorPart:
        """[begin, end) of this range along dimension 0 or 1."""
        if not 0 <= begin < end <= self.taken[dimension]:
            raise ValueError(f"[{begin}, {end}) of {self.name} is not within {list(self.taken)}")
        old, step = ((self.rows, self.row_step), (self.cols, 1))[dimension]
        first = old[0] if old else 0
        taken = (first + begin * step, first + (end - 1) * step + 1)
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
    quantization: QuantizationConfig | None = None  # as config.json has it; None: weights are not quantised
    quantised_cache: bool = False  # config.json wants one, and files may have scales for it
    tied_output: str = ""  # of tied embeddings: the output layer's weight, which files may have as well
    notes: tuple[str, ...] = ()  # sentences that the user should read, as warnings


@dataclass(frozen=True)
class Family:
    """A family: `describe(config, model_name)` raises UnsupportedError for what the engine does not have."""

    name: str
    model_types: tuple[str, ...]  # of config.json
    title: str  # for the list of what is supported
    describe: Callable[[HfConfig, str], ModelSpec]
    keys: frozenset[str] = frozenset()  # of config.json that it reads, besides config_keys.READ_BY_ALL
    harmless: frozenset[str] = frozenset()  # of config.json that do not change its results, besides HARMLESS
    # The values with which keys of config.json change nothing; they win over config_keys.ONLY.
    only: Mapping[str, Any] = field(default_factory=dict)
