"""Mistral and Ministral 8B: Llama's architecture with a sliding window in all layers, or those in `layer_types`."""

from __future__ import annotations

from typing import Any

from charonia.families.hf_config import required
from charonia.families.llama import llama_spec
from charonia.families.rope import rope_value
from charonia.families.spec import HfConfig, ModelSpec, family
from charonia.families.windows import window_settings


def _describe(config: HfConfig) -> ModelSpec:
    # A missing key means the default window; null means no window.
    config = {"sliding_window": 4096, **config}
    return llama_spec(config, per_layer_rope=True, **window_settings(config))


Q_SCALE = "llama_4_scaling_beta"
# Default of rope_parameters for Ministral 3 in transformers.
MINISTRAL3_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    Q_SCALE: 0.1,
}


def query_factors(config: HfConfig) -> dict[str, Any]:
    """The attributes of query factors that grow beyond the trained length."""
    beta, longest = rope_value(config, Q_SCALE, 0.0), required(config, "max_position_embeddings")
    trained = int(rope_value(config, "original_max_position_embeddings", longest))
    return {"q_scale_beta": beta, "q_scale_length": trained if beta else 0}


def _ministral3(config: HfConfig) -> ModelSpec:
    """Mistral with query factors that grow beyond the trained length."""
    if not config.get("rope_parameters") and not config.get("rope_scaling"):
        config = {**config, "rope_parameters": MINISTRAL3_ROPE}
    return llama_spec(
        config,
        head_dim=128,
        norm_eps=1e-5,
        rope_keys=(Q_SCALE,),
        **query_factors(config),
        **window_settings(config, layer_types=False),
    )


MINISTRAL3 = family("ministral3", "Ministral 3", _ministral3, "sliding_window")
FAMILY = family("mistral mistral ministral", "Mistral and Ministral 8B", _describe, "sliding_window layer_types")
