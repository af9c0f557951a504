"""InternLM 1: Llama's shape with biases on q, k, v and o where config.json's `bias` is true (the default)."""

from __future__ import annotations

from charonia.errors import UnsupportedError
from charonia.families.hf_config import optional
from charonia.families.llama import llama_config, llama_tensors
from charonia.families.spec import Family, HfConfig, ModelSpec


def _describe(config: HfConfig, model_name: str) -> ModelSpec:
    # Its own spelling: {"base": 10000, "type": "dynamic"}. Dynamic NTK scaling begins beyond max_position_embeddings,
    # which is the longest sequence here.
    rotary = config.get("rotary")
    if isinstance(rotary, dict):
        if rotary.get("type", "origin") not in ("origin", "dynamic"):
            raise UnsupportedError(
                f"config.json: rotary of type {rotary['type']!r} is not supported; supported: origin, dynamic"
            )
        config = {**config, "rope_theta": float(rotary.get("base", 10000))}
    bias = optional(config, "bias", True)
    model = llama_config(config, model_name, "internlm", attn_bias=bias, attn_output_bias=bias)
    return ModelSpec(model, llama_tensors(model), session_len=model.max_position_embeddings)


FAMILY = Family("internlm", ("internlm",), "InternLM 1", _describe)
