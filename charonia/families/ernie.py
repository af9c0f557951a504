"""ERNIE 4.5, dense: Llama's architecture with interleaved rotation."""

from __future__ import annotations

from charonia.families.config_keys import words
from charonia.families.hf_config import optional
from charonia.families.llama import llama_config, llama_spec
from charonia.families.spec import Family, HfConfig, ModelSpec


def _describe(config: HfConfig, model_name: str) -> ModelSpec:
    config = {"tie_word_embeddings": True, **config}
    bias = optional(config, "use_bias", False)
    model = llama_config(
        config,
        model_name,
        "ernie4_5",
        head_dim=128,
        norm_eps=1e-5,
        theta=500000.0,
        rotary_interleaved=True,
        attn_bias=bias,
        attn_output_bias=bias,
        mlp_bias=bias,
    )
    return llama_spec(model)


ERNIE4_5 = Family("ernie4_5", ("ernie4_5",), "ERNIE 4.5", _describe, keys=words("use_bias"))
