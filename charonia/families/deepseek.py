"""Multi-head latent attention: DeepSeek V2 and V3, Kimi K2, GLM-4.7-Flash, Mistral Small 4.

The cache holds a latent of each token instead of k and v. Feed-forward layers are dense or mixtures of experts.
"""

from __future__ import annotations

import math
from typing import Any

from charonia.errors import ModelError, UnsupportedError
from charonia.families.experts import (
    GLM_NAMES,
    SIGMOID_ROUTER,
    expert_counts,
    expert_groups,
    layers_with_experts,
    predicting_layers,
)
from charonia.families.hf_config import number, optional, required
from charonia.families.llama import llama_spec
from charonia.families.mistral import MINISTRAL3_ROPE, Q_SCALE, query_factors
from charonia.families.rope import rope_dictionary, rope_settings, rope_value
from charonia.families.spec import HfConfig, ModelSpec, family

# Defaults of DeepSeek V2 and V3.
_SIZES = {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}


def _deepseek_v2(config: HfConfig) -> ModelSpec:
    defaults = {
        **{"first_k_dense_replace": 0, "n_routed_experts": 64, "n_shared_experts": 2, "moe_intermediate_size": 1407},
        **_SIZES,
    }
    own = {
        "num_experts_per_tok": optional(config, "num_experts_per_tok", 6),  # of all released models; the class has none
        **{"norm_topk_prob": False, "n_group": 1},  # without effect for the supported topk_method
    }
    return _latent_spec({**defaults, **config, **own}, router_fp32=True)


def _deepseek_v3(config: HfConfig) -> ModelSpec:
    defaults = {
        **{"first_k_dense_replace": 3, "n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1},
        **{"moe_intermediate_size": 2048, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5},
        **_SIZES,
    }
    return _latent_spec({**defaults, **config}, mtp=True, **SIGMOID_ROUTER)


def _glm4_moe_lite(config: HfConfig) -> ModelSpec:
    defaults = {
        **{"q_lora_rank": 768, "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256},
        **{"first_k_dense_replace": 1, "n_routed_experts": 64, "num_experts_per_tok": 4, "n_shared_experts": 1},
        **{"moe_intermediate_size": 1536, "routed_scaling_factor": 1.8},
    }
    types, layers = config.get("mlp_layer_types"), required(config, "num_hidden_layers")
    own: dict[str, Any] = {} if types is None else {"with_experts": layers_with_experts(types, layers)}
    return _latent_spec({**defaults, **config}, norm_eps=1e-5, mtp=True, **own, **SIGMOID_ROUTER)


# Default of rope_parameters for Mistral 4 in transformers.
_MISTRAL4_ROPE = {
    **MINISTRAL3_ROPE,
    "rope_theta": 10000.0,
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
}


def _mistral4(config: HfConfig) -> ModelSpec:
    """Query factors grow beyond the trained length, as in Ministral 3; the router has a softmax."""
    defaults = {
        **{"q_lora_rank": 1024, "kv_lora_rank": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 128},
        **{"first_k_dense_replace": 0, "n_routed_experts": 128, "num_experts_per_tok": 4, "n_shared_experts": 1},
        "moe_intermediate_size": 2048,
    }
    config = {**defaults, **config}
    if not config.get("rope_parameters") and not config.get("rope_scaling"):
        config["rope_parameters"] = _MISTRAL4_ROPE
    return _latent_spec(config, rope_keys=(Q_SCALE,), **query_factors(config), router_norm_min=1e-20)


def _latent_spec(config: HfConfig, rope_keys: tuple[str, ...] = (), **own: Any) -> ModelSpec:
    """Describe a model. config: with the family's defaults of the sizes."""
    rotated, plain = required(config, "qk_rope_head_dim"), required(config, "qk_nope_head_dim")
    heads = required(config, "num_attention_heads")
    latent, values = required(config, "kv_lora_rank"), required(config, "v_head_dim")
    if latent % 2 or rotated % 2:
        raise UnsupportedError(
            f"config.json: kv_lora_rank {latent} and qk_rope_head_dim {rotated} must be even numbers"
        )
    config = _without_partial_rotation(config, rotated, rotated + plain)
    rope = rope_settings(config, rotated, read=rope_keys)
    layers, dense = required(config, "num_hidden_layers"), optional(config, "first_k_dense_replace", 0)
    count, per_token = required(config, "n_routed_experts"), required(config, "num_experts_per_tok")
    inter = required(config, "moe_intermediate_size")
    return llama_spec(
        # The number of KV heads has no meaning: all heads share one latent.
        {**config, "head_dim": rotated + plain, "num_key_value_heads": heads},
        GLM_NAMES,
        ignored=predicting_layers(config),
        latent_size=latent,
        q_latent_size=0 if config.get("q_lora_rank") is None else required(config, "q_lora_rank"),
        value_size_per_head=values,
        attention_scale=_attention_scale(config, rope, rotated + plain),
        rotary_interleaved=optional(config, "rope_interleave", True),
        expert_inter_size=inter,
        renormalize_experts=optional(config, "norm_topk_prob", True),
        router_scale=number(config, "routed_scaling_factor", 1.0),
        shared_expert_inter_size=inter * optional(config, "n_shared_experts", 0),
        **expert_groups(config, count, per_token),
        **expert_counts(config, count, per_token),
        **{"with_experts": [layer >= dense for layer in range(layers)], **rope, **own},
    )


def _without_partial_rotation(config: HfConfig, rotated: int, head: int) -> HfConfig:
    """Return the config without partial_rotary_factor. qk_rope_head_dim says how much of a head is rotated."""
    key, names = "partial_rotary_factor", ("rope_parameters", "rope_scaling")
    places = [config, *(place for name in names if isinstance(place := config.get(name), dict))]
    for place in places:
        factor = place.get(key)
        if factor is not None and not any(math.isclose(number(place, key, 1.0), one) for one in (1.0, rotated / head)):
            raise UnsupportedError(f"config.json: {key} {factor} contradicts qk_rope_head_dim {rotated} of {head}")

    def without(place: Any) -> Any:
        return {name: value for name, value in place.items() if name != key} if isinstance(place, dict) else place

    return {name: without(value) if name in names else value for name, value in config.items() if name != key}


def _attention_scale(config: HfConfig, rope: dict[str, Any], head: int) -> float:
    """Return the factor of q k. With a rotary scaling it contains the square of yarn's factor for mscale_all_dim."""
    weight = rope_value(config, "mscale_all_dim", 0.0)
    if rope["rope_scaling_type"] == "default" or weight == 0:
        return float(head**-0.5)
    factor = number(rope_dictionary(config), "factor", 0.0)
    if factor == 0:
        raise ModelError("config.json: the rope scaling has mscale_all_dim, but no factor")
    attention = 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
    return float(head**-0.5 * attention**2)


_KEYS = """
    kv_lora_rank moe_intermediate_size n_routed_experts n_shared_experts num_experts_per_tok
    q_lora_rank qk_nope_head_dim qk_rope_head_dim routed_scaling_factor v_head_dim
"""
_GROUPED_KEYS = f"{_KEYS} n_group norm_topk_prob rope_interleave topk_group"
# These keys concern training and the distribution of experts.
_HARMLESS = "aux_loss_alpha ep_size num_mtp_layers qk_head_dim seq_aux"
_ONLY: dict[str, Any] = {"moe_layer_freq": (1,)}

DEEPSEEK_V2 = family(
    "deepseek_v2",
    "DeepSeek V2-Lite",
    _deepseek_v2,
    f"{_KEYS} first_k_dense_replace",
    harmless=f"{_HARMLESS} n_group topk_group",
    only={**_ONLY, "norm_topk_prob": (False,), "scoring_func": ("softmax",), "topk_method": ("greedy",)},
)
DEEPSEEK_V3 = family(
    "deepseek_v3 deepseek_v3 kimi_k2",
    "DeepSeek V3, V3.1 and R1, and Kimi K2",
    _deepseek_v3,
    f"{_GROUPED_KEYS} first_k_dense_replace",
    harmless=_HARMLESS,
    only={**_ONLY, "scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)},
    mtp=True,
)
GLM4_MOE_LITE = family(
    "glm4_moe_lite",
    "GLM-4.7-Flash",
    _glm4_moe_lite,
    f"{_GROUPED_KEYS} mlp_layer_types",
    harmless=_HARMLESS,
    # transformers does not read the first key; the first layer is dense without mlp_layer_types.
    only={**_ONLY, "first_k_dense_replace": (1,), "scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)},
    mtp=True,
)
MISTRAL4 = family(
    "mistral4",
    "the text part of Mistral Small 4",
    _mistral4,
    f"{_GROUPED_KEYS} first_k_dense_replace",
    harmless=_HARMLESS,
    only={**_ONLY, "scoring_func": ("softmax",), "topk_method": ("greedy",)},
)
