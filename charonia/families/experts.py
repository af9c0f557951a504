"""Mixtures of experts: Mixtral, Qwen1.5-MoE and Qwen2-MoE, Qwen3-MoE, GLM-4.5 to 4.7, ERNIE 4.5."""

from __future__ import annotations

from typing import Any

from charonia.errors import ModelError
from charonia.families.hf_config import MOST_EXPERTS, number, optional, required
from charonia.families.llama import attention_bias, llama_spec
from charonia.families.names import Names
from charonia.families.qwen2 import WINDOW_KEYS
from charonia.families.spec import HfConfig, ModelSpec, family
from charonia.families.windows import switched_window, window_settings

MOST_GROUPS = 32  # of experts; the engine's limit
MOST_PREDICTING = 16

# The attributes of the routers of DeepSeek V3, GLM and Hunyuan 3.
SIGMOID_ROUTER: dict[str, Any] = {
    "router_score": "sigmoid",
    "router_bias": True,
    "router_norm_min": 1e-20,  # transformers adds this to the sum, which is equal for sums above 1e-13
    "router_fp32": True,
}
MIXTRAL_NAMES = Names(
    router="block_sparse_moe.gate",
    expert="block_sparse_moe.experts.{}.",
    expert_gate="w1",
    expert_up="w3",
    expert_down="w2",
)
GLM_NAMES = Names(shared="mlp.shared_experts.")
ERNIE_NAMES = Names(
    router_bias="mlp.moe_statics.e_score_correction_bias", router_bias_row=True, shared="mlp.shared_experts."
)


def expert_counts(config: HfConfig, count: int, per_token: int, key: str = "num_experts_per_tok") -> dict[str, Any]:
    layers = required(config, "num_hidden_layers")
    if count < 1:
        raise ModelError(f"config.json: the model has {count} experts; it must have at least 1")
    if count * layers > MOST_EXPERTS:
        raise ModelError(
            f"config.json: {count} experts in each of {layers} layers exceed the supported maximum of {MOST_EXPERTS} "
            "experts"
        )
    if not 1 <= per_token <= count:
        raise ModelError(f"config.json: {key} is {per_token}; it must be 1 to {count}, the experts")
    return {"num_experts": count, "experts_per_token": per_token}


def layers_with_experts(types: Any, layers: int) -> tuple[bool, ...]:
    """Return which layers have experts. types: mlp_layer_types of config.json. Raises ModelError."""
    if not isinstance(types, list) or len(types) != layers or any(one not in ("sparse", "dense") for one in types):
        raise ModelError(f"config.json: mlp_layer_types must list num_hidden_layers = {layers} times sparse or dense")
    return tuple(one == "sparse" for one in types)


def _mixtral(config: HfConfig) -> ModelSpec:
    return llama_spec(
        config,
        MIXTRAL_NAMES,
        norm_eps=1e-5,
        theta=1e6,
        expert_inter_size=required(config, "intermediate_size"),
        **expert_counts(config, optional(config, "num_local_experts", 8), optional(config, "num_experts_per_tok", 2)),
        **window_settings(config, layer_types=False),
    )


def _qwen3_moe(config: HfConfig, **own: Any) -> ModelSpec:
    count = optional(config, "num_experts", optional(config, "num_local_experts", 128))
    return llama_spec(
        config,
        **attention_bias(config),
        qk_norm=True,
        expert_inter_size=optional(config, "moe_intermediate_size", 768),
        renormalize_experts=optional(config, "norm_topk_prob", False),
        with_experts=qwen_layers(config),
        **expert_counts(config, count, optional(config, "num_experts_per_tok", 8)),
        **window_settings(switched_window(config, 4096), layer_types=False),
        **own,
    )


def _qwen3_vl_moe(config: HfConfig) -> ModelSpec:
    defaults = {"moe_intermediate_size": 1408, "num_local_experts": 60, "num_experts_per_tok": 4}
    return _qwen3_moe({**defaults, **config, "norm_topk_prob": True}, theta=5e5)


def _qwen2_moe(config: HfConfig) -> ModelSpec:
    first_without = optional(config, "max_window_layers", 28)
    return llama_spec(
        config,
        attn_bias=optional(config, "qkv_bias", True),
        expert_inter_size=optional(config, "moe_intermediate_size", 1408),
        renormalize_experts=optional(config, "norm_topk_prob", False),
        with_experts=qwen_layers(config),
        shared_expert_inter_size=optional(config, "shared_expert_intermediate_size", 5632),
        shared_expert_gate=True,
        **expert_counts(config, optional(config, "num_experts", 60), optional(config, "num_experts_per_tok", 4)),
        **window_settings(switched_window(config, 4096), has_window=lambda at: at % 2 == 0 and at < first_without),
    )


def _glm4_moe(config: HfConfig) -> ModelSpec:
    return _glm_like(config, norm_eps=1e-5, partial_rotary=0.5, mtp=True)


def _glm4v_moe(config: HfConfig) -> ModelSpec:
    """The text part of GLM-4.5V and GLM-4.6V."""
    return _glm_like({"attention_bias": True, **config}, norm_eps=1e-5, partial_rotary=0.5, mtp=True)


def _solar_open(config: HfConfig) -> ModelSpec:
    """GLM-4.5 without dense layers and without norms of q and k, with fully rotated heads."""
    config = {"intermediate_size": config.get("moe_intermediate_size", 1280), "moe_intermediate_size": 1280, **config}
    config = {**config, "first_k_dense_replace": 0}
    return _glm_like(config, norm_eps=1e-5, head_dim=128, theta=1e6, partial_rotary=1.0)


def _dots1(config: HfConfig) -> ModelSpec:
    """GLM-4.5 with norms on the heads of q and k, and with fully rotated heads."""
    defaults = {"first_k_dense_replace": 0, "norm_topk_prob": False, "n_shared_experts": 0, "sliding_window": 4096}
    config = {**defaults, **config, "use_qk_norm": True}
    first = optional(config, "max_window_layers", 62)
    return _glm_like(
        config,
        attn_output_bias=optional(config, "attention_bias", False),
        **window_settings(config, has_window=lambda layer: layer >= first),
    )


def _glm_like(config: HfConfig, **own: Any) -> ModelSpec:
    layers, dense = required(config, "num_hidden_layers"), optional(config, "first_k_dense_replace", 1)
    inter = optional(config, "moe_intermediate_size", 1408)
    count, per_token = optional(config, "n_routed_experts", 128), optional(config, "num_experts_per_tok", 8)
    return llama_spec(
        config,
        GLM_NAMES,
        ignored=predicting_layers(config),
        attn_bias=optional(config, "attention_bias", False),
        qk_norm=optional(config, "use_qk_norm", False),
        expert_inter_size=inter,
        renormalize_experts=optional(config, "norm_topk_prob", True),
        with_experts=[layer >= dense for layer in range(layers)],
        router_scale=number(config, "routed_scaling_factor", 1.0),
        **SIGMOID_ROUTER,
        shared_expert_inter_size=inter * optional(config, "n_shared_experts", 1),
        **expert_groups(config, count, per_token),
        **expert_counts(config, count, per_token),
        **own,
    )


def predicting_layers(config: HfConfig) -> tuple[str, ...]:
    """Return the name prefixes of the layers for multi-token prediction. At most the first one is used."""
    layers = required(config, "num_hidden_layers")
    count = optional(config, "num_nextn_predict_layers", optional(config, "num_mtp_layers", 1))
    more = range(layers, layers + min(max(1, count), MOST_PREDICTING))  # no model has more than a few
    return tuple(f"model.layers.{layer}." for layer in more)


def _mellum(config: HfConfig) -> ModelSpec:
    """Qwen3-MoE with windows in the layers that config.json lists, and a separate rotary base for them."""
    layers, types = required(config, "num_hidden_layers"), config.get("mlp_layer_types") or []
    config = {"sliding_window": 1024, "layer_types": ["full_attention"] * layers, **config}
    count = optional(config, "num_experts", optional(config, "num_local_experts", 64))
    rope: dict[str, Any] = {} if config.get("rope_parameters") else {"rope_local_theta": 1e4}
    return llama_spec(
        config,
        ignored=("mtp.",),
        head_dim=128,
        theta=5e5,
        per_layer_rope=True,
        **attention_bias(config),
        qk_norm=True,
        expert_inter_size=optional(config, "moe_intermediate_size", 896),
        renormalize_experts=optional(config, "norm_topk_prob", True),
        with_experts=layers_with_experts(types, layers) if types else (),
        **expert_counts(config, count, optional(config, "num_experts_per_tok", 8)),
        **window_settings(config),
        **rope,
    )


def _ernie4_5_moe(config: HfConfig) -> ModelSpec:
    layers, interval = required(config, "num_hidden_layers"), optional(config, "moe_layer_interval", 1)
    first, last = optional(config, "moe_layer_start_index", 1), optional(config, "moe_layer_end_index", -1)
    if interval < 1:
        raise ModelError(f"config.json: moe_layer_interval is {interval}; it must be at least 1")
    sparse = range(first, layers if last == -1 else last + 1)
    inter = optional(config, "moe_intermediate_size", 1536)
    return llama_spec(
        {**config, "tie_word_embeddings": optional(config, "tie_word_embeddings", True)},
        ERNIE_NAMES,
        ignored=("model.mtp_",),  # layers for multi-token prediction
        norm_eps=1e-5,
        theta=500000.0,
        rotary_interleaved=True,
        expert_inter_size=inter,
        with_experts=[layer in sparse and (layer + 1) % interval == 0 for layer in range(layers)],
        router_bias=True,
        router_norm_min=number(config, "moe_norm_min", 1e-12),
        router_fp32=True,
        shared_expert_inter_size=inter * optional(config, "moe_num_shared_experts", 2),
        **expert_counts(config, optional(config, "moe_num_experts", 64), optional(config, "moe_k", 6), "moe_k"),
    )


def qwen_layers(config: HfConfig) -> list[bool]:
    """Return which layers have experts."""
    step = optional(config, "decoder_sparse_step", 1)
    dense = config.get("mlp_only_layers") or []
    if step < 1 or not isinstance(dense, list):
        raise ModelError("config.json: decoder_sparse_step must be at least 1 and mlp_only_layers a list of layers")
    layers = range(required(config, "num_hidden_layers"))
    return [layer not in dense and (layer + 1) % step == 0 for layer in layers]


def expert_groups(config: HfConfig, count: int, per_token: int) -> dict[str, Any]:
    """Return the settings of expert groups, which work as in DeepSeek V3."""
    groups, top = optional(config, "n_group", 1), optional(config, "topk_group", 1)
    if groups == 1:
        return {}
    if not 1 < groups <= MOST_GROUPS or count % groups or count // groups < 2:
        raise ModelError(
            f"config.json: n_group is {groups}; it must be 1 to {MOST_GROUPS} and divide the {count} experts into "
            "groups of 2 or more"
        )
    if not 1 <= top <= groups or count // groups * top < per_token:
        raise ModelError(
            f"config.json: topk_group is {top}; it must be 1 to {groups} (n_group), and these groups must have the "
            f"{per_token} experts of a token"
        )
    return {"router_groups": groups, "router_top_groups": top}


_MIXTRAL_KEYS = "num_experts_per_tok num_local_experts sliding_window"
_QWEN2_MOE_KEYS = """
    decoder_sparse_step mlp_only_layers moe_intermediate_size norm_topk_prob num_experts num_experts_per_tok qkv_bias
    shared_expert_intermediate_size
"""
_GLM_KEYS = """
    attention_bias moe_intermediate_size n_group n_routed_experts n_shared_experts norm_topk_prob num_experts_per_tok
    routed_scaling_factor topk_group
"""
_GLM4_MOE_KEYS = f"{_GLM_KEYS} first_k_dense_replace num_mtp_layers num_nextn_predict_layers use_qk_norm"
_ERNIE4_5_MOE_KEYS = """
    moe_intermediate_size moe_k moe_layer_end_index moe_layer_interval moe_layer_start_index moe_norm_min
    moe_num_experts moe_num_shared_experts
"""
_QWEN3_VL_MOE_KEYS = """
    attention_bias decoder_sparse_step mlp_only_layers moe_intermediate_size num_experts num_experts_per_tok
    num_local_experts sliding_window use_sliding_window
"""
_QWEN3_MOE_KEYS = f"{_QWEN3_VL_MOE_KEYS} norm_topk_prob"

MIXTRAL = family("mixtral", "Mixtral", _mixtral, _MIXTRAL_KEYS)
QWEN2_MOE = family("qwen2_moe", "Qwen1.5-MoE and Qwen2-MoE", _qwen2_moe, f"{_QWEN2_MOE_KEYS} {WINDOW_KEYS}")
QWEN3_MOE = family("qwen3_moe", "Qwen3-MoE", _qwen3_moe, _QWEN3_MOE_KEYS, only={"use_qk_norm": (True,)})
QWEN3_VL_MOE_TEXT = family(
    "qwen3_moe qwen3_vl_moe_text",
    "the text part of Qwen3-VL-MoE",
    _qwen3_vl_moe,
    _QWEN3_VL_MOE_KEYS,
    harmless="max_window_layers norm_topk_prob",
)
GLM4V_MOE_TEXT = family(
    "glm4_moe glm4v_moe_text",
    "the text part of GLM-4.5V",
    _glm4v_moe,
    _GLM4_MOE_KEYS,
    harmless="image_token_id video_token_id",
    mtp=True,
)
SOLAR_OPEN = family("solar_open", "Solar Open", _solar_open, _GLM_KEYS, only={"first_k_dense_replace": (0,)})
DOTS1 = family(
    "dots1",
    "dots.llm1",
    _dots1,
    f"{_GLM_KEYS} first_k_dense_replace layer_types max_window_layers sliding_window",
    only={"scoring_func": ("noaux_tc", "sigmoid"), "topk_method": ("noaux_tc",)},
)
_MELLUM_KEYS = """
    attention_bias layer_types mlp_layer_types moe_intermediate_size norm_topk_prob num_experts num_experts_per_tok
    num_local_experts sliding_window
"""
MELLUM = family(
    "mellum",
    "Mellum 2",
    _mellum,
    _MELLUM_KEYS,
    harmless="mtp_layer_types mtp_mlp_layer_types num_mtp_layers num_nextn_predict_layers",
)
GLM4_MOE = family("glm4_moe", "GLM-4.5, 4.6 and 4.7", _glm4_moe, _GLM4_MOE_KEYS, mtp=True)
ERNIE4_5_MOE = family(
    "ernie4_5_moe",
    "ERNIE 4.5 with experts",
    _ernie4_5_moe,
    _ERNIE4_5_MOE_KEYS,
    harmless="is_quantized moe_capacity num_nextn_predict_layers",
    only={"moe_gate": ("topk",), "moe_use_aux_free": (True,), "use_rmsnorm": (True,)},
)
