"""Sliding windows: which layers have one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from charonia.errors import ModelError, UnsupportedError
from charonia.families.hf_config import optional, required
from charonia.families.spec import HfConfig

_LETTERS = {"sliding_attention": "s", "full_attention": "f"}


def window_settings(
    config: HfConfig, *, layer_types: bool = True, has_window: Callable[[int], bool] = lambda layer: True
) -> dict[str, Any]:
    """Return ModelConfig's `sliding_window` and `layer_windows`.

    layer_types: whether the family reads `layer_types` of config.json. has_window: whether a layer has a window if
    config.json does not list the layers.
    """
    layers, window = required(config, "num_hidden_layers"), optional(config, "sliding_window", 0)
    types = config.get("layer_types") if layer_types else None
    if types is None:
        letters = "".join("s" if has_window(layer) else "f" for layer in range(layers))
    else:
        letters = _letters(types, layers)
    if window <= 0 or "s" not in letters:
        if types is not None and "s" in letters:
            raise ModelError("config.json: layer_types has sliding_attention, but there is no sliding_window")
        return {}
    return {"sliding_window": window, "layer_windows": letters if "f" in letters else ""}


def switched_window(config: HfConfig, default: int | None) -> HfConfig:
    """Return the config with the effective window: none unless `use_sliding_window` is true. default: used if
    config.json has no window. Raises UnsupportedError for unknown layer types."""
    if optional(config, "use_sliding_window", False):
        return {**config, "sliding_window": config.get("sliding_window", default)}
    # Without use_sliding_window, layers listed with a window have none, as in transformers.
    if (types := config.get("layer_types")) is not None:
        _letters(types, required(config, "num_hidden_layers"))
    return {**config, "sliding_window": None, "layer_types": None}


def _letters(types: Any, layers: int) -> str:
    if not isinstance(types, list) or len(types) != layers:
        raise ModelError(f"config.json: layer_types must list num_hidden_layers = {layers} types")
    unknown = [kind for kind in types if not isinstance(kind, str) or kind not in _LETTERS]
    if unknown:
        raise UnsupportedError(
            f"config.json: layer_types has {unknown[0]!r}, which is not supported; supported: {', '.join(_LETTERS)}"
        )
    return "".join(_LETTERS[kind] for kind in types)
