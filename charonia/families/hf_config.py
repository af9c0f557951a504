"""Reads values of config.json, and rejects values that would give wrong results."""

from __future__ import annotations

import math
from typing import Any, TypeVar, cast

from charonia.errors import ModelError, UnsupportedError
from charonia.families.spec import HfConfig

# Larger than any model. Layers, experts and, in some families, heads have their own tensors or parts, which are listed
# before the files are read, so these limits bound the memory.
_MOST = {
    "num_hidden_layers": 1000,
    "hidden_size": 1 << 24,
    "num_attention_heads": 1024,
}
MOST_EXPERTS = 100_000  # in all layers together
MOST_KV_HEADS = 100_000  # in all layers together
_TOO_LARGE_ID = 1 << 31
_MOST_OF_ANY = 1 << 53  # largest range of integers that a float represents exactly

_NAMES: dict[type, str] = {bool: "true or false", int: "an integer", float: "a number"}

T = TypeVar("T", bound="int | float | bool")


def required(config: HfConfig, key: str) -> int:
    """Return a positive integer that config.json must have."""
    value = config.get(key)
    if value is None:
        raise ModelError(f"config.json: {key} is missing; it must be a positive integer")
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ModelError(f"config.json: {key} is {value!r}; it must be a positive integer")
    most = _MOST.get(key, _MOST_OF_ANY)
    if value > most:
        raise ModelError(f"config.json: {key} is {_spelled(value)}; it must be at most {most}")
    return value


def _spelled(value: int) -> str:
    return str(value) if abs(value) <= _MOST_OF_ANY else f"an integer of {value.bit_length()} bits"


def optional(config: HfConfig, key: str, default: T) -> T:
    """Return a value that may be missing or null."""
    value: Any = config.get(key)
    if value is None:
        return default
    wanted: tuple[type, ...] = (int, float) if isinstance(default, float) else (type(default),)
    fits = isinstance(value, wanted) and isinstance(value, bool) == isinstance(default, bool)
    if not fits:
        raise ModelError(f"config.json: {key} is {value!r}; it must be {_NAMES[type(default)]}")
    if isinstance(value, int) and not isinstance(default, float) and abs(value) > _MOST_OF_ANY:
        raise ModelError(f"config.json: {key} is {_spelled(value)}; its magnitude must be at most {_MOST_OF_ANY}")
    if not isinstance(default, float):
        return cast(T, value)
    try:
        return cast(T, float(value))
    except OverflowError as error:
        raise ModelError(f"config.json: {key} is an integer that is too large for a float") from error


def number(config: HfConfig, key: str, default: float) -> float:
    """Return a finite, non-negative number that may be missing or null."""
    value = optional(config, key, float(default))
    if not 0 <= value < math.inf:
        raise ModelError(f"config.json: {key} is {value}; it must be a finite number and not negative")
    return value


def token_ids(config: HfConfig, key: str) -> tuple[int, ...]:
    """Return a tuple of token ids from one id, a list, or null."""
    value = config.get(key)
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(item, int) and not isinstance(item, bool) and item < _TOO_LARGE_ID for item in ids):
        # read_config may have replaced eos_token_id with the value in generation_config.json.
        file = "config.json or generation_config.json" if key == "eos_token_id" else "config.json"
        raise ModelError(f"{file}: {key} is {value!r}; it must be a token id, below {_TOO_LARGE_ID}, or a list of them")
    return tuple(item for item in ids if item >= 0)


def activation(config: HfConfig, *keys: str, supported: dict[str, str]) -> str:
    """Return the engine's name of the activation. `keys`: keys of config.json; the first one that exists counts."""
    named = next(((key, config[key]) for key in keys if config.get(key)), None)
    if named is None:
        return next(iter(supported.values()))
    if not isinstance(named[1], str) or named[1] not in supported:
        raise UnsupportedError(
            f"config.json: {named[0]} {named[1]!r} is not supported; supported: {', '.join(sorted(supported))}"
        )
    return supported[named[1]]
