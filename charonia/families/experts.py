"""Mixtures of experts: Mixtral and Qwen3-MoE."""

from __future__ import annotations

from typing import Any

from charonia.errors import ModelError
from charonia.families.config_keys import words
from charonia.families.hf_config import MOST_EXPERTS, optional, required
from charonia.families.llama import llama_config, llama_spec
from charonia.families.names import LLAMA_NAMES, Names
from charonia.families.spec import Family, HfConfig, ModelSpec
from charonia.families.windows import switched_window, window_settings

MIXTRAL_NAMES = Names(
    router="block_sparse_moe.gate",
    expert="block_sparse_moe.experts.{}.",
    expert_gate="w1",
    expert_up="w3",
    expert_down="w2",
)


def _experts(config: HfConfig, count: int, per_token: int) -> dict[str, Any]:
    layers = required(config, "num_hidden_layers")
    if count * layers > MOST_EXPERTS:
        raise ModelError(
            f"config.json: {count} experts in each of {layers} layers are more than {MOST_EXPERTS}, the most that are "
            "supported"
        )
    if not 1 <= per_token <= count:
        raise ModelError(f"config.json: num_experts_per_tok is {per_token}; it must be 1 to {count}, the experts")
    return {"num_experts": count, "experts_per_token": per_token}


def _mixtral(config: HfConfig, model_name: str) -> ModelSpec:
    model = llama_config(
        config,
        model_name,
        "mixtral",
        norm_eps=1e-5,
        theta=1e6,
        expert_inter_size=required(config, "intermediate_size"),
        **_experts(config, optional(config, "num_local_experts", 8), optional(config, "num_experts_per_tok", 2)),
        **window_settings(config, layer_types=False),
    )
    return llama_spec(model, MIXTRAL_NAMES)


def _qwen3_moe(config: HfConfig, model_name: str) -> ModelSpec:
    count = optional(config, "num_experts", optional(config, "num_local_experts", 128))
    step = optional(config, "decoder_sparse_step", 1)
    dense = config.get("mlp_only_layers") or []
    if step < 1 or not isinstance(dense, list):
        raise ModelError("config.json: decoder_sparse_step must be at least 1 and mlp_only_layers a list of layers")
    layers = "".join(
        "m" if layer not in dense and (layer + 1) % step == 0 else "d"
        for layer in range(required(config, "num_hidden_layers"))
    )
    bias = optional(config, "attention_bias", False)
    model = llama_config(
        config,
        model_name,
        "qwen3_moe",
        attn_bias=bias,
        attn_output_bias=bias,
        qk_norm=True,
        expert_inter_size=optional(config, "moe_intermediate_size", 768),
        renormalize_experts=optional(config, "norm_topk_prob", False),
        layer_experts=layers if "d" in layers else "",
        **_experts(config, count, optional(config, "num_experts_per_tok", 8)),
        **window_settings(switched_window(config, 4096), layer_types=False),
    )
    return llama_spec(model, LLAMA_NAMES)


_MIXTRAL_KEYS = "num_experts_per_tok num_local_experts sliding_window"
_QWEN3_MOE_KEYS = """
    attention_bias decoder_sparse_step mlp_only_layers moe_intermediate_size norm_topk_prob num_experts
    num_experts_per_tok num_local_experts sliding_window use_sliding_window
"""

MIXTRAL = Family("mixtral", ("mixtral",), "Mixtral", _mixtral, keys=words(_MIXTRAL_KEYS))
QWEN3_MOE = Family(
    "qwen3_moe",
    ("qwen3_moe",),
    "Qwen3-MoE",
    _qwen3_moe,
    keys=words(_QWEN3_MOE_KEYS),
    only={"use_qk_norm": (True,)},
)
