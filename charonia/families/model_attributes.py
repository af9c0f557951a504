# Generated from definitions/model_attributes.toml by `make generate`; do not edit.
"""The properties of a model: the read-only keys of config.ini, in its order."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelAttributes:
    """Names are those of config.ini. definitions/model_attributes.toml describes them."""

    model_name: str
    model_family: str
    head_num: int
    kv_head_num: int
    size_per_head: int
    hidden_units: int
    inter_size: int
    num_layer: int
    vocab_size: int
    max_position_embeddings: int
    norm_eps: float = 1e-06
    attn_bias: bool = False
    attn_output_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    start_id: int = -1
    end_id: tuple[int, ...] = ()
    rotary_embedding: int = 0
    rope_theta: float = 10000.0
    rope_scaling_type: str = "default"
    rope_factor: float = 1.0
    rope_low_freq_factor: float = 1.0
    rope_high_freq_factor: float = 4.0
    rope_original_max_position_embeddings: int = 0
    rope_beta_fast: float = 32.0
    rope_beta_slow: float = 1.0
    rope_truncate: bool = True
    rope_attention_factor: float = 0.0
    rope_mscale: float = 0.0
    rope_mscale_all_dim: float = 0.0
    rope_short_factors: tuple[float, ...] = ()
    rope_long_factors: tuple[float, ...] = ()
    rope_local_theta: float = 0.0
    rope_local_embedding: int = 0
    rope_turned: int = 0
    rotary_interleaved: bool = False
    logn_length: int = 0
    q_scale_beta: float = 0.0
    q_scale_length: int = 0
    alibi: bool = False
    attention_scale: float = 0.0
    attention_soft_cap: float = 0.0
    latent_size: int = 0
    q_latent_size: int = 0
    value_size_per_head: int = 0
    attention_sinks: bool = False
    kv_scales: str = "none"
    attention_gate: bool = False
    delta_k_heads: int = 0
    delta_v_heads: int = 0
    delta_k_dim: int = 0
    delta_v_dim: int = 0
    delta_tiled: bool = False
    delta_decays: bool = False
    conv_kernel: int = 0
    conv_bias: bool = False
    logit_soft_cap: float = 0.0
    qk_norm: bool = False
    qk_norm_rows: bool = False
    qk_norm_after_rotary: bool = False
    v_norm: bool = False
    pre_norms: bool = True
    norm_unit_offset: bool = False
    post_norms: bool = False
    layer_norm: bool = False
    parallel_block: bool = False
    activation: str = "silu"
    swiglu_limit: float = 7.0
    swiglu_alpha: float = 1.702
    embedding_scale: float = 1.0
    residual_multiplier: float = 1.0
    layer_scalars: bool = False
    per_layer_embedding: int = 0
    per_layer_vocab_size: int = 0
    logits_scale: float = 1.0
    normalize_output: bool = False
    num_experts: int = 0
    experts_per_token: int = 0
    expert_inter_size: int = 0
    expert_bias: bool = False
    renormalize_experts: bool = True
    router_score: str = "softmax"
    router_bias: bool = False
    router_logit_bias: bool = False
    router_groups: int = 0
    router_top_groups: int = 0
    router_scale: float = 1.0
    router_norm_min: float = 0.0
    router_fp32: bool = False
    shared_expert_inter_size: int = 0
    shared_expert_gate: bool = False
    expert_norms: bool = False
    expert_scales: bool = False
    model_task: str = "generate"
    pooling: str = "last"
    normalize_embedding: bool = True
    score_labels: int = 0
    score_sigmoid: bool = True
    weight_type: str = "bf16"
    data_type: str = ""
    group_size: int = 0
    target_hidden_units: int = 0
    target_model: str = ""
    target_layers: tuple[int, ...] = ()
    draft_vocab_size: int = 0
    norm_before_residual: bool = False
    fused_norm: str = "none"
    norm_output: bool = False
    default_temperature: float = 1.0
    default_top_k: int = 0
    default_top_p: float = 1.0
    default_min_p: float = 0.0
    default_repetition_penalty: float = 1.0
