"""Helium 1 preview: Llama's architecture with interleaved rotation."""

from __future__ import annotations

from charonia.families.config_keys import words
from charonia.families.hf_config import optional
from charonia.families.llama import llama_config, llama_spec
from charonia.families.spec import Family, HfConfig, ModelSpec


def _describe(config: HfConfig, model_name: str) -> ModelSpec:
    model = llama_config(
        config,
        model_name,
        "helium",
        head_dim=128,
        norm_eps=1e-8,
        theta=100000.0,
        rotary_interleaved=True,
        attn_bias=optional(config, "attention_bias", False),
        mlp_bias=optional(config, "mlp_bias", False),
    )
    return llama_spec(model)


FAMILY = Family("helium", ("helium",), "Helium 1 preview", _describe, keys=words("attention_bias mlp_bias"))
