"""Rotary settings of a config.json, in the older spelling of Hugging Face's and in that of transformers 5."""

from __future__ import annotations

from typing import Any

from charonia.errors import ModelError, UnsupportedError
from charonia.families.hf_config import number, optional, required
from charonia.families.spec import HfConfig

KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
_ALIASES = {"su": "longrope"}  # what Phi-3 called it first
_NEEDED = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
}
_MAX_FACTOR = 1e30  # a float of 32 bits holds it
_LAYER_TYPES = ("full_attention", "sliding_attention")


def rope_settings(
    config: HfConfig, head_dim: int, *, theta: float = 10000.0, partial: bool = False, local_theta: float = 0.0
) -> dict[str, Any]:
    """ModelConfig's `rotary_embedding` and `rope_...` from `rope_parameters` (transformers 5) or `rope_theta` and
    `rope_scaling` (before).

    theta, local_theta: bases where config.json names none; local_theta > 0: layers with a window have a base of their
    own. partial: the family's own code can rotate a part of a head only. Raises UnsupportedError for a kind of scaling
    that the engine does not have, ModelError for values that are missing.
    """
    settings, local = _dictionaries(config)
    if bool(local) and not local_theta:
        raise UnsupportedError("config.json: rope_parameters per layer type are not supported for this family")
    base = number(settings, "rope_theta", number(config, "rope_theta", theta))
    rotated = int(head_dim * _partial_factor(settings, config, partial))
    found: dict[str, Any] = {"rotary_embedding": rotated, "rope_theta": base}
    if local_theta:
        found["rope_local_theta"] = _local_theta(config, local, local_theta)
    return found | _scaling(settings, config, rotated)


def _dictionaries(config: HfConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings of all layers, or of those without a window, and those of the layers with one."""
    new, old = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    if not isinstance(new, dict) or not isinstance(old, dict):
        raise ModelError("config.json: rope_parameters and rope_scaling must be objects or null")
    nested = [key for key, value in new.items() if isinstance(value, dict)]
    if not nested:
        return {**old, **new}, {}
    unknown = [key for key in nested if key not in _LAYER_TYPES]
    if unknown:
        raise UnsupportedError(
            f"config.json: rope_parameters of layer type {unknown[0]!r} are not supported; supported: "
            + ", ".join(_LAYER_TYPES)
        )
    return {**old, **(new.get("full_attention") or {})}, new.get("sliding_attention") or {"rope_type": "default"}


def _kind(settings: dict[str, Any]) -> str:
    kind = settings.get("rope_type") or settings.get("type") or "default"
    if not isinstance(kind, str):
        raise ModelError(f"config.json: the rope scaling's type is {kind!r}; it must be one of {', '.join(KINDS)}")
    return _ALIASES.get(kind, kind)


def _local_theta(config: HfConfig, local: dict[str, Any], default: float) -> float:
    if _kind(local) != "default":
        raise UnsupportedError(
            f"config.json: rope scaling of type {_kind(local)!r} in layers with a window is not supported; "
            "supported: default"
        )
    return number(local, "rope_theta", number(config, "rope_local_base_freq", default))


def _partial_factor(settings: dict[str, Any], config: HfConfig, partial: bool) -> float:
    factor = number(settings, "partial_rotary_factor", number(config, "partial_rotary_factor", 1.0))
    if factor != 1.0 and not (partial and 0 < factor < 1):
        raise UnsupportedError(f"config.json: partial_rotary_factor {factor} is not supported, only 1.0")
    return factor


def _scaling(settings: dict[str, Any], config: HfConfig, rotated: int) -> dict[str, Any]:
    kind = _kind(settings)
    if kind not in KINDS:
        raise UnsupportedError(
            f"config.json: rope scaling of type {kind!r} is not supported; supported: {', '.join(KINDS)}"
        )
    missing = [key for key in _NEEDED.get(kind, ()) if settings.get(key) is None]
    if missing:
        raise ModelError(f"config.json: rope scaling of type {kind} lacks {', '.join(missing)}")
    longest = required(config, "max_position_embeddings")
    # Phi-3 says beside the settings what the others say in them, and there it counts.
    original = optional(
        config, "original_max_position_embeddings", optional(settings, "original_max_position_embeddings", longest)
    )
    found: dict[str, Any] = {"rope_scaling_type": kind}
    if kind == "default":
        return found
    if original <= 0:
        raise ModelError(f"config.json: original_max_position_embeddings is {original}; it must be positive")
    if kind in ("linear", "dynamic"):
        found["rope_factor"] = number(settings, "factor", 1.0)
        if kind == "dynamic":
            found["rope_original_max_position_embeddings"] = longest
        return found
    found["rope_original_max_position_embeddings"] = original
    found["rope_factor"] = number(settings, "factor", longest / original)
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


def _factors(settings: dict[str, Any], key: str, count: int) -> tuple[float, ...]:
    values = settings[key]
    fits = isinstance(values, list) and len(values) == count
    if not fits or not all(isinstance(value, int | float) and 0 < value <= _MAX_FACTOR for value in values):
        raise ModelError(
            f"config.json: rope scaling's {key} must be {count} positive numbers up to {_MAX_FACTOR:g}, one for each "
            "rotated pair"
        )
    return tuple(float(value) for value in values)
