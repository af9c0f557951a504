"""Finds the tensors of quantised weights in a checkpoint and checks them against its configuration."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from charonia.errors import ModelError, UnsupportedError
from charonia.families import ModelSpec, Quantised, Quantization, QuantizationConfig, Scheme, TensorMap, TensorPart
from charonia.weights import stacked_experts
from charonia.weights.checkpoint import DTYPES, NUMPY_TYPES, Array, TensorInfo

CODES = ("weight_packed", "qweight")  # tensors that a quantised module has instead of `weight`
_EXPONENT_TYPES = ("U8", "F8_E8M0")  # of MXFP4 scales: both have the same bytes
_CODE_TYPES = {"rows": ("I8", "F8_E4M3"), "mxfp4": ("U8",)}  # of files, by layout; all others: I32
_QUANTISED_TYPES = ("I8", "U8", "F8_E4M3", "I32")  # types of a quantised tensor with the name `weight`
# Optional tensors of quantised modules that contain known information: the weight's shape, or unused zero points.
_BESIDE = ("weight_shape", "weight_zero_point", "weight_g_idx", "g_idx", "qzeros", "input_scale", "input_zero_point")
_MOST_DIMENSIONS = 3  # of a tensor that the engine reads
_LEAST_GROUP = 8  # minimum columns of a short last group: one step of the CPU kernels
_ORDERS = ("weight_g_idx", "g_idx")  # the group of each column
_ORDERED_LAYOUTS = ("packed-rows", "gptq")  # layouts that the engine supports with a column order
_QUANTISABLE = re.compile(
    r"output\.weight|per_layer_projection\.weight|mtp\.eh_proj\.weight"
    r"|(?:mtp\.)?layers\.\d+\.(?:per_layer\.(?:gate|projection)|attention\.(?:wq_a|wkv_a))\.weight"
    r"|(?:mtp\.)?layers\.\d+\.(?:attention\.(?:w_qkv|w_gate|wq|w(?:k|v|kv)_b|wo)|conv\.w_(?:in|out)|delta\.w_(?:qkvz|ba|out)"
    r"|feed_forward\.(?:experts\.\d+\.|shared\.)?w[123])\.0\.weight"
)
_FEED_FORWARD = re.compile(
    r"((?:mtp\.)?layers\.\d+\.feed_forward(?:\.shared)?)(?:\.experts\.\d+)?\.(w[123])\.0\.weight"
)
# Scales of keys and values, and of queries, which the engine does not quantise.
_KV_SCALE = re.compile(
    r".*\.(?:[kvq]_scale|kv_scale|[kv]_zero_point|[kvq]_proj\.output_(?:scale|zero_point)|[kv]_cache\.scale)$"
)

# The names of an attention module's scale of keys (or of values, with v) in files of compressed-tensors, ModelOpt,
# Quark, Hunyuan 3 and AutoFP8; the last two are of one scale for both.
_SCALE_NAMES = (
    *("{0}_scale", "attn.{0}_scale", "{0}_proj.{0}_scale", "qkv_proj.{0}_scale", "{0}_proj.output_scale"),
    *("{0}_cache.scale", "kv_scale", "attn.kv_scale"),
)
CACHE_SCALES = (".k_scale.weight", ".v_scale.weight")  # ends of the canonical names

_AGAIN = "download all files of the model again, in one version"

Read = Callable[[str], Array]


@dataclass
class Found:
    """A spec whose parts name the quantised tensors, and the names of further tensors."""

    spec: ModelSpec
    known: set[str] = field(default_factory=set)  # names of tensors that are not in spec.tensors


def find_quantised(folder: Path, spec: ModelSpec, tensors: Mapping[str, TensorInfo], read: Read | None = None) -> Found:
    """Find the tensors. Raises ModelError or UnsupportedError with the tensor's name. read: reads the values of a
    tensor, if available; then the values that affect other tensors are checked too."""
    config = spec.quantization
    if config is not None and config.method == "gguf":
        return Found(spec)  # charonia/weights/gguf_checkpoint.py has found them
    cache_scales = {name for name in tensors if _KV_SCALE.fullmatch(name)}
    if cache_scales and spec.quantised_cache == "other":
        spec = replace(spec, unusable_scales="they are for another type than FP8")
    elif cache_scales:
        spec = _with_cache_scales(spec, tensors, read)
    if config is None:
        endings = (*(f".{kind}" for kind in CODES), stacked_experts.CODES)
        codes = next((name for name in tensors if name.endswith(endings)), None)
        if codes is not None:
            raise ModelError(
                f"{folder}: tensor {codes} is quantised, but its format is unknown: config.json has no "
                "quantization_config, and there is no quantize_config.json, quant_config.json or hf_quant_config.json. "
                "Download all files of the model again"
            )
        return Found(spec, cache_scales)
    finder = _Finder(folder, config, tensors, read, spec.config.num_experts)
    asked = spec.tensors
    if config.method == "mxfp4":
        asked = stacked_experts.stacked_experts(spec, config, tensors)
    made = {name: tuple(finder.part(part) for part in parts) for name, parts in asked.items()}
    if config.method == "mxfp4":
        used = finder.known | {part.name for parts in made.values() for part in parts}
        _refuse_unread(folder, spec, [name for name in tensors if name not in used])
    if finder.missing:
        raise ModelError(
            f"{folder}: {len(finder.missing)} tensors are missing: {some(finder.missing)}: download the model again, "
            f"or correct {config.file}, which requires them for {config.method} weights{finder.why_missing}"
        )
    for parts in made.values():
        _check_alike(folder, parts)
    if not finder.known:
        raise ModelError(
            f"{folder}: {config.file} says that the model is quantised ({config.method}), but no tensor is: download "
            "its weights again, or remove quantization_config, quantize_config.json, quant_config.json or "
            "hf_quant_config.json, whichever is there"
        )
    _check_places(folder, spec, made)
    _check_together(folder, made)
    known = finder.known | cache_scales
    if config.method == "gptq":
        known |= finder.empty_biases()
    return Found(replace(spec, tensors=made), known)


def _with_cache_scales(spec: ModelSpec, tensors: Mapping[str, TensorInfo], read: Read | None) -> ModelSpec:
    """Return the spec with the scales of an FP8 KV cache, if all attention layers have them; otherwise with the
    reason. A layer that reads the keys and values of another one has its scales too."""
    config = spec.config
    if config.latent_size:  # the engine rejects a quantised cache with latent attention
        return spec
    found: dict[str, tuple[str, int, int]] = {}  # name in the files, its elements, KV heads of the layer
    for number, layer in enumerate(config.layers):
        if layer.mixer != "attention":
            continue
        output = spec.tensors[f"layers.{number - layer.kv_source}.attention.wo.0.weight"][0].name
        attention = output.removesuffix(".weight").rpartition(".")[0]
        for kind, canonical in zip("kv", CACHE_SCALES, strict=True):
            names = [f"{attention}.{name.format(kind)}" for name in _SCALE_NAMES]
            name = next((name for name in names if name in tensors), names[0])
            if why := _why_unusable(name, tensors, read):
                return _without_scales(spec, name, why)
            found[f"layers.{number}.attention{canonical}"] = (
                name,
                math.prod(tensors[name].shape),
                config.kv_heads(layer),
            )
    if not found:
        return spec
    one = all(size == 1 for _, size, _ in found.values())
    # Sizes that are always wrong come first.
    for name, size, heads in sorted(found.values(), key=lambda scale: scale[1] == 1):
        if not one and size != heads:
            return _without_scales(spec, name, f"has size {size}; expected: {heads}, the KV heads; or 1 in all layers")
    scales = {canonical: (TensorPart(name, (size,), flat=True),) for canonical, (name, size, _) in found.items()}
    return replace(
        spec,
        config=replace(config, kv_scales="layer" if one else "head"),
        tensors={**spec.tensors, **scales},
    )


def _why_unusable(name: str, tensors: Mapping[str, TensorInfo], read: Read | None) -> str:
    """Return why a scale of keys or values cannot be used; empty if it can."""
    info = tensors.get(name)
    if info is None:
        return "is missing"
    if info.dtype not in DTYPES:
        return f"is of type {info.dtype}; supported: {', '.join(DTYPES)}"
    if len(info.shape) > _MOST_DIMENSIONS:
        return f"has shape {list(info.shape)}; supported: up to {_MOST_DIMENSIONS} dimensions"
    values = read(name).astype(np.float32).reshape(-1) if read else ()
    wrong = next((value for value in values if not 0 < value < math.inf), None)
    return "" if wrong is None else f"has the scale {wrong}; expected: a positive, finite number"


def _without_scales(spec: ModelSpec, name: str, why: str) -> ModelSpec:
    return replace(spec, unusable_scales=f"tensor {name} {why}")


def some(names: Iterable[str]) -> str:
    """Return the first names of a list as text."""
    listed = list(names)
    return ", ".join(listed[:5]) + (", ..." if len(listed) > 5 else "")


class _Finder:
    def __init__(
        self,
        folder: Path,
        config: QuantizationConfig,
        tensors: Mapping[str, TensorInfo],
        read: Read | None,
        experts: int,
    ) -> None:
        self._folder = folder
        self._config = config
        self._file = config.file
        self._tensors = tensors
        self._read = read
        self._experts = experts  # in each layer
        self._done: dict[str, TensorPart] = {}  # by weight name; fused modules are looked up several times
        self._modules: list[str] = []
        self.missing: dict[str, None] = {}
        self.why_missing = ""
        self.known: set[str] = set()

    def part(self, part: TensorPart) -> TensorPart:
        """Return the part with the names and the quantisation of its tensors. A dense part is unchanged."""
        if part.name not in self._done:
            self._done[part.name] = self._look_up(part)
        found = self._done[part.name]
        return replace(part, name=found.name, quantised=found.quantised)

    def _look_up(self, part: TensorPart) -> TensorPart:
        if len(part.shape) != 2:
            return part
        if part.name.endswith(stacked_experts.CODES):
            return self._stacked(part)
        module = part.name.removesuffix(".weight")
        codes = next((f"{module}.{name}" for name in CODES if f"{module}.{name}" in self._tensors), None)
        info = self._tensors.get(part.name)
        if codes is None and info is not None and info.dtype in _QUANTISED_TYPES:
            codes = part.name
        if codes is None and info is not None:
            return part
        scheme = self._config.scheme_of(_names(module))
        if codes is None:
            if scheme is not None and f"{module}.{scheme.codes}" != part.name:
                self.missing[f"{module}.{scheme.codes}"] = None
            return part
        if scheme is None:
            raise self._not_quantised(codes, module)
        if f"{module}.{scheme.codes}" != codes:
            raise self._wrong(
                f"{codes} does not match {self._file}, which has {module}.{scheme.codes} for {module} "
                f"({self._config.method})"
            )
        return self._quantised(part, module, scheme)

    def _wrong(self, text: str) -> ModelError:
        """text: begins with the tensor's name."""
        return ModelError(f"{self._folder}: tensor {text}")

    def _unsupported(self, text: str) -> UnsupportedError:
        return UnsupportedError(f"{self._folder}: tensor {text}")

    def _not_quantised(self, codes: str, module: str) -> ModelError:
        return self._wrong(f"{codes} is quantised, but {self._file} says that {module} is not: {_AGAIN}")

    def _stacked(self, part: TensorPart) -> TensorPart:
        """Return a range of the tensor with all experts of a layer."""
        codes, module = part.name, part.name.rpartition(".")[0]
        scheme = self._config.scheme_of((module,))
        if scheme is None:
            raise self._not_quantised(codes, module)
        scales = f"{codes.removesuffix(scheme.codes)}{scheme.scales[0]}"
        self.known |= {codes, scales}
        self.missing |= dict.fromkeys(name for name in (codes, scales) if name not in self._tensors)
        if self.missing:
            return part
        rows, cols = part.shape
        self._check_divides(scheme.how, codes, rows, cols)
        shape = (self._experts, rows // self._experts, cols // scheme.how.group_size)
        self._check(codes, [(*shape, scheme.how.group_size // 2)], ("U8",), part)
        self._check(scales, [shape], _EXPONENT_TYPES, part)
        return replace(part, quantised=Quantised(scheme.how, scales))

    def _quantised(self, part: TensorPart, module: str, scheme: Scheme) -> TensorPart:
        def named(names: tuple[str, ...]) -> str:
            """Return the first name that exists; if none does, record the first one as missing."""
            full = [f"{module}.{name}" for name in names]
            found = next((name for name in full if name in self._tensors), None)
            if found is None:
                self.missing[full[0]] = None
            return found or full[0]

        codes = f"{module}.{scheme.codes}"
        scales = named(scheme.scales)
        zeros = named((scheme.zeros,)) if scheme.how.zeros else ""
        if zeros in self.missing:
            self.why_missing = f" ({'sym' if self._config.method == 'gptq' else 'symmetric'} is false there)"
        order = f"{module}.{scheme.order}" if scheme.order else ""
        orders = [name for kind in _ORDERS if (name := f"{module}.{kind}") in self._tensors]
        # compressed-tensors omits the order if the columns are in order, whatever actorder is.
        if scheme.order_expected and self._config.method == "gptq" and named((scheme.order,)) in self.missing:
            self.why_missing = " (desc_act is true there)"
        how, inputs = scheme.how, scheme.input_scale
        if scheme.input_scale_optional and not any(f"{module}.{name}" in self._tensors for name in inputs):
            how, inputs = replace(how, activations=how.activations.replace("-tensor", "-token")), ()
        input_scale = named(inputs) if inputs else ""
        self.known |= {codes, *(f"{module}.{name}" for name in _BESIDE)}
        self.known |= {scales, zeros, order, input_scale}
        self._modules.append(module)
        if self.missing:
            return part
        rows, cols = part.shape
        if how.group_size >= cols and how.layout != "mxfp4":
            how = replace(how, group_size=0)  # so that the columns can be split between ranks
        self._check_divides(how, codes, rows, cols)
        types = _CODE_TYPES.get(how.layout, ("I32",))
        self._check(codes, [_code_shape(how, rows, cols)], types, part, self._bits_hint(how, codes, part))
        if how.layout == "rows" and self._tensors[codes].dtype != how.dtype:
            raise self._wrong(f"{codes} is of type {self._tensors[codes].dtype}, but {self._file} says {how.dtype}")
        types = _EXPONENT_TYPES if how.layout == "mxfp4" else tuple(DTYPES)
        hint = self._group_hint(how, scales, part)
        self._check(scales, _scale_shapes(how, scheme.scale_shapes, rows, cols), types, part, hint)
        if zeros:
            self._check(zeros, [_zero_shape(how, rows, cols)], ("I32",), part)
        if input_scale:
            self._check(input_scale, [(), (1,)], tuple(DTYPES), part)
        # Checks all order tensors that exist: one that the scheme does not use must not change the order.
        ordered = [name for name in orders if self._is_order(name, how, scheme, part)]
        order = order if order in ordered else ""
        self._check_values(module, how, scheme, part)
        return replace(part, name=codes, quantised=Quantised(how, scales, zeros, order, input_scale))

    def _check_divides(self, how: Quantization, codes: str, rows: int, cols: int) -> None:
        """Check that the sizes of groups and of packed words divide the weight's size."""
        may_be_short = how.layout == "rows"  # the last group
        short = cols % how.group_size if may_be_short and 0 < how.group_size < cols else 0
        if short and math.gcd(how.group_size, cols) % _LEAST_GROUP:
            raise self._unsupported(
                f"{codes} belongs to a weight with {cols} columns. With blocks of {how.group_size}, the last block has "
                f"{short}, but a multiple of {_LEAST_GROUP} is needed. Use a copy with a scale for each channel, or "
                "the 16-bit original"
            )
        packed_cols = {"packed-rows": 32 // how.bits, "gptq": 32 // how.bits, "mxfp4": 2}.get(how.layout, 1)
        packed_rows = 32 // how.bits if how.layout in ("awq", "gptq") else 1
        for size, what, unit, units in (
            (cols, "columns", 1 if may_be_short else how.group_size or 1, "groups"),
            (cols, "columns", packed_cols, "packed numbers"),
            (rows, "rows", packed_rows, "packed numbers"),
        ):
            if size % unit:
                raise self._unsupported(
                    f"{codes} belongs to a weight with {size} {what}, which is not divisible into {units} of {unit}: "
                    "this is not supported"
                )

    def _check(
        self, name: str, shapes: list[tuple[int, ...]], types: tuple[str, ...], part: TensorPart, hint: str = ""
    ) -> None:
        """hint: another possible cause of a wrong shape."""
        info = self._tensors[name]
        if info.dtype not in types:
            raise self._unsupported(f"{name} is of type {info.dtype}; supported: {', '.join(types)}")
        if info.shape not in shapes:
            said = " or ".join(str(list(shape)) for shape in shapes)
            raise self._wrong(
                f"{name} has shape {list(info.shape)}, but {self._file} says {said}, for a weight {list(part.shape)}: "
                f"{hint}{_AGAIN}"
            )

    def _group_hint(self, how: Quantization, scales: str, part: TensorPart) -> str:
        """Return a hint with the group_size that matches the shape of the scales."""
        rows, cols = part.shape
        found = self._tensors[scales].shape
        if how.layout in ("awq", "gptq"):
            found = found[::-1]
        if how.group_rows > 1 or len(found) != 2 or found[0] != rows or not found[1] or cols % found[1]:
            return ""
        said = how.group_size or "all of a row"
        return f"group_size is {said} there, but the tensor has group_size = {cols // found[1]}: correct it, or "

    def _bits_hint(self, how: Quantization, codes: str, part: TensorPart) -> str:
        """Return a hint with the number of bits that matches the shape of the codes."""
        other = replace(how, dtype={"U4": "I8", "I8": "U4"}.get(how.dtype, how.dtype))
        if other == how or how.layout == "rows" or self._tensors[codes].shape != _code_shape(other, *part.shape):
            return ""
        return f"it says {how.bits} bits, but the tensor has {other.bits}: correct it, or "

    def _is_order(self, order: str, how: Quantization, scheme: Scheme, part: TensorPart) -> bool:
        """Whether the tensor gives the columns another order than their own."""
        cols = part.shape[1]
        self._check(order, [(cols,)], ("I32",), part)
        if self._read is None:
            return scheme.order_expected and how.layout in _ORDERED_LAYOUTS
        groups, size = self._read(order), how.group_size or cols
        if np.array_equal(groups, np.arange(cols) // size):
            return False
        if order.endswith(".weight_g_idx") and (groups == -1).any():
            return False  # compressed-tensors marks an unused order with -1
        if how.layout not in _ORDERED_LAYOUTS or order.rpartition(".")[2] != scheme.order:
            raise self._unsupported(
                f"{order} orders the columns. This is supported only for weight_g_idx of pack-quantized weights and "
                "g_idx of GPTQ: use a copy that is quantised without actorder, or with actorder static"
            )
        if not scheme.order_expected:
            setting = "desc_act to true" if self._config.method == "gptq" else "actorder to group"
            raise self._wrong(
                f"{order} orders the columns, but {self._file} says that they are not: set {setting} there"
            )
        counts = np.bincount(np.clip(groups, 0, cols), minlength=cols // size)
        if groups.min() < 0 or not np.array_equal(counts, [size] * (cols // size)):
            raise self._wrong(f"{order} has groups of other sizes than {size}")
        return True

    def _check_values(self, module: str, how: Quantization, scheme: Scheme, part: TensorPart) -> None:
        zeros = f"{module}.{scheme.zeros}"
        if self._read is None:
            return
        if scheme.symmetric_zero is not None and zeros in self._tensors:
            self._check(zeros, [_zero_shape(how, *part.shape)], ("I32",), part)
            # Some tools store the zero without the offset and still call the file gptq. Both values are accepted,
            # because symmetric codes have only one zero.
            spellings = {scheme.symmetric_zero, 2 ** (how.bits - 1)}
            packed = [sum(zero << shift for shift in range(0, 32, how.bits)) for zero in spellings]
            stored = self._read(zeros).view(np.uint32)
            if not any((stored == words).all() for words in packed):
                raise self._wrong(
                    f"{zeros} does not have the zeros of a symmetric quantisation, but {self._file} says sym true: set "
                    "it to false there"
                )
        for kind in ("input_zero_point",) if how.zeros else ("weight_zero_point", "input_zero_point"):
            unused = f"{module}.{kind}"
            if unused in self._tensors and self._values(unused).any():
                raise self._wrong(f"{unused} is not zero, but {self._file} says symmetric true: set it to false there")
        shape = f"{module}.weight_shape"
        if shape in self._tensors:
            found = self._values(shape).tolist()
            if found != list(part.shape):
                raise self._wrong(f"{shape} says {found}, but config.json says {list(part.shape)}: {_AGAIN}")

    def _values(self, name: str) -> Array:
        """Read a tensor with known content. Raises UnsupportedError if its type cannot be read to verify this."""
        assert self._read is not None
        dtype = self._tensors[name].dtype
        if dtype not in NUMPY_TYPES:
            raise self._unsupported(f"{name} is of type {dtype}; supported: {', '.join(NUMPY_TYPES)}")
        return self._read(name)

    def empty_biases(self) -> set[str]:
        """Return the names of the all-zero biases that GPTQ's tools add to modules without a bias."""
        names = {f"{module}.bias" for module in self._modules} & self._tensors.keys()
        if self._read is None:
            return names
        return {name for name in names if self._tensors[name].dtype in DTYPES and not self._read(name).any()}


def _refuse_unread(folder: Path, spec: ModelSpec, names: Iterable[str]) -> None:
    """Raises UnsupportedError for GPT-OSS tensors that no supported family uses."""
    for name in names:
        if name.startswith(spec.ignored):
            continue
        if stacked_experts.is_stacked(name):
            modules = stacked_experts.expert_modules(spec)
            why = f"belongs to no layer with experts{f'; expected in {some(modules)}' if modules else ''}"
            if name.rpartition(".")[0] in modules:
                why = "has experts that also exist as separate tensors"
            raise UnsupportedError(f"{folder}: tensor {name} {why}: {_AGAIN}")
        if name.endswith((stacked_experts.CODES, "_scales")):
            raise UnsupportedError(
                f"{folder}: tensor {name}: this MXFP4 format is supported for the experts of a layer only "
                "(experts.gate_up_proj, experts.down_proj). Use a copy that has the other weights in 16 bits, or one "
                "in the format mxfp4-pack-quantized of compressed-tensors"
            )
        if name.endswith("_proj_bias"):
            raise UnsupportedError(
                f"{folder}: tensor {name}: experts of family {spec.config.model_family} have no biases, and results "
                "without these biases would be wrong: use a copy whose experts have none"
            )


def _names(module: str) -> tuple[str, ...]:
    """Return the names that a configuration may use for a module; image models may omit the outer model's name."""
    for theirs, ours in (
        ("model.language_model.", "model."),
        ("language_model.model.", "model."),
        ("language_model.", ""),
    ):
        if module.startswith(theirs):
            return module, ours + module.removeprefix(theirs)
    return (module,)


def _groups(how: Quantization, cols: int) -> int:
    return -(-cols // how.group_size) if how.group_size else 1


def _code_shape(how: Quantization, rows: int, cols: int) -> tuple[int, int]:
    per_number = 32 // how.bits
    return {
        "rows": (rows, cols),
        "packed-rows": (rows, cols // per_number),
        "awq": (cols, rows // per_number),
        "gptq": (cols // per_number, rows),
        "mxfp4": (rows, cols // 2),
    }[how.layout]


def _zero_shape(how: Quantization, rows: int, cols: int) -> tuple[int, int]:
    groups, numbers = _groups(how, cols), -(-rows * how.bits // 32)
    return (numbers, groups) if how.layout == "packed-rows" else (groups, numbers)


def _scale_shapes(how: Quantization, kinds: tuple[str, ...], rows: int, cols: int) -> list[tuple[int, ...]]:
    groups = _groups(how, cols)
    if how.layout in ("awq", "gptq"):
        return [(groups, rows)]
    if how.layout != "rows":
        return [(rows, groups)]
    of_kinds: dict[str, list[tuple[int, ...]]] = {
        "tensor": [(), (1,)],
        "channel": [(rows, 1), (rows,)],
        "group": [(rows, groups)],
        "block": [(-(-rows // how.group_rows), groups)],
    }
    return [shape for kind in kinds for shape in of_kinds[kind]]


def _check_alike(folder: Path, parts: tuple[TensorPart, ...]) -> None:
    """Check that all parts of a tensor have the same quantisation, because the engine computes them together."""
    if len({part.quantised.how if part.quantised else None for part in parts}) > 1:
        raise _differently(folder, *(part.name for part in parts))


def _check_places(folder: Path, spec: ModelSpec, tensors: TensorMap) -> None:
    """Check that only linear layers and the output layer are quantised."""
    for canonical, (part, *_) in tensors.items():
        normalised = canonical == "output.weight" and spec.config.normalize_output
        if part.quantised and (normalised or not _QUANTISABLE.fullmatch(canonical)):
            what = "output layer of Baichuan 2" if normalised else canonical
            raise UnsupportedError(
                f"{folder}: tensor {part.name}: a quantised {what} is not supported: use a copy of the model that has "
                "it in 16 bits"
            )


def _check_together(folder: Path, tensors: TensorMap) -> None:
    """Check that gate and up of a layer have the same quantisation, also over all experts, and that all w2 do, because
    they are computed together. The shared expert is separate."""
    seen: dict[str, tuple[str, Quantization | None]] = {}
    for canonical, (part, *_) in tensors.items():
        how = part.quantised.how if part.quantised else None
        first, expected = seen.setdefault(computed_together(canonical), (part.name, how))
        if how != expected:
            raise _differently(folder, first, part.name)


def computed_together(canonical: str) -> str:
    """Return a name that is equal for weights which need the same quantisation: gate and up of a layer, also over all
    experts, and down over all experts. For other weights, their own name."""
    match = _FEED_FORWARD.fullmatch(canonical)
    if not match:
        return canonical
    return match[1] + (".down" if match[2] == "w2" else ".gate_up")


def is_quantisable(canonical: str) -> bool:
    """Whether the engine supports a quantised tensor in this place."""
    return bool(_QUANTISABLE.fullmatch(canonical))


def _differently(folder: Path, *names: str) -> UnsupportedError:
    return UnsupportedError(
        f"{folder}: tensors {some(names)} are computed together but quantised differently, which is not supported: "
        "quantise all of them in the same way, or none"
    )


def cut_units(part: TensorPart) -> tuple[int, int]:
    """Return how many rows and how many columns of a quantised weight cannot be separated."""
    if part.quantised is None:
        return 1, 1
    how = part.quantised.how
    return _packed_rows(how), math.lcm(how.group_size or 1, _packed_cols(part.quantised))


def cut_obstacle(part: TensorPart) -> str:
    """Return why the range of a quantised weight cannot be cut out of its tensors; empty if it can."""
    if part.quantised is None:
        return ""
    how = part.quantised.how
    if part.cols and part.cols != (0, part.shape[1]) and part.quantised.order:
        return f"the columns of {part.name} are quantised in their own order (desc_act)"
    group, col_unit, row_unit = how.group_size or 1, _packed_cols(part.quantised), _packed_rows(how)
    for bound in part.cols or ():
        if bound % group and bound != part.shape[1]:
            return f"column {bound} of {part.name} is within a group of {group} columns"
        if bound % col_unit:
            return f"column {bound} of {part.name} is within {col_unit} columns that are packed together"
    for bound in part.rows or ():
        if bound % row_unit and bound != part.shape[0]:
            return f"row {bound} of {part.name} is within {row_unit} rows that are packed together"
    return ""


def _packed_cols(quantised: Quantised) -> int:
    how = quantised.how
    if quantised.block:
        from charonia.weights.gguf_checkpoint import block_sizes

        return block_sizes(quantised.block)[0]
    return {"rows": 1, "awq": 1, "mxfp4": 2}.get(how.layout, 32 // how.bits)


def _packed_rows(how: Quantization) -> int:
    packed = how.layout in ("awq", "gptq") or (how.layout == "packed-rows" and how.zeros)
    return 32 // how.bits if packed else 1
