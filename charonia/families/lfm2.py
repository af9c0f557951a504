"""LFM2 and LFM2.5: gated short convolutions in most layers, attention with norms on the heads of q and k in the others.

Released files have two spellings: block_ff_dim and full_attn_idxs in older ones, intermediate_size and layer_types in
newer ones.
"""

from __future__ import annotations

from typing import Any

from charonia.errors import ModelError
from charonia.families.experts import expert_counts
from charonia.families.hf_config import number, optional, required
from charonia.families.llama import llama_spec
from charonia.families.mixers import conv_kernel, mixers_of
from charonia.families.names import Names
from charonia.families.spec import HfConfig, ModelSpec, family

NAMES = Names(
    norm="model.embedding_norm",
    attention_norm="operator_norm",
    ffn_norm="ffn_norm",
    q_norm="self_attn.q_layernorm",
    k_norm="self_attn.k_layernorm",
    attention_output="self_attn.out_proj",
    gate="feed_forward.w1",
    up="feed_forward.w3",
    down="feed_forward.w2",
    router="feed_forward.gate",
    router_bias="feed_forward.expert_bias",
    expert="feed_forward.experts.{}.",
    expert_gate="w1",
    expert_up="w3",
    expert_down="w2",
)
_MIXERS = {"conv": "short_conv", "full_attention": "attention"}


def _mixers(config: HfConfig) -> list[str]:
    """Return the mixer of each layer. Raises ModelError."""
    layers = required(config, "num_hidden_layers")
    types, attention = config.get("layer_types"), config.get("full_attn_idxs")
    if types is None:
        if attention is not None and not isinstance(attention, list):
            raise ModelError(f"config.json: full_attn_idxs {attention!r} must list the layers with attention")
        types = ["full_attention" if attention is None or at in attention else "conv" for at in range(layers)]
    return mixers_of(types, layers, _MIXERS)


def _describe(config: HfConfig, **own: Any) -> ModelSpec:
    hidden = required(config, "hidden_size")
    for key in ("block_dim", "conv_dim", "conv_dim_out"):
        if optional(config, key, hidden) != hidden:
            raise ModelError(f"config.json: {key} is {config[key]}, but hidden_size is {hidden}: they must be equal")
    tied = optional(config, "tie_embedding", optional(config, "tie_word_embeddings", True))
    config = {**config, "rms_norm_eps": number(config, "norm_eps", 1e-5), "tie_word_embeddings": tied}
    return llama_spec(
        config,
        NAMES,
        theta=1e6,
        qk_norm=True,
        conv_kernel=conv_kernel(config, "conv_L_cache", 3),
        mixers=_mixers(config),
        conv_bias=optional(config, "conv_bias", False),
        **own,
    )


def _inter_size(config: HfConfig) -> int:
    """Return the width of the feed-forward layers, which config.json may have before its adjustment."""
    size = required(config, "block_ff_dim" if config.get("block_ff_dim") is not None else "intermediate_size")
    if not optional(config, "block_auto_adjust_ff_dim", True):
        return size
    size = 2 * size // 3
    factor = config.get("block_ffn_dim_multiplier", 1.0)
    if factor is None:
        return size
    multiple = optional(config, "block_multiple_of", 256)
    if multiple < 1:
        raise ModelError(f"config.json: block_multiple_of is {multiple}; it must be at least 1")
    size = int(number(config, "block_ffn_dim_multiplier", 1.0) * size)
    return -(-size // multiple) * multiple


def _dense(config: HfConfig) -> ModelSpec:
    return _describe(config, inter_size=_inter_size(config))


def _moe(config: HfConfig) -> ModelSpec:
    layers, dense = required(config, "num_hidden_layers"), optional(config, "num_dense_layers", 2)
    return _describe(
        config,
        expert_inter_size=optional(config, "moe_intermediate_size", 1792),
        with_experts=[layer >= dense for layer in range(layers)],
        renormalize_experts=optional(config, "norm_topk_prob", True),
        router_score="sigmoid",
        router_bias=optional(config, "use_expert_bias", True),
        router_scale=number(config, "routed_scaling_factor", 1.0),
        # transformers adds this to the sum of the weights. The sum is above 0.1 in practice, so weights differ by less
        # than 1e-5 of their value.
        router_norm_min=1e-6,
        **expert_counts(config, optional(config, "num_experts", 32), optional(config, "num_experts_per_tok", 4)),
    )


_KEYS = """
    block_dim conv_L_cache conv_bias conv_dim conv_dim_out full_attn_idxs layer_types norm_eps tie_embedding
"""
# block_norm_eps repeats norm_eps, and num_heads num_attention_heads; transformers reads neither.
_HARMLESS = """
    block_mlp_init_scale block_norm_eps block_out_init_scale block_use_xavier_init conv_use_xavier_init num_heads
"""
_ONLY: dict[str, Any] = {"block_use_swiglu": (True,), "use_pos_enc": (True,)}

LFM2 = family(
    "lfm2",
    "LFM2 and LFM2.5",
    _dense,
    f"{_KEYS} block_auto_adjust_ff_dim block_ff_dim block_ffn_dim_multiplier block_multiple_of",
    harmless=_HARMLESS,
    only=_ONLY,
)
LFM2_MOE = family(
    "lfm2_moe",
    "LFM2 and LFM2.5 with experts",
    _moe,
    f"""{_KEYS} moe_intermediate_size norm_topk_prob num_dense_layers num_experts num_experts_per_tok
    routed_scaling_factor use_expert_bias""",
    harmless=_HARMLESS,
    only=_ONLY,
)
