"""Builds the quantisation schemes of each method from its configuration."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import Any

from charonia.families import Quantization, QuantizationConfig, Scheme
from charonia.weights.module_patterns import ModulePattern, PatternError, module_pattern
from charonia.weights.quantization_settings import Settings

CACHE_SCHEME = "kv_cache_scheme"  # the key for quantised keys and values
_PACKED_TYPES = {4: "U4", 8: "I8"}
_MX_GROUP = 32  # group size of the OCP microscaling formats
_MAX_SHOWN = 80  # characters of a wrong pattern in an error


def awq(settings: Settings) -> QuantizationConfig:
    """AutoAWQ's format: 4 bits with zero points, packed for its GEMM kernel."""
    bits = settings.integer("bits", "w_bit", default=4)
    if bits != 4:
        raise settings.unsupported("bits", bits, "4")
    version = settings.text("version", "gemm").lower()
    if version != "gemm":
        raise settings.unsupported("version", version, "gemm, which AutoAWQ writes with version='GEMM'")
    how = Quantization("awq", "U4", settings.group_size("group_size", "q_group_size", default=128), zeros=True)
    scheme = Scheme(how, "qweight", ("scales",), ("group",), zeros="qzeros")
    return QuantizationConfig("awq", lambda names: scheme)


def gptq(settings: Settings) -> QuantizationConfig:
    """The format of AutoGPTQ and GPTQModel: 4 or 8 bits. `dynamic` may change it for some modules."""
    if settings.flag("is_marlin_format", False):
        raise settings.unsupported("is_marlin_format", True, "checkpoint_format gptq and gptq_v2")
    form = settings.get("checkpoint_format", "format") or "gptq"
    if form not in ("gptq", "gptq_v2"):
        raise settings.unsupported("checkpoint_format", form, "gptq, gptq_v2")
    whole = _gptq_scheme(settings, form)
    rules = _gptq_rules(settings, form)

    def scheme_of(names: tuple[str, ...]) -> Scheme | None:
        for pattern, scheme in rules:
            if pattern.any_match(names):
                return scheme
        return whole

    return QuantizationConfig("gptq", scheme_of)


def _gptq_scheme(settings: Settings, form: str) -> Scheme:
    bits = settings.integer("bits")
    if bits not in _PACKED_TYPES:
        raise settings.unsupported("bits", bits, "4, 8")
    offset = 1 if form == "gptq" else 0
    symmetric = settings.flag("sym", True)
    how = Quantization(
        "gptq",
        _PACKED_TYPES[bits],
        settings.group_size("group_size", default=128),
        zeros=not symmetric,
        zero_offset=1 if symmetric else offset,
    )
    return Scheme(
        how,
        "qweight",
        ("scales",),
        ("group",),
        zeros="qzeros",
        order="g_idx",
        order_expected=settings.flag("desc_act", False),
        symmetric_zero=2 ** (bits - 1) - offset if symmetric else None,
    )


def _gptq_rules(settings: Settings, form: str) -> list[tuple[ModulePattern, Scheme | None]]:
    """Return the rules of GPTQModel's `dynamic`: patterns of modules. "-:" marks modules that are not quantised; "+:"
    or no prefix changes settings for the modules."""
    rules: list[tuple[ModulePattern, Scheme | None]] = []
    dynamic = settings.inner("dynamic")
    for key in dynamic.values if dynamic else ():
        own = dynamic.inner(key) if dynamic else None
        pattern = _pattern(settings, key.removeprefix("+:").removeprefix("-:"))
        place = f"{settings.place}.dynamic[{_shown(key)!r}]"
        both = Settings(place, {**settings.values, **(own.values if own else {})})
        rules.append((pattern, None if key.startswith("-:") else _gptq_scheme(both, form)))
    return rules


def _pattern(settings: Settings, text: str, end: str = "") -> ModulePattern:
    try:
        return module_pattern(text, end)
    except PatternError as error:
        expected = f"a regular expression that RE2 supports ({error}); look-ahead is supported at its start only"
        raise settings.wrong("a pattern of modules", _shown(text), expected) from error


def _shown(pattern: str) -> str:
    return pattern if len(pattern) <= _MAX_SHOWN else f"{pattern[:_MAX_SHOWN]}..."


def fp8(settings: Settings) -> QuantizationConfig:
    """The format of DeepSeek and Qwen (blocks of 128 x 128), and an older one: a scale per tensor or channel."""
    kind = settings.text("fmt", "e4m3")
    if kind not in ("e4m3", "float8_e4m3fn"):
        raise settings.unsupported("fmt", kind, "e4m3")
    activations = settings.text("activation_scheme", "dynamic")
    if activations not in ("dynamic", "static"):
        raise settings.unsupported("activation_scheme", activations, "dynamic, static")
    block = settings.get("weight_block_size")
    how = Quantization("rows", "F8_E4M3")
    shapes: tuple[str, ...] = ("tensor", "channel")
    if block is not None:
        rows, columns = _block(settings, "weight_block_size", block)
        how, shapes = replace(how, group_size=columns, group_rows=rows), ("block",)
    static = activations == "static"
    scheme = Scheme(
        replace(how, activations="fp8-tensor" if static else "" if block is not None else "fp8-token"),
        "weight",
        ("weight_scale_inv", "weight_scale"),
        shapes,
        input_scale=("input_scale", "activation_scale") if static else (),
    )
    return QuantizationConfig("fp8", lambda names: scheme)


def modelopt(settings: Settings) -> QuantizationConfig | None:
    """ModelOpt's FP8: a static scale for a weight, and usually one for its inputs. Its other algorithms are rejected.
    Returns None if only the KV cache is quantised."""
    of_file = _of_modelopt(settings)
    algorithm = of_file.get("quant_algo")
    if algorithm is None and modelopt_cache(settings) is not None:
        return None
    if str(algorithm).upper() != "FP8":
        raise of_file.unsupported("quant_algo", algorithm, "FP8")
    how = Quantization("rows", "F8_E4M3", activations="fp8-tensor")
    names = ("weight_scale",), ("tensor",)
    scheme = Scheme(how, "weight", *names, input_scale=("input_scale",), input_scale_optional=True)
    return QuantizationConfig("modelopt", lambda names: scheme)


def modelopt_cache(settings: Settings) -> Any:
    """Return how ModelOpt quantised the KV cache: an object or a name; None: not at all."""
    return _of_modelopt(settings).get(CACHE_SCHEME, "kv_cache_quant_algo")


def _of_modelopt(settings: Settings) -> Settings:
    return settings.inner("quantization") or settings  # hf_quant_config.json has them there


def _block(settings: Settings, key: str, value: Any) -> tuple[int, int]:
    fits = isinstance(value, list) and len(value) == 2
    if not fits or not all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in value):
        raise settings.wrong(key, value, "two positive numbers, rows and columns of a block")
    return value[0], value[1]


def mxfp4(settings: Settings) -> QuantizationConfig:
    """The format of GPT-OSS: one tensor has all experts of a layer; all other weights have 16 bits."""
    kept = settings.names("modules_to_not_convert")
    # An entry is the start of a module's name, or a pattern of it, up to a dot; or the end of a module's name.
    patterns = [_pattern(settings, name, r"(?:\.|$)") for name in kept]
    scheme = Scheme(Quantization("mxfp4", "F4_E2M1", _MX_GROUP), "blocks", ("scales",), ("group",))

    def scheme_of(names: tuple[str, ...]) -> Scheme | None:
        experts = any(name.endswith(".experts") for name in names)
        left_out = any(name.endswith(kept) for name in names) or any(one.any_match(names) for one in patterns)
        return scheme if experts and not left_out else None

    return QuantizationConfig("mxfp4", scheme_of)


# compressed-tensors: the format of llm-compressor.

_CLASSES = ("Linear", "Module")  # PyTorch classes that every quantised module belongs to
_UNUSED = ("dense", None, "identity")


def compressed_tensors(settings: Settings) -> QuantizationConfig | None:
    """Groups of modules, each with a scheme, and ignored modules. Returns None if only the KV cache is quantised."""
    _refuse_beside(settings)
    groups = settings.inner("config_groups")
    has_weights = groups is not None and any(
        not isinstance(group, dict) or group.get("weights") is not None for group in groups.values.values()
    )
    if settings.inner(CACHE_SCHEME) is not None and not has_weights:
        return None
    if groups is None or not groups.values:
        raise settings.wrong("config_groups", settings.get("config_groups"), "an object that names a scheme")
    form = settings.text("format", "")
    schemes: dict[str, Scheme | None] = {}  # by target; the last group with a target counts
    for key in groups.values:
        group = groups.inner(key)
        if group is not None:
            scheme = _group_scheme(group, group.text("format", form))
            schemes |= dict.fromkeys(group.names("targets"), scheme)
    ignored = settings.names("ignore")
    for name in (*ignored, *schemes):
        if name.startswith("re:"):
            _pattern(settings, name[3:])
    # compressed-tensors searches in this order: names, then patterns, each in alphabetical order, then classes.
    targets = sorted(schemes, key=lambda target: ("re:" in target, target))

    def scheme_of(names: tuple[str, ...]) -> Scheme | None:
        if any(_is_named(names, name) or name in _CLASSES for name in ignored):
            return None
        named = (target for target in targets if _is_named(names, target))
        of_class = (target for target in targets if target in _CLASSES)
        target = next(chain(named, of_class), None)
        return None if target is None else schemes[target]

    return QuantizationConfig("compressed-tensors", scheme_of)


def _is_named(names: tuple[str, ...], target: str) -> bool:
    """Whether a target or an ignored name equals a name of the module, or is a pattern that matches a name."""
    return module_pattern(target[3:]).any_match(names) if target.startswith("re:") else target in names


def _refuse_beside(settings: Settings) -> None:
    """Raises UnsupportedError for other settings that change the weights."""
    sparsity = settings.inner("sparsity_config")
    if sparsity is not None and sparsity.get("format") not in _UNUSED:
        raise sparsity.unsupported("format", sparsity.get("format"), "dense")
    for key in ("transform_config", "moe_sparsity_config"):
        if settings.get(key):
            raise settings.unsupported(key, "..." if isinstance(settings.get(key), dict) else settings.get(key), "none")


def _group_scheme(group: Settings, form: str) -> Scheme | None:
    if group.get("output_activations") is not None:
        raise group.unsupported("output_activations", "...", "weights and input_activations")
    weights = group.inner("weights")
    if weights is None:
        return None
    bits, kind = weights.integer("num_bits", default=8), weights.text("type", "int").lower()
    makers = {
        "pack-quantized": _packed,
        "int-quantized": _integers,
        "float-quantized": _floats,
        "naive-quantized": _integers if kind == "int" else _floats,
        "mxfp4-pack-quantized": _mxfp4,
    }
    if form not in makers:
        raise group.unsupported("format", form, ", ".join(makers))
    if weights.get("dynamic"):
        raise weights.unsupported("dynamic", weights.get("dynamic"), "false, with the scales of weights in the file")
    return makers[form](group, weights, bits, kind)


def _strategy(weights: Settings, *supported: str) -> str:
    size = weights.get("group_size")
    default = "tensor" if size is None else "channel" if size == -1 else "group"
    strategy = weights.text("strategy", default).lower()
    if strategy not in supported:
        raise weights.unsupported("strategy", strategy, ", ".join(supported))
    return strategy


def _packed(group: Settings, weights: Settings, bits: int, kind: str) -> Scheme:
    if kind != "int" or bits not in _PACKED_TYPES:
        raise weights.unsupported("num_bits", f"{bits} ({kind})", "4 and 8, of type int")
    strategy = _strategy(weights, "group", "channel")
    size = weights.group_size("group_size") if strategy == "group" else 0
    zeros = not weights.flag("symmetric", True)
    activations = _activations(group, "int")
    if bits == 4:
        activations = ""  # keep 16 bits: rounding loses precision and makes no kernel here faster
    return Scheme(
        Quantization("packed-rows", _PACKED_TYPES[bits], size, zeros, activations),
        "weight_packed",
        ("weight_scale",),
        ("group",),
        zeros="weight_zero_point" if zeros else "",
        order="weight_g_idx",
        order_expected=_is_ordered(weights),
        input_scale=("input_scale",) if activations.endswith("-tensor") else (),
    )


def _is_ordered(weights: Settings) -> bool:
    """Whether the columns of a group are spread over the weight. With `static` and `weight` they are adjacent."""
    return weights.get("actorder") in ("group", "dynamic", True)


def _integers(group: Settings, weights: Settings, bits: int, kind: str) -> Scheme:
    if kind != "int" or bits not in (4, 8):
        raise weights.unsupported("num_bits", f"{bits} ({kind})", "4 and 8, of type int")
    if not weights.flag("symmetric", True):
        raise weights.unsupported("symmetric", False, "true, or format pack-quantized")
    return _rows(group, weights, "I8", "int")


def _floats(group: Settings, weights: Settings, bits: int, kind: str) -> Scheme:
    if kind != "float" or bits != 8:
        raise weights.unsupported("num_bits", f"{bits} ({kind})", "8, of type float")
    return _rows(group, weights, "F8_E4M3", "float")


def _rows(group: Settings, weights: Settings, dtype: str, kind: str) -> Scheme:
    strategy = _strategy(weights, "tensor", "channel", "group", "block")
    how = Quantization("rows", dtype)
    if strategy == "group":
        how = replace(how, group_size=weights.group_size("group_size"))
    if strategy == "block":
        value = weights.get("block_structure")
        if isinstance(value, str):  # older files: 128x128
            value = [int(size) if size.isdecimal() else 0 for size in value.split("x")]
        rows, columns = _block(weights, "block_structure", value)
        how = replace(how, group_size=columns, group_rows=rows)
    activations = _activations(group, kind)
    return Scheme(
        replace(how, activations=activations),
        "weight",
        ("weight_scale",),
        (strategy,),
        order="weight_g_idx",
        order_expected=strategy == "group" and _is_ordered(weights),
        input_scale=("input_scale",) if activations.endswith("-tensor") else (),
    )


def _mxfp4(group: Settings, weights: Settings, bits: int, kind: str) -> Scheme:
    if kind != "float" or bits != 4:
        raise weights.unsupported("num_bits", f"{bits} ({kind})", "4, of type float")
    size = weights.integer("group_size", default=_MX_GROUP)
    if size != _MX_GROUP:
        raise weights.unsupported("group_size", size, str(_MX_GROUP))
    inputs = group.inner("input_activations")
    if inputs is not None and not inputs.get("dynamic"):
        raise inputs.unsupported("dynamic", inputs.get("dynamic"), "true")
    return Scheme(
        Quantization("mxfp4", "F4_E2M1", _MX_GROUP),
        "weight_packed",
        ("weight_scale",),
        ("group",),
        order="weight_g_idx",
        order_expected=_is_ordered(weights),
    )


def _activations(group: Settings, kind: str) -> str:
    """Return the manifest's `activations`. Dynamic scales per group of columns are ignored: 16-bit activations are more
    precise, and the file has no values for them."""
    inputs = group.inner("input_activations")
    if inputs is None:
        return ""
    bits, found = inputs.integer("num_bits", default=8), inputs.text("type", "int").lower()
    if bits != 8 or found != kind:
        raise inputs.unsupported("num_bits", f"{bits} ({found})", f"8, of type {kind}")
    if not inputs.flag("symmetric", True):
        raise inputs.unsupported("symmetric", False, "true")
    dynamic = inputs.get("dynamic")
    if not isinstance(dynamic, bool) and dynamic is not None:
        raise inputs.unsupported("dynamic", dynamic, "true, false")
    name = {"int": "int8", "float": "fp8"}[kind]
    strategy = inputs.text("strategy", "token" if dynamic else "tensor").lower()
    if strategy == "group" and dynamic:
        return ""
    if strategy not in ("token", "tensor") or (strategy == "token" and not dynamic):
        supported = "token and group with dynamic = true, tensor with dynamic = true or false"
        raise inputs.unsupported("strategy", f"{strategy} with dynamic = {str(bool(dynamic)).lower()}", supported)
    return f"{name}-token" if dynamic else f"{name}-tensor"
