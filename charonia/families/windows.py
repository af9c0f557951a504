"""Sliding windows: which layers have one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from charonia.errors import ModelError, UnsupportedError
from charonia.families.hf_config import optional, required
from charonia.families.spec import HfConfig

_HAS_WINDOW = {"sliding_attention": True, "full_attention": False}


def window_settings(
    config: HfConfig, *, layer_types: bool = True, has_window: Callable[[int], bool] = lambda layer: True
) -> dict[str, Any]:
    """Return `windows` of llama_spec(): the window of each layer, 0 without one.

    layer_types: whether the family reads `layer_types` of config.json. has_window: whether a layer has a window if
    config.json does not list the layers.
    """
    layers, window = required(config, "num_hidden_layers"), optional(config, "sliding_window", 0)
    types = config.get("layer_types") if layer_types else None
    chosen = [has_window(layer) for layer in range(layers)] if types is None else _chosen(types, layers)
    if window <= 0 and types is not None and any(chosen):
        raise ModelError("config.json: layer_types has sliding_attention, but there is no sliding_window")
    return {"windows": tuple(max(window, 0) if one else 0 for one in chosen)}


def switched_window(config: HfConfig, default: int | None) -> HfConfig:
    """Return the config with the effective window: none unless `use_sliding_window` is true. default: used if
    config.json has no window. Raises UnsupportedError for unknown layer types."""
    if optional(config, "use_sliding_window", False):
        return {**config, "sliding_window": config.get("sliding_window", default)}
    # Without use_sliding_window, layers listed with a window have none, as in transformers.
    if (types := config.get("layer_types")) is not None:
        _chosen(types, required(config, "num_hidden_layers"))
    return {**config, "sliding_window": None, "layer_types": None}


def _chosen(types: Any, layers: int) -> list[bool]:
    if not isinstance(types, list) or len(types) != layers:
        raise ModelError(f"config.json: layer_types must list num_hidden_layers = {layers} types")
    unknown = [kind for kind in types if not isinstance(kind, str) or kind not in _HAS_WINDOW]
    if unknown:
        raise UnsupportedError(
            f"config.json: layer_types has {unknown[0]!r}, which is not supported; supported: {', '.join(_HAS_WINDOW)}"
        )
    return [_HAS_WINDOW[kind] for kind in types]
