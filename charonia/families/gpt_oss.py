"""GPT-OSS: attention with sinks and windows in every second layer; experts with biases and a clamped SwiGLU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from charonia.errors import ModelError
from charonia.families.experts import expert_counts
from charonia.families.hf_config import activation, number, optional, required
from charonia.families.llama import attention_bias, llama_spec
from charonia.families.names import Names
from charonia.families.spec import HfConfig, ModelSpec, family
from charonia.families.windows import window_settings

NAMES = Names(router="mlp.router", router_bias="mlp.router.bias")

# Default of rope_parameters in transformers.
_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _describe(config: HfConfig) -> ModelSpec:
    config = {"attention_bias": True, "sliding_window": 128, **config}
    if not config.get("rope_parameters") and not config.get("rope_scaling"):
        config["rope_parameters"] = _ROPE
    per_token = optional(config, "num_experts_per_tok", 4)
    if optional(config, "experts_per_token", per_token) != per_token:
        raise ModelError(
            f"config.json: experts_per_token is {config['experts_per_token']}, but num_experts_per_tok is {per_token}: "
            "remove the wrong one"
        )
    experts: dict[str, Any] = {
        "expert_inter_size": required(config, "intermediate_size"),
        "expert_bias": True,
        "activation": activation(config, "hidden_act", supported={"silu": "clamped_swiglu"}),
        "swiglu_limit": number(config, "swiglu_limit", 7.0),
        "swiglu_alpha": number(config, "swiglu_alpha", 1.702),
        "router_bias": True,
        "router_logit_bias": True,
    }
    spec = llama_spec(
        config,
        NAMES,
        head_dim=64,
        norm_eps=1e-5,
        theta=150000.0,
        attention_sinks=True,
        **attention_bias(config),
        **experts,
        **expert_counts(config, optional(config, "num_local_experts", 128), per_token),
        **window_settings(config, has_window=lambda layer: layer % 2 == 0),
    )
    return replace(spec, interleaved_experts=True, end_tokens=("<|return|>", "<|call|>"))


_KEYS = """
    attention_bias experts_per_token layer_types num_experts_per_tok num_local_experts sliding_window swiglu_alpha
    swiglu_limit
"""

# initial_context_length repeats original_max_position_embeddings.
FAMILY = family("gpt_oss", "GPT-OSS", _describe, _KEYS, harmless="initial_context_length")
