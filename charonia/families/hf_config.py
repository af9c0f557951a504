"""Reads config.json as Hugging Face writes it: the older and the newer spelling of the same settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar, cast

from charonia.errors import ModelError, UnsupportedError
from charonia.families.spec import HfConfig

T = TypeVar("T", bound="int | float | bool")


@dataclass(frozen=True)
class Rope:
    """Rotary settings. `kind` is `default` or `llama3`."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0


def required(config: HfConfig, key: str) -> int:
    """A positive integer that a config.json must have."""
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ModelError(f"config.json: {key} is {value!r}; it must be a positive integer")
    return value


def optional(config: HfConfig, key: str, default: T) -> T:
    """A value that may be absent or null."""
    value: Any = config.get(key)
    if value is None:
        return default
    wanted: tuple[type, ...] = (int, float) if isinstance(default, float) else (type(default),)
    fits = isinstance(value, wanted) and isinstance(value, bool) == isinstance(default, bool)
    if not fits:
        raise ModelError(f"config.json: {key} is {value!r}; it must be of type {type(default).__name__}")
    return cast(T, float(value) if isinstance(default, float) else value)


def token_ids(config: HfConfig, key: str) -> tuple[int, ...]:
    """A token id, a list of them or nothing."""
    value = config.get(key)
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(item, int) and not isinstance(item, bool) for item in ids):
        raise ModelError(f"config.json: {key} is {value!r}; it must be a token id or a list of them")
    return tuple(item for item in ids if item >= 0)


def rope(config: HfConfig) -> Rope:
    """Rotary settings from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
    new = config.get("rope_parameters") or {}
    old = config.get("rope_scaling") or {}
    if not isinstance(new, dict) or not isinstance(old, dict):
        raise ModelError("config.json: rope_parameters and rope_scaling must be objects or null")
    if any(isinstance(value, dict) for value in new.values()):
        raise UnsupportedError("config.json: rope_parameters per layer type are not supported")
    settings: dict[str, Any] = {**old, **new}
    kind = settings.get("rope_type") or settings.get("type") or "default"
    theta = optional(settings, "rope_theta", optional(config, "rope_theta", 10000.0))
    partial = optional(settings, "partial_rotary_factor", optional(config, "partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise UnsupportedError(f"config.json: partial_rotary_factor {partial} is not supported, only 1.0")
    if kind == "default":
        return Rope(theta)
    if kind != "llama3":
        raise UnsupportedError(
            f"config.json: rope scaling of type {kind!r} is not supported; supported: default, llama3"
        )
    missing = [key for key in ("factor", "low_freq_factor", "high_freq_factor") if settings.get(key) is None]
    if missing:
        raise ModelError(f"config.json: rope scaling of type llama3 lacks {', '.join(missing)}")
    original = optional(
        settings,
        "original_max_position_embeddings",
        optional(config, "original_max_position_embeddings", required(config, "max_position_embeddings")),
    )
    return Rope(
        theta,
        kind,
        optional(settings, "factor", 1.0),
        optional(settings, "low_freq_factor", 1.0),
        optional(settings, "high_freq_factor", 4.0),
        original,
    )


def refuse_unsupported(config: HfConfig) -> None:
    """Raises UnsupportedError for features that would otherwise be computed wrongly."""
    activation = config.get("hidden_act") or "silu"
    if activation not in ("silu", "swish"):
        raise UnsupportedError(f"config.json: hidden_act {activation!r} is not supported; supported: silu")
    quantization = config.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else quantization
        raise UnsupportedError(
            f"config.json: quantization_config (method {method}) is not supported yet; "
            "convert the model's 16-bit original instead"
        )
