"""Phi-3, Phi-3.5, Phi-4 and Phi-4-mini: Llama's architecture with stacked tensors for q, k, v and for gate, up."""

from __future__ import annotations

from charonia.errors import UnsupportedError
from charonia.families.llama import llama_spec
from charonia.families.names import Names
from charonia.families.spec import HfConfig, ModelSpec, family
from charonia.families.windows import window_settings

NAMES = Names(qkv=("self_attn.qkv_proj",), gate="mlp.gate_up_proj", up="mlp.gate_up_proj")


def _describe(config: HfConfig) -> ModelSpec:
    # Default in transformers, where this key overrides the one in rope_scaling.
    config = {"original_max_position_embeddings": 4096, **config}
    spec = llama_spec(config, NAMES, norm_eps=1e-5, partial_rotary=1.0, **window_settings(config, layer_types=False))
    kind = spec.config.rope_scaling_type
    if kind not in ("default", "longrope"):
        raise UnsupportedError(
            f"config.json: rope scaling of type {kind!r} is not supported for Phi-3; supported: default, longrope (su)"
        )
    return spec


FAMILY = family("phi3", "Phi-3, Phi-3.5 and Phi-4", _describe, "sliding_window")
