"""MiniMax M2: half of each head is rotated; one norm covers all q heads, and one all k heads.

Experts are chosen with sigmoids and a bias.
"""

from __future__ import annotations

from dataclasses import replace

from charonia.families.experts import MIXTRAL_NAMES, expert_counts
from charonia.families.hf_config import optional, required
from charonia.families.llama import head_size, llama_spec
from charonia.families.spec import HfConfig, ModelSpec, family

_BIAS = "block_sparse_moe.e_score_correction_bias"


def _describe(config: HfConfig) -> ModelSpec:
    if config.get("rotary_dim") is not None:
        # Released files have the size of the rotated part in elements.
        config = {"partial_rotary_factor": required(config, "rotary_dim") / head_size(config, 128), **config}
    return llama_spec(
        config,
        replace(MIXTRAL_NAMES, router_bias=_BIAS),
        head_dim=128,
        theta=5e6,
        partial_rotary=1.0,
        qk_norm=True,
        qk_norm_rows=True,
        expert_inter_size=required(config, "intermediate_size"),
        router_score="sigmoid",
        router_bias=True,
        **expert_counts(config, optional(config, "num_local_experts", 256), optional(config, "num_experts_per_tok", 8)),
    )


FAMILY = family(
    "minimax_m2",
    "MiniMax M2",
    _describe,
    "num_experts_per_tok num_local_experts rotary_dim",
    harmless="mtp_transformer_layers num_mtp_modules shared_moe_mode use_mtp",
    only={
        "attn_type_list": lambda value: isinstance(value, list) and all(one == 1 for one in value),
        "qk_norm_type": ("per_layer",),
        "scoring_func": ("sigmoid",),
        "shared_intermediate_size": (0,),
        "use_qk_norm": (True,),
        "use_routing_bias": (True,),
    },
)
