"""Qwen2 and Qwen2.5: Llama's shape with biases on q, k and v."""

from __future__ import annotations

from charonia.errors import UnsupportedError
from charonia.families.hf_config import optional
from charonia.families.llama import llama_config, llama_tensors
from charonia.families.spec import Family, HfConfig, ModelSpec


def _describe(config: HfConfig, model_name: str) -> ModelSpec:
    layer_types = config.get("layer_types") or []
    if optional(config, "use_sliding_window", False) or "sliding_attention" in layer_types:
        raise UnsupportedError("config.json: use_sliding_window is true; sliding windows are not supported yet")
    model = llama_config(config, model_name, "qwen2", attn_bias=True)
    return ModelSpec(model, llama_tensors(model))


FAMILY = Family("qwen2", ("qwen2",), "Qwen2 and Qwen2.5", _describe)
