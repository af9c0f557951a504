"""OLMo 2, OLMo 3 and EXAONE 4: norms after attention and feed-forward, but not before.

OLMo normalises q and k over all heads together, EXAONE each head. OLMo 3 and EXAONE 4 have windows. Layers without a
window have scaled rotation in OLMo 3 (the others are not scaled), and no rotation in EXAONE 4.
"""

from __future__ import annotations

from typing import Any

from charonia.errors import ModelError
from charonia.families.hf_config import optional, required
from charonia.families.llama import attention_bias, llama_spec
from charonia.families.names import Names
from charonia.families.spec import HfConfig, ModelSpec, family
from charonia.families.windows import window_settings

NAMES = Names(ffn_post_norm="post_feedforward_layernorm")


def _post_norms(config: HfConfig, **own: Any) -> ModelSpec:
    return llama_spec(config, NAMES, norm_eps=1e-5, pre_norms=False, post_norms=True, qk_norm=True, **own)


def _olmo(config: HfConfig, **own: Any) -> ModelSpec:
    return _post_norms(config, qk_norm_rows=True, **attention_bias(config), **own)


def _olmo3(config: HfConfig) -> ModelSpec:
    config = {"sliding_window": 4096, **config}
    windows = window_settings(config, has_window=lambda layer: (layer + 1) % 4 != 0)
    theta = optional(config, "rope_theta", 5e5)
    # Window layers have the same base, but no scaling.
    return _olmo(config, theta=theta, local_theta=theta, **windows)


def _exaone4(config: HfConfig) -> ModelSpec:
    config = {"sliding_window": 4096, **config}
    period = config.get("sliding_window_pattern", 4)
    if config.get("sliding_window") is None:
        return _post_norms({**config, "layer_types": None})
    windows = window_settings(config, has_window=_pattern(period, required(config, "num_hidden_layers")))
    return _post_norms(config, rotated=[window > 0 for window in windows["windows"]], **windows)


def _pattern(period: Any, layers: int) -> Any:
    """Return which layers have a window: all except every period-th, or the L in a repeated text of L and G."""
    if isinstance(period, str) and period and set(period) <= {"L", "G"}:
        return lambda layer: period[layer % len(period)] == "L" and layer != layers - 1
    if isinstance(period, bool) or not isinstance(period, int) or period <= 0:
        raise ModelError(
            f"config.json: sliding_window_pattern is {period!r}; it must be a positive integer or a text of L and G"
        )
    return lambda layer: (layer + 1) % period != 0


_OLMO = "attention_bias"

OLMO2 = family("olmo2", "OLMo 2", _olmo, _OLMO)
OLMO3 = family("olmo3", "OLMo 3", _olmo3, f"{_OLMO} layer_types sliding_window")
EXAONE4 = family("exaone4", "EXAONE 4", _exaone4, "layer_types sliding_window sliding_window_pattern")
