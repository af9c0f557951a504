"""Hunyuan V1, dense and with experts, and Hunyuan 3.

V1 has norms on the heads of q and k after the rotation, and its rotary base grows by a fixed `alpha`. Hunyuan 3 has the
attention of Qwen3, and chooses experts with sigmoids and a bias.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from charonia.errors import ModelError, UnsupportedError
from charonia.families.experts import SIGMOID_ROUTER, expert_counts, layers_with_experts, predicting_layers
from charonia.families.hf_config import number, optional, required
from charonia.families.llama import all_biases, attention_bias, head_size, llama_spec
from charonia.families.names import Names
from charonia.families.rope import rope_dictionary
from charonia.families.spec import HfConfig, ModelSpec, family

_MAX_ALPHA = 1e9  # released models have 1000

NAMES = Names(q_norm="self_attn.query_layernorm", k_norm="self_attn.key_layernorm")


def _with_base(config: HfConfig) -> HfConfig:
    """Convert `dynamic` scaling with an `alpha` to a larger base: base * alpha^(d / (d - 2))."""
    settings = rope_dictionary(config)
    if not settings.get("alpha"):
        return config
    kind = settings.get("rope_type") or settings.get("type")
    if kind != "dynamic":
        raise ModelError(
            f"config.json: the rope scaling has an alpha, but is of type {kind!r}; it must be of type 'dynamic'"
        )
    size = head_size(config)
    base = number(settings, "rope_theta", number(config, "rope_theta", 10000.0))
    alpha = number(settings, "alpha", 1.0)
    if size <= 2 or alpha > _MAX_ALPHA:
        raise ModelError(
            f"config.json: the rope scaling has the alpha {alpha:g}, and a head has {size} elements; alpha must be at "
            f"most {_MAX_ALPHA:g}, and a head must have more than 2 elements"
        )
    plain: dict[str, Any] = {"rope_type": "default", "rope_theta": base * alpha ** (size / (size - 2))}
    return {**config, "rope_scaling": None, "rope_parameters": plain}


def hunyuan_settings(config: HfConfig) -> dict[str, Any]:
    """Return the ModelConfig keys that the dense models and those with experts share."""
    return {**attention_bias(config), "qk_norm": True, "qk_norm_after_rotary": True}


def _describe(config: HfConfig) -> ModelSpec:
    config = _with_base(config)
    return llama_spec(config, NAMES, norm_eps=1e-5, **hunyuan_settings(config))


# Keys in released files for other tasks, for images, and for variants that Hunyuan V1 does not use.
HARMLESS = """
    add_classification_head attention_head_dim cla_share_factor class_num dense_list im_end_id im_newline_id im_start_id
    mask_init_id org_vocab_size pad_id pool_type text_end_id text_start_id
    """
ONLY = {
    "norm_type": ("rms", "hf_rms"),
    "position_embedding_xdrope": (False,),
    "use_cla": (False,),
    "use_qk_norm": (True,),
    "use_rotary_pos_emb": (True,),
}


def _one_value(config: HfConfig, key: str, default: int) -> int:
    """Return a number from a number, or from a list with the same number for every layer."""
    value = config.get(key, default)
    values = value if isinstance(value, list) and value else [value]
    if any(one != values[0] for one in values):
        raise UnsupportedError(f"config.json: {key} differs between layers, which is not supported")
    return required({key: values[0]}, key)


def _moe(config: HfConfig) -> ModelSpec:
    """Hunyuan V1 with experts and a shared expert in every layer, all of the same width."""
    config = _with_base(config)
    inter = required(config, "intermediate_size")
    for key, right in (("moe_intermediate_size", inter), ("num_shared_expert", 1)):
        if config.get(key) is not None and _one_value(config, key, right) != right:
            raise UnsupportedError(
                f"config.json: {key} {config[key]!r} is not supported for Hunyuan; supported: {right}"
            )
    return llama_spec(
        config,
        replace(NAMES, router="mlp.gate.wg", shared="mlp.shared_mlp."),
        norm_eps=1e-5,
        expert_inter_size=inter,
        router_fp32=True,
        shared_expert_inter_size=inter,
        **hunyuan_settings(config),
        **expert_counts(config, _one_value(config, "num_experts", 1), _one_value(config, "moe_topk", 1)),
    )


MOE = family(
    "hunyuan_v1_moe",
    "Hunyuan A13B",
    _moe,
    "attention_bias moe_intermediate_size moe_topk num_experts num_shared_expert",
    harmless=f"{HARMLESS} moe_random_routing_dropped_token",
    only={
        **ONLY,
        "group_limited_greedy": (False,),
        "moe_drop_tokens": (False,),
        "moe_layer_num_skipped": (0,),
        "norm_topk_prob": (True,),
        "routed_scaling_factor": (False, 1, 1.0),
        "topk_group": (False, 1),
        "use_mixed_mlp_moe": (True,),
    },
)


def _hy_v3(config: HfConfig) -> ModelSpec:
    """Hunyuan 3: the attention of Qwen3, experts chosen with sigmoids and a bias, a shared expert."""
    layers, types = required(config, "num_hidden_layers"), config.get("mlp_layer_types")
    with_experts = layers_with_experts(["dense"] + ["sparse"] * (layers - 1) if types is None else types, layers)
    inter = optional(config, "moe_intermediate_size", 1536)
    names = Names(router="mlp.router.gate", router_bias="mlp.expert_bias", shared="mlp.shared_mlp.")
    return llama_spec(
        config,
        names,
        predicting_layers(config),
        head_dim=128,
        norm_eps=1e-5,
        theta=11158840.0,
        **all_biases(config),
        qk_norm=True,
        expert_inter_size=inter,
        with_experts=with_experts,
        **SIGMOID_ROUTER,
        router_scale=number(config, "router_scaling_factor", 2.826),
        shared_expert_inter_size=inter * optional(config, "num_shared_experts", 1),
        **expert_counts(config, optional(config, "num_experts", 192), optional(config, "num_experts_per_tok", 8)),
    )


_HY_V3_KEYS = """
    attention_bias mlp_bias mlp_layer_types moe_intermediate_size num_experts num_experts_per_tok num_shared_experts
    num_nextn_predict_layers router_scaling_factor
"""

# enable_moe_fp32_combine: sums of experts are always fp32 here.
HY_V3 = family("hy_v3", "Hunyuan 3", _hy_v3, _HY_V3_KEYS, harmless="enable_moe_fp32_combine")

DENSE = family(
    "hunyuan_v1_dense", "Hunyuan V1", _describe, "attention_bias", harmless=HARMLESS, only={**ONLY, "num_experts": (1,)}
)
