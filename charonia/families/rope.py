"""Rotary settings of config.json, in the formats of transformers 5 and of earlier versions."""

from __future__ import annotations

from typing import Any

from charonia.errors import ModelError, UnsupportedError
from charonia.families.config_keys import words
from charonia.families.hf_config import number, optional, required
from charonia.families.spec import HfConfig

KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
# Phi-3 first called longrope su. For text, Qwen2-VL's mrope equals the default: its three coordinates are equal.
_ALIASES = {"su": "longrope", "mrope": "default"}
_NEEDED = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
}
# Keys that this module reads, and keys without effect: `finetuned` is about training, mrope's sections have equal
# coordinates for text, and `max_position_embeddings` repeats the key of config.json.
_KNOWN = words(
    """
    attention_factor beta_fast beta_slow factor finetuned high_freq_factor long_factor low_freq_factor
    max_position_embeddings mrope_interleaved mrope_section mscale mscale_all_dim original_max_position_embeddings
    partial_rotary_factor rope_theta rope_type short_factor truncate type
    """
)
# Scaling keys. They have no effect without a rope_type.
_SCALES = ("factor", "short_factor", "long_factor", "low_freq_factor", "high_freq_factor", "attention_factor")
# These belong to the model, not to the scaling, so rope_scaling does not replace them.
_KEPT = ("partial_rotary_factor", "llama_4_scaling_beta")
_MAX_FACTOR = 1e30  # fits into a 32-bit float
_LAYER_TYPES = ("full_attention", "sliding_attention")


def rope_settings(
    config: HfConfig,
    head_dim: int,
    *,
    theta: float = 10000.0,
    partial: float | None = None,
    per_layer: bool = False,
    local_theta: float = 0.0,
    local_head_dim: int = 0,
    proportional: bool = False,
    read: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Return ModelConfig's `rotary_embedding` and `rope_...` from `rope_parameters` (transformers 5), or `rope_theta`
    and `rope_scaling` (earlier).

    If a file has both, `rope_scaling` overrides if it names a type, as in transformers: users add it by hand. theta,
    local_theta: default bases; local_theta > 0: window layers have a separate base. per_layer: the family reads
    settings per layer type. local_head_dim: the size of heads in window layers, if it differs. proportional: the family
    supports the type of this name. partial: default of the rotated part of a head; None: the family supports only full
    rotation. read: keys of the settings that the family reads itself. Raises UnsupportedError for an unsupported
    scaling type, for two types and for unknown keys, and ModelError for missing values.
    """
    settings, local = _dictionaries(config, per_layer or local_theta > 0)
    for key, value in (*settings.items(), *local.items()):
        if value is not None and key not in _KNOWN and key not in read:
            raise UnsupportedError(
                f"config.json: the rope scaling's key {key} ({value!r}) is unknown for this family, and results may "
                "be wrong without it. If the model does not use the key, remove it"
            )
    base = number(settings, "rope_theta", number(config, "rope_theta", theta))
    if proportional and _kind(settings) == "proportional":
        found = {"rotary_embedding": head_dim, "rope_theta": base} | _proportional(settings, head_dim)
    else:
        rotated = int(head_dim * _partial_factor(settings, config, partial))
        found = {"rotary_embedding": rotated, "rope_theta": base} | _scaling(settings, config, rotated)
    if local_head_dim:
        local_base = number(local, "rope_theta", base)
        _local(config, {}, local, local_base)
        return found | {"rope_local_theta": local_base, "rope_local_embedding": local_head_dim}
    if local_theta or local:
        found |= _local(config, {**settings, "rope_theta": base}, local, local_theta or base)
    return found


def _dictionaries(config: HfConfig, per_layer: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings of all layers, or of those without a window, and the settings of the window layers."""
    new, old = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    if not isinstance(new, dict) or not isinstance(old, dict):
        raise ModelError("config.json: rope_parameters and rope_scaling must be objects or null")
    nested = [key for key, value in new.items() if isinstance(value, dict)]
    if not nested:
        return _merged(config, new, old), {}
    unknown = [key for key in nested if key not in _LAYER_TYPES]
    if unknown:
        raise UnsupportedError(
            f"config.json: rope_parameters of layer type {unknown[0]!r} are not supported; supported: "
            + ", ".join(_LAYER_TYPES)
        )
    if not per_layer:
        raise UnsupportedError("config.json: rope_parameters per layer type are not supported for this family")
    for key in _LAYER_TYPES:
        if not isinstance(new.get(key) or {}, dict):
            raise ModelError(f"config.json: {key} of rope_parameters is {new[key]!r}; it must be an object or null")
    full = _merged(config, new.get("full_attention") or {}, old)
    return full, new.get("sliding_attention") or {"rope_type": "default"}


def rope_dictionary(config: HfConfig) -> dict[str, Any]:
    """Return the settings of all layers from rope_parameters and rope_scaling. Raises the errors of rope_settings."""
    return _dictionaries(config, per_layer=False)[0]


def rope_value(config: HfConfig, key: str, default: float) -> float:
    """Return a number in the settings of all layers that only some families have."""
    return number(rope_dictionary(config), key, default)


def refuse_scaling(config: HfConfig, reason: str) -> None:
    """Raises UnsupportedError if config.json has a rotary scaling that the model does not use. reason: why not."""
    for key in ("rope_scaling", "rope_parameters"):
        settings = config.get(key)
        if isinstance(settings, dict) and _kind(settings) != "default":
            raise UnsupportedError(f"config.json: {key} has no effect: {reason}. Remove it")


def _merged(config: HfConfig, new: dict[str, Any], old: dict[str, Any]) -> dict[str, Any]:
    """Merge rope_parameters and rope_scaling. Raises UnsupportedError if they name different scaling types, and
    ModelError if they have scaling keys but no type."""
    for name, settings in (("rope_parameters", new), ("rope_scaling", old)):
        without = [key for key in _SCALES if settings.get(key) not in (None, 1)]
        if without and not _names_kind(settings):
            raise ModelError(
                f"config.json: {name} has {without[0]} but no rope_type, so it would have no effect: add rope_type "
                f"({', '.join(KINDS[1:])}), or remove {without[0]}"
            )
    if not _names_kind(old):
        return {**old, **new}
    kinds = _kind(new), _kind(old)
    if "default" not in kinds and kinds[0] != kinds[1]:
        raise UnsupportedError(
            f"config.json: rope_parameters is of type {kinds[0]!r} but rope_scaling of type {kinds[1]!r}: remove the "
            "one that is wrong for the model"
        )
    # The base comes from rope_scaling, then from the top level, then from rope_parameters.
    bases = [place["rope_theta"] for place in (old, config, new) if place.get("rope_theta") is not None]
    kept = {key: new[key] for key in _KEPT if new.get(key) is not None}
    return {**kept, **old, **({"rope_theta": bases[0]} if bases else {})}


def _names_kind(settings: dict[str, Any]) -> bool:
    return bool(settings.get("rope_type") or settings.get("type"))


def _kind(settings: dict[str, Any]) -> str:
    kind = settings.get("rope_type") or settings.get("type") or "default"
    if not isinstance(kind, str):
        raise ModelError(f"config.json: the rope scaling's type is {kind!r}; it must be one of {', '.join(KINDS)}")
    return _ALIASES.get(kind, kind)


def _local(config: HfConfig, full: dict[str, Any], local: dict[str, Any], default: float) -> dict[str, Any]:
    """Return the base of the window layers, which have no scaling. Empty if they have the settings of all layers."""
    base = number(local, "rope_theta", number(config, "rope_local_base_freq", default))
    same = {**local, "rope_theta": base} == full
    if _kind(local) != "default" and not same:
        raise UnsupportedError(
            f"config.json: rope scaling of type {_kind(local)!r} in layers with a window is not supported; "
            "supported: default"
        )
    if local.get("partial_rotary_factor") not in (None, 1.0) and not same:
        raise UnsupportedError("config.json: partial_rotary_factor in layers with a window is not supported, only 1.0")
    return {} if same else {"rope_local_theta": base}


def _partial_factor(settings: dict[str, Any], config: HfConfig, default: float | None) -> float:
    factor = number(
        settings, "partial_rotary_factor", number(config, "partial_rotary_factor", 1.0 if default is None else default)
    )
    if factor != 1.0 and (default is None or not 0 < factor < 1):
        raise UnsupportedError(f"config.json: partial_rotary_factor {factor} is not supported, only 1.0")
    return factor


def _proportional(settings: dict[str, Any], head_dim: int) -> dict[str, Any]:
    """Return the settings of a rotation of whole heads in which only the first pairs have frequencies above 0."""
    part = number(settings, "partial_rotary_factor", 1.0)
    if part > 1:
        raise ModelError(f"config.json: partial_rotary_factor is {part}; it must be at most 1")
    return {
        "rope_scaling_type": "proportional",
        "rope_factor": _factor(settings, 1.0),
        "rope_turned": 2 * int(part * head_dim // 2),
    }


def _scaling(settings: dict[str, Any], config: HfConfig, rotated: int) -> dict[str, Any]:
    kind = _kind(settings)
    if kind not in KINDS:
        raise UnsupportedError(
            f"config.json: rope scaling of type {kind!r} is not supported; supported: {', '.join(KINDS)}"
        )
    missing = [key for key in _NEEDED.get(kind, ()) if settings.get(key) is None]
    if missing:
        raise ModelError(f"config.json: rope scaling of type {kind} requires {', '.join(missing)}")
    longest = required(config, "max_position_embeddings")
    # Phi-3 has this key outside of the settings, and there it overrides.
    original = optional(
        config, "original_max_position_embeddings", optional(settings, "original_max_position_embeddings", longest)
    )
    found: dict[str, Any] = {"rope_scaling_type": kind}
    if kind == "default":
        return found
    if original <= 0:
        raise ModelError(f"config.json: original_max_position_embeddings is {original}; it must be positive")
    if kind in ("linear", "dynamic"):
        found["rope_factor"] = _factor(settings, 1.0)
        if kind == "dynamic":
            found["rope_original_max_position_embeddings"] = longest
        return found
    found["rope_original_max_position_embeddings"] = original
    found["rope_factor"] = _factor(settings, longest / original)
    if kind == "llama3":
        found["rope_low_freq_factor"] = number(settings, "low_freq_factor", 1.0)
        found["rope_high_freq_factor"] = number(settings, "high_freq_factor", 4.0)
        return found
    found["rope_attention_factor"] = number(settings, "attention_factor", 0.0)
    if kind == "longrope":
        for key in ("short", "long"):
            found[f"rope_{key}_factors"] = _factors(settings, f"{key}_factor", rotated // 2)
        return found
    found["rope_beta_fast"] = number(settings, "beta_fast", 32.0) or 32.0
    found["rope_beta_slow"] = number(settings, "beta_slow", 1.0) or 1.0
    found["rope_truncate"] = optional(settings, "truncate", True)
    found["rope_mscale"] = number(settings, "mscale", 0.0)
    found["rope_mscale_all_dim"] = number(settings, "mscale_all_dim", 0.0)
    return found


def _factor(settings: dict[str, Any], default: float) -> float:
    factor = number(settings, "factor", default)
    if factor <= 0:
        raise ModelError(f"config.json: the rope scaling's factor is {factor}; it must be positive")
    return factor


def _factors(settings: dict[str, Any], key: str, count: int) -> tuple[float, ...]:
    values = settings[key]
    fits = isinstance(values, list) and len(values) == count
    if not fits or not all(isinstance(value, int | float) and 0 < value <= _MAX_FACTOR for value in values):
        raise ModelError(
            f"config.json: rope scaling's {key} must be {count} positive numbers up to {_MAX_FACTOR:g}, one for each "
            "rotated pair"
        )
    return tuple(float(value) for value in values)
