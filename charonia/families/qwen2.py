"""Qwen1.5, Qwen2 and Qwen2.5 (biases on q, k and v) and Qwen3 (norms on the heads of q and k): Llama's shape.

Where `use_sliding_window` is true, the layers from `max_window_layers` on have the window.
"""

from __future__ import annotations

from typing import Any

from charonia.families.hf_config import optional
from charonia.families.llama import llama_config, llama_spec
from charonia.families.spec import Family, HfConfig, ModelSpec
from charonia.families.windows import window_settings


def _windows(config: HfConfig) -> dict[str, Any]:
    if not optional(config, "use_sliding_window", False):
        return window_settings({**config, "sliding_window": None})
    first = optional(config, "max_window_layers", 28)
    window = optional(config, "sliding_window", 4096)
    return window_settings({**config, "sliding_window": window}, has_window=lambda layer: layer >= first)


def _qwen2(config: HfConfig, model_name: str) -> ModelSpec:
    return llama_spec(llama_config(config, model_name, "qwen2", attn_bias=True, **_windows(config)))


def _qwen3(config: HfConfig, model_name: str) -> ModelSpec:
    bias = optional(config, "attention_bias", False)
    model = llama_config(
        config,
        model_name,
        "qwen3",
        head_dim=128,
        attn_bias=bias,
        attn_output_bias=bias,
        qk_norm=True,
        **_windows(config),
    )
    return llama_spec(model)


QWEN2 = Family("qwen2", ("qwen2",), "Qwen1.5, Qwen2 and Qwen2.5", _qwen2)
QWEN3 = Family("qwen3", ("qwen3",), "Qwen3", _qwen3)
