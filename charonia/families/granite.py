"""Granite 3 and 4, dense: Llama's shape with factors of embedding, attention, residual stream and logits."""

from __future__ import annotations

from charonia.errors import ModelError
from charonia.families.config_keys import words
from charonia.families.hf_config import number, optional
from charonia.families.llama import llama_config, llama_spec
from charonia.families.spec import Family, HfConfig, ModelSpec


def _factor(config: HfConfig, key: str) -> float:
    value = number(config, key, 1.0)
    if value == 0:
        raise ModelError(f"config.json: {key} is 0; it must be positive")
    return value


def _describe(config: HfConfig, model_name: str) -> ModelSpec:
    bias = optional(config, "attention_bias", False)
    model = llama_config(
        config,
        model_name,
        "granite",
        attn_bias=bias,
        attn_output_bias=bias,
        mlp_bias=optional(config, "mlp_bias", False),
        embedding_scale=_factor(config, "embedding_multiplier"),
        attention_scale=_factor(config, "attention_multiplier"),
        residual_multiplier=_factor(config, "residual_multiplier"),
        logits_scale=1 / _factor(config, "logits_scaling"),
    )
    return llama_spec(model)


_KEYS = """
    attention_bias attention_multiplier embedding_multiplier logits_scaling mlp_bias residual_multiplier
"""

FAMILY = Family("granite", ("granite",), "Granite 3", _describe, keys=words(_KEYS))
