"""SmolLM3: Llama's architecture, without rotation in every fourth layer or in those listed in `no_rope_layers`."""

from __future__ import annotations

from charonia.errors import ModelError
from charonia.families.hf_config import optional, required
from charonia.families.llama import all_biases, llama_spec
from charonia.families.spec import HfConfig, ModelSpec, family
from charonia.families.windows import switched_window, window_settings


def _rotated(config: HfConfig) -> list[bool]:
    """Return which layers have a rotation."""
    layers, listed = required(config, "num_hidden_layers"), config.get("no_rope_layers")
    if listed is None:
        interval = optional(config, "no_rope_layer_interval", 4)
        if interval <= 0:
            raise ModelError(f"config.json: no_rope_layer_interval is {interval}; it must be a positive integer")
        return [(layer + 1) % interval != 0 for layer in range(layers)]
    if not isinstance(listed, list) or len(listed) < layers or any(one not in (0, 1) for one in listed):
        raise ModelError(f"config.json: no_rope_layers must list num_hidden_layers = {layers} numbers, each 0 or 1")
    return [one == 1 for one in listed[:layers]]


def _describe(config: HfConfig) -> ModelSpec:
    config = {"tie_word_embeddings": True, **config}
    rotated = _rotated(config)
    return llama_spec(
        config,
        theta=2e6,
        **all_biases(config),
        rotated=rotated,
        **window_settings(switched_window(config, None), has_window=lambda layer: not rotated[layer]),
    )


_KEYS = """
    attention_bias layer_types mlp_bias no_rope_layer_interval no_rope_layers sliding_window use_sliding_window
"""

FAMILY = family("smollm3", "SmolLM3", _describe, _KEYS, harmless="max_window_layers")
