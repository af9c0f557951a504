"""Qwen3-Next and Qwen3.5 to 3.8: most layers have a gated delta net, the others attention with a gate. Dense layers, or
experts and a shared expert with a gate."""

from __future__ import annotations

from typing import Any

from charonia.errors import ModelError
from charonia.families.experts import expert_counts, qwen_layers
from charonia.families.hf_config import activation, optional, required
from charonia.families.llama import attention_bias, llama_spec
from charonia.families.mixers import conv_kernel, mixers_of
from charonia.families.names import MtpNames, Names
from charonia.families.spec import HfConfig, ModelSpec, family

MOST_K_DIM = 256  # elements of a k head; the engine's limit

MTP_NAMES = MtpNames("mtp.layers.0.", "mtp.norm", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc")
_NAMES = Names(mtp=MTP_NAMES)
NEXT_NAMES = Names(delta_grouped=True, mtp=MTP_NAMES)
_MIXERS = {"linear_attention": "delta_net", "full_attention": "attention"}


def _mixers(config: HfConfig) -> list[str]:
    layers, interval = required(config, "num_hidden_layers"), optional(config, "full_attention_interval", 4)
    types = config.get("layer_types")
    if types is None:
        if interval < 1:
            raise ModelError(f"config.json: full_attention_interval is {interval}; it must be at least 1")
        types = ["linear_attention" if (layer + 1) % interval else "full_attention" for layer in range(layers)]
    return mixers_of(types, layers, _MIXERS)


def _spec(config: HfConfig, names: Names, **own: Any) -> ModelSpec:
    k_heads, v_heads = optional(config, "linear_num_key_heads", 16), optional(config, "linear_num_value_heads", 32)
    if k_heads < 1 or v_heads < 1 or v_heads % k_heads:
        raise ModelError(
            f"config.json: linear_num_value_heads {v_heads} is not a multiple of linear_num_key_heads {k_heads}"
        )
    k_dim, v_dim = optional(config, "linear_key_head_dim", 128), optional(config, "linear_value_head_dim", 128)
    if not 1 <= k_dim <= MOST_K_DIM:
        raise ModelError(f"config.json: linear_key_head_dim is {k_dim}; it must be 1 to {MOST_K_DIM}")
    if v_dim < 1:
        raise ModelError(f"config.json: linear_value_head_dim is {v_dim}; it must be positive")
    kernel = conv_kernel(config, "linear_conv_kernel_dim", 4)
    mixers = _mixers(config)
    return llama_spec(
        config,
        names,
        ignored=("mtp.",),  # layers for multi-token prediction, if they are not used
        mtp=mixers[-1] == "attention" and not optional(config, "mtp_use_dedicated_embeddings", False),
        head_dim=256,
        partial_rotary=0.25,
        activation=activation(config, "hidden_act", supported={"silu": "silu", "swish": "silu"}),
        norm_unit_offset=True,
        qk_norm=True,
        attention_gate=True,
        **attention_bias(config),
        conv_kernel=kernel,
        mixers=mixers,
        delta_k_heads=k_heads,
        delta_v_heads=v_heads,
        delta_k_dim=k_dim,
        delta_v_dim=v_dim,
        **own,
    )


def _with_experts(config: HfConfig, count: int, per_token: int) -> dict[str, Any]:
    inter = optional(config, "moe_intermediate_size", 512)
    return {
        "inter_size": optional(config, "intermediate_size", inter),
        "expert_inter_size": inter,
        "shared_expert_inter_size": optional(config, "shared_expert_intermediate_size", 512),
        "shared_expert_gate": True,
        **expert_counts(
            config, optional(config, "num_experts", count), optional(config, "num_experts_per_tok", per_token)
        ),
    }


def _qwen3_5(config: HfConfig) -> ModelSpec:
    return _spec(config, _NAMES)


def _qwen3_5_moe(config: HfConfig) -> ModelSpec:
    return _spec(config, _NAMES, **_with_experts(config, 256, 8))


def _qwen3_next(config: HfConfig) -> ModelSpec:
    return _spec(
        config,
        NEXT_NAMES,
        renormalize_experts=optional(config, "norm_topk_prob", True),
        with_experts=qwen_layers(config),
        **_with_experts(config, 512, 10),
    )


_KEYS = """
    attention_bias full_attention_interval layer_types linear_conv_kernel_dim linear_key_head_dim linear_num_key_heads
    linear_num_value_heads linear_value_head_dim
"""
_MOE_KEYS = f"{_KEYS} moe_intermediate_size num_experts num_experts_per_tok shared_expert_intermediate_size"
# States are fp32 in any case.
_HARMLESS = "mamba_ssm_dtype mtp_num_hidden_layers mtp_use_dedicated_embeddings"
_ONLY = {"attn_output_gate": (True,), "mlp_only_layers": ([],)}

QWEN3_5 = family(
    "qwen3_5 qwen3_5_text", "Qwen3.5, 3.6 and 3.8", _qwen3_5, _KEYS, harmless=_HARMLESS, only=_ONLY, mtp=True
)
QWEN3_5_MOE = family(
    "qwen3_5_moe qwen3_5_moe_text",
    "Qwen3.5, 3.6 and 3.8 with experts",
    _qwen3_5_moe,
    _MOE_KEYS,
    harmless=_HARMLESS,
    only=_ONLY,
    mtp=True,
)
QWEN3_NEXT = family(
    "qwen3_next",
    "Qwen3-Next",
    _qwen3_next,
    f"{_MOE_KEYS} decoder_sparse_step mlp_only_layers norm_topk_prob",
    harmless="mamba_ssm_dtype mtp_num_hidden_layers",
    only={"attn_output_gate": (True,)},
    mtp=True,
)
