"""Granite 3 and 4, dense, and HyperCLOVA X: Llama's architecture with factors of embedding, attention, residual stream
and logits. HyperCLOVA X also has norms after attention and feed-forward."""

from __future__ import annotations

from charonia.errors import ModelError
from charonia.families.hf_config import number, optional
from charonia.families.llama import all_biases, llama_spec
from charonia.families.names import Names
from charonia.families.spec import HfConfig, ModelSpec, family


def _factor(config: HfConfig, key: str) -> float:
    value = number(config, key, 1.0)
    if value == 0:
        raise ModelError(f"config.json: {key} is 0; it must be positive")
    return value


def _describe(config: HfConfig) -> ModelSpec:
    return llama_spec(
        config,
        **all_biases(config),
        embedding_scale=_factor(config, "embedding_multiplier"),
        attention_scale=_factor(config, "attention_multiplier"),
        residual_multiplier=_factor(config, "residual_multiplier"),
        logits_scale=1 / _factor(config, "logits_scaling"),
    )


_KEYS = """
    attention_bias attention_multiplier embedding_multiplier logits_scaling mlp_bias residual_multiplier
"""

FAMILY = family("granite", "Granite 3", _describe, _KEYS)

# Its code calls the norms after attention and feed-forward post_norm1 and post_norm2.
_HYPERCLOVAX_NAMES = Names(attention_post_norm="post_norm1", ffn_post_norm="post_norm2")


def _hyperclovax(config: HfConfig) -> ModelSpec:
    has_scale = config.get("attention_multiplier") is not None
    return llama_spec(
        config,
        _HYPERCLOVAX_NAMES,
        **all_biases(config),
        post_norms=optional(config, "use_post_norm", True),
        embedding_scale=_factor(config, "embedding_multiplier"),
        attention_scale=_factor(config, "attention_multiplier") if has_scale else 0.0,
        residual_multiplier=_factor(config, "residual_multiplier"),
        logits_scale=_factor(config, "logits_scaling"),  # a factor here, but a divisor in Granite
    )


HYPERCLOVAX = family("hyperclovax", "HyperCLOVA X", _hyperclovax, f"{_KEYS} use_post_norm")
