"""The mixers of layers with different blocks, from layer_types of config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from charonia.errors import ModelError
from charonia.families.hf_config import optional
from charonia.families.spec import HfConfig

MOST_CONV_KERNEL = 4  # tokens of a short convolution; the engine's limit


def conv_kernel(config: HfConfig, key: str, default: int) -> int:
    """Return the tokens of a short convolution. Raises ModelError."""
    kernel = optional(config, key, default)
    if not 2 <= kernel <= MOST_CONV_KERNEL:
        raise ModelError(f"config.json: {key} is {kernel}; it must be 2 to {MOST_CONV_KERNEL}")
    return kernel


def mixers_of(types: Any, layers: int, mixers: Mapping[str, str]) -> list[str]:
    """Return LayerAttributes.mixer of each layer. types: layer_types. mixers: by layer type. Raises ModelError."""
    if (
        not isinstance(types, list)
        or len(types) != layers
        or any(not isinstance(one, str) or one not in mixers for one in types)
    ):
        raise ModelError(
            f"config.json: layer_types must list num_hidden_layers = {layers} times one of {', '.join(mixers)}"
        )
    found = [mixers[one] for one in types]
    if "attention" not in found:
        raise ModelError("config.json: layer_types has no full_attention; a model needs at least one such layer")
    return found
