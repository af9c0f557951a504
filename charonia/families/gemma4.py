"""Gemma 4: E2B and E4B, 12B (gemma4_unified), 26B-A4B and 31B. Text only.

Norms as in Gemma 3, but they multiply by their weight. Layers with a window and layers without one have different head
sizes, numbers of KV heads and rotations. Further differences: heads of v are normalised; the last layers may read keys
and values of earlier layers; a layer may have per-layer embeddings; experts may accompany the dense feed-forward layer.
"""

from __future__ import annotations

import math
from typing import Any

from charonia.errors import ModelError, UnsupportedError
from charonia.families.experts import expert_counts
from charonia.families.gemma import TANH, with_defaults
from charonia.families.hf_config import activation, number, optional, required
from charonia.families.llama import attention_bias, llama_spec
from charonia.families.names import Names
from charonia.families.rope import rope_settings
from charonia.families.spec import HfConfig, ModelSpec, family
from charonia.families.windows import window_settings

NAMES = Names(
    ffn_norm="pre_feedforward_layernorm",
    router="router.proj",
    expert="experts.{}.",
    shared="mlp.",
)
_DEFAULTS = {
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "sliding_window": 512,
    "tie_word_embeddings": True,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262144,
}
_UNIFIED_DEFAULTS = _DEFAULTS | {
    "max_position_embeddings": 262144,
    "sliding_window": 1024,
    "hidden_size_per_layer_input": 0,
}
_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}
_FULL, _SLIDING = "full_attention", "sliding_attention"


def _layer_types(config: HfConfig) -> list[str]:
    layers = required(config, "num_hidden_layers")
    types = config.get("layer_types")
    if types is None:
        types = [_FULL if (layer + 1) % 6 == 0 else _SLIDING for layer in range(layers)]
    if not isinstance(types, list) or len(types) != layers or any(one not in (_FULL, _SLIDING) for one in types):
        raise ModelError(
            f"config.json: layer_types must list num_hidden_layers = {layers} times one of {_FULL}, {_SLIDING}"
        )
    return [*types[:-1], _FULL]  # as transformers does


def _heads(config: HfConfig, types: list[str], kind: str) -> tuple[int, int]:
    """Return the size of a head and the number of KV heads in the layers of a kind."""
    size, kv_heads = required(config, "head_dim"), required(config, "num_key_value_heads")
    if config.get("per_layer_config") is not None:
        by_layer = _per_layer_config(config, len(types))
        found = {
            (optional(own, "head_dim", size), optional(own, "num_key_value_heads", kv_heads))
            for own in (by_layer.get(layer, {}) for layer, one in enumerate(types) if one == kind)
        }
        if len(found) > 1:
            raise UnsupportedError(f"config.json: per_layer_config differs among the layers with {kind}")
        size, kv_heads = found.pop() if found else (size, kv_heads)
    elif kind == _FULL:
        if optional(config, "attention_k_eq_v", False):
            kv_heads = optional(config, "num_global_key_value_heads", kv_heads)
        size = optional(config, "global_head_dim", 512)
    if size < 1 or kv_heads < 1:
        raise ModelError(f"config.json: layers with {kind} have {kv_heads} KV heads of {size}; both must be positive")
    return size, kv_heads


def _per_layer_config(config: HfConfig, layers: int) -> dict[int, HfConfig]:
    """Return the entries of per_layer_config, which transformers writes. Its keys are numbers with leading zeros."""
    found: dict[int, HfConfig] = {}
    given = config["per_layer_config"]
    for key, own in given.items() if isinstance(given, dict) else [("", None)]:
        if not isinstance(own, dict) or not key.isdecimal() or int(key) >= layers:
            raise ModelError(f"config.json: per_layer_config must have objects, named by layers 0 to {layers - 1}")
        unknown = own.keys() - {"head_dim", "num_key_value_heads"}
        if unknown:
            raise UnsupportedError(f"config.json: {sorted(unknown)[0]} of per_layer_config is not supported")
        found[int(key)] = own
    return found


def _sources(config: HfConfig, types: list[str]) -> list[int]:
    """Return how many layers before each layer its keys and values are; 0: they are its own."""
    shared = optional(config, "num_kv_shared_layers", 0)
    first = len(types) - shared
    if not 0 <= shared < len(types) or not set(types[first:]) <= set(types[:first]):
        raise ModelError(
            f"config.json: num_kv_shared_layers is {shared}: the layers before must have all kinds of layers of the "
            f"last {shared}"
        )
    last = {kind: layer for layer, kind in enumerate(types[:first])}
    return [0 if layer < first else layer - last[kind] for layer, kind in enumerate(types)]


def _experts(config: HfConfig) -> dict[str, Any]:
    if not optional(config, "enable_moe_block", False):
        return {}
    if optional(config, "num_kv_shared_layers", 0) and optional(config, "use_double_wide_mlp", False):
        raise UnsupportedError("config.json: use_double_wide_mlp is not supported together with enable_moe_block")
    return {
        "expert_inter_size": required(config, "moe_intermediate_size"),
        "shared_expert_inter_size": required(config, "intermediate_size"),
        "expert_norms": True,
        "expert_scales": True,
        **expert_counts(config, required(config, "num_experts"), required(config, "top_k_experts"), "top_k_experts"),
    }


def _rope(config: HfConfig, head_size: int, local_head_size: int) -> dict[str, Any]:
    given = config.get("rope_parameters") or _ROPE
    if config.get("rope_scaling"):
        raise UnsupportedError("config.json: rope_scaling has no effect for Gemma 4: change rope_parameters instead")
    if not isinstance(given, dict) or not all(isinstance(given.get(kind), dict) for kind in _ROPE):
        raise ModelError(f"config.json: rope_parameters must have an object for each of {', '.join(_ROPE)}")
    if any(given[kind].get("rope_theta") is None for kind in _ROPE):
        raise ModelError("config.json: rope_parameters must have a rope_theta for each type of layer")
    if config.get("partial_rotary_factor") is not None:
        raise UnsupportedError("config.json: partial_rotary_factor is supported only within rope_parameters")
    return rope_settings(
        {**config, "rope_parameters": given},
        head_size,
        per_layer=True,
        proportional=True,
        local_head_dim=local_head_size,
    )


def _per_layer(config: HfConfig) -> dict[str, Any]:
    size, rows = optional(config, "hidden_size_per_layer_input", 0), optional(config, "vocab_size_per_layer_input", 0)
    if size < 0:
        raise ModelError(f"config.json: hidden_size_per_layer_input is {size}; it must not be negative")
    if size and rows < required(config, "vocab_size"):
        raise ModelError(f"config.json: vocab_size_per_layer_input is {rows}; it must be at least vocab_size")
    return {"per_layer_embedding": size, "per_layer_vocab_size": rows if size else 0}


def _describe(config: HfConfig) -> ModelSpec:
    types = _layer_types(config)
    config = {**config, "layer_types": types}
    head_size, kv_heads = _heads(config, types, _FULL)
    local_head_size, local_kv_heads = _heads(config, types, _SLIDING)
    sources, layers = _sources(config, types), range(len(types))
    same = optional(config, "attention_k_eq_v", False)
    bias = attention_bias(config)
    if bias["attn_bias"] and (same or any(sources)):
        raise UnsupportedError(
            "config.json: attention_bias true is not supported together with attention_k_eq_v or num_kv_shared_layers"
        )
    wide = optional(config, "use_double_wide_mlp", False)
    attributes = [
        {
            **({"head_size": head_size, "kv_heads": kv_heads} if kind == _FULL else {}),
            "values": "keys" if same and kind == _FULL and not source else "projected",
            "kv_source": source,
            "inter_size": 2 * required(config, "intermediate_size") if wide and source else 0,
        }
        for kind, source in zip(types, sources, strict=True)
    ]
    # Files may have these weights of layers that read the keys and values of earlier layers.
    unused = [f"model.layers.{layer}.self_attn.{one}" for layer in layers if sources[layer] for one in _UNUSED]
    return llama_spec(
        {**config, "head_dim": local_head_size, "num_key_value_heads": local_kv_heads},
        NAMES,
        ignored=tuple(unused),
        layer_attributes=attributes,
        **bias,
        qk_norm=True,
        v_norm=True,
        post_norms=True,
        layer_scalars=True,
        attention_scale=1.0,
        activation=activation(config, "hidden_activation", supported=TANH),
        embedding_scale=math.sqrt(required(config, "hidden_size")),
        logit_soft_cap=number(config, "final_logit_softcapping", 0.0),
        **_per_layer(config),
        **_experts(config),
        **_rope(config, head_size, local_head_size),
        **window_settings(config),
    )


def _gemma4(config: HfConfig) -> ModelSpec:
    return _describe(with_defaults(config, _DEFAULTS))


def _gemma4_unified(config: HfConfig) -> ModelSpec:
    return _describe(with_defaults(config, _UNIFIED_DEFAULTS))


_UNUSED = ("k_proj.", "v_proj.", "k_norm.", "v_norm.")
_UNIFIED_KEYS = """
    attention_bias attention_k_eq_v final_logit_softcapping global_head_dim hidden_activation layer_types
    num_global_key_value_heads num_kv_shared_layers per_layer_config sliding_window use_double_wide_mlp
"""
_KEYS = f"""
    {_UNIFIED_KEYS} enable_moe_block hidden_size_per_layer_input moe_intermediate_size num_experts top_k_experts
    vocab_size_per_layer_input
"""

GEMMA4 = family("gemma4 gemma4_text", "Gemma 4", _gemma4, _KEYS)
GEMMA4_UNIFIED = family(
    "gemma4 gemma4_unified_text",
    "Gemma 4 12B",
    _gemma4_unified,
    _UNIFIED_KEYS,
    harmless="vocab_size_per_layer_input",
    only={"enable_moe_block": (False,), "hidden_size_per_layer_input": (0,)},
)
