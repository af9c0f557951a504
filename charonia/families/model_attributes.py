# Generated from definitions/model_attributes.toml by `make generate`; do not edit.
"""The properties of a model: the read-only keys of config.ini, in its order."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelAttributes:
    """Names and meanings are the same as in config.ini."""

    # name of the model for clients; any text
    model_name: str
    # llama, mistral, qwen2, gemma2, mixtral, ...; a supported family
    model_family: str
    # attention heads; >= 1
    head_num: int
    # heads of keys and values; >= 1
    kv_head_num: int
    # elements per head; >= 2
    size_per_head: int
    # width of the residual stream; >= 1
    hidden_units: int
    # width of the feed-forward layer; >= 1
    inter_size: int
    # decoder layers; >= 1
    num_layer: int
    # rows of the embedding; >= 1
    vocab_size: int
    # positions the model was trained for; >= 1
    max_position_embeddings: int
    # epsilon of the RMS norms; > 0
    norm_eps: float = 1e-06
    # q, k and v have biases
    attn_bias: bool = False
    # the attention's output has a bias
    attn_output_bias: bool = False
    # the feed-forward layer has biases
    mlp_bias: bool = False
    # the output layer is the embedding
    tie_word_embeddings: bool = False
    # token that begins a text; -1: none; >= -1
    start_id: int = -1
    # tokens that end a sequence; token ids separated by commas
    end_id: tuple[int, ...] = ()
    # rotated elements per head; 0: none; >= 0; all of size_per_head, or none
    rotary_embedding: int = 0
    # base of the rotary embedding; > 0
    rope_theta: float = 10000.0
    # kind of rotary scaling; default | linear | dynamic | llama3 | yarn | longrope | qwen; qwen: dynamic NTK as in the
    # code of Qwen 1
    rope_scaling_type: str = "default"
    # rotary scaling: factor; > 0
    rope_factor: float = 1.0
    # llama3 scaling: low_freq_factor; > 0
    rope_low_freq_factor: float = 1.0
    # llama3 scaling: high_freq_factor; > 0
    rope_high_freq_factor: float = 4.0
    # rotary scaling: positions of the model before scaling; >= 0
    rope_original_max_position_embeddings: int = 0
    # yarn: beta_fast; > 0
    rope_beta_fast: float = 32.0
    # yarn: beta_slow; > 0
    rope_beta_slow: float = 1.0
    # yarn: the ramp's bounds are integers
    rope_truncate: bool = True
    # yarn and longrope: factor of cosines and sines; 0: by formula; >= 0
    rope_attention_factor: float = 0.0
    # yarn: mscale; >= 0; 0: none
    rope_mscale: float = 0.0
    # yarn: mscale_all_dim; >= 0; 0: none
    rope_mscale_all_dim: float = 0.0
    # longrope: short_factor; numbers separated by commas; rotary_embedding / 2 numbers
    rope_short_factors: tuple[float, ...] = ()
    # longrope: long_factor; numbers separated by commas; rotary_embedding / 2 numbers
    rope_long_factors: tuple[float, ...] = ()
    # rotary base of the layers with a window; 0: same as other layers; >= 0; these layers have no rotary scaling (Gemma
    # 3)
    rope_local_theta: float = 0.0
    # layers with rotation (r) and without (n); empty: all r; letters r and n
    layer_rotary: str = ""
    # the rotation pairs elements 2i and 2i + 1, not i and i + rotary_embedding / 2; GLM, ERNIE, Cohere
    rotary_interleaved: bool = False
    # log-n attention scaling begins at this position; 0: none; >= 0; q at position p >= logn_length is scaled by
    # log_{logn_length}(p + 1)
    logn_length: int = 0
    # q at position p is multiplied by 1 + q_scale_beta ln(1 + floor(p / q_scale_length)); 0: none; >= 0; after the
    # rotation (Ministral 3)
    q_scale_beta: float = 0.0
    # number of positions with the same factor of q_scale_beta; >= 0; needed with q_scale_beta
    q_scale_length: int = 0
    # attention uses slopes (ALiBi) instead of a rotation; then rotary_embedding = 0
    alibi: bool = False
    # number of previous tokens that attention reads; 0: all; >= 0
    sliding_window: int = 0
    # layers with the window (s) and without (f); empty: all s; letters s and f
    layer_windows: str = ""
    # factor of q k; 0: 1 / sqrt(size_per_head); >= 0
    attention_scale: float = 0.0
    # soft cap of attention scores; 0: none; >= 0
    attention_soft_cap: float = 0.0
    # soft cap of logits; 0: none; >= 0
    logit_soft_cap: float = 0.0
    # heads of q and k are normalised; RMS norms, before the rotation
    qk_norm: bool = False
    # with qk_norm: one norm for all q heads of a token, and one for all its k heads; OLMo 2; the weights are [head_num
    # * size_per_head] and [kv_head_num * size_per_head]
    qk_norm_rows: bool = False
    # with qk_norm: the norms come after the rotation; Hunyuan
    qk_norm_after_rotary: bool = False
    # inputs of attention and feed-forward are normalised; 0: they read the residual stream itself; 0 needs post_norms =
    # 1 (OLMo 2, EXAONE 4)
    pre_norms: bool = True
    # norms multiply by 1 + weight; Gemma
    norm_unit_offset: bool = False
    # outputs of attention and feed-forward are normalised too; Gemma
    post_norms: bool = False
    # norms subtract the mean first; LayerNorm without bias (Cohere)
    layer_norm: bool = False
    # attention and feed-forward of a layer have the same normalised input; Cohere
    parallel_block: bool = False
    # activation of the feed-forward layer; silu | gelu_tanh
    activation: str = "silu"
    # factor of the embedding; > 0
    embedding_scale: float = 1.0
    # factor of the output of attention and feed-forward; > 0; Granite
    residual_multiplier: float = 1.0
    # factor of the logits, before the soft cap; > 0; Granite: 1 / logits_scaling; Cohere: logit_scale
    logits_scale: float = 1.0
    # rows of the output layer are scaled to length 1; Baichuan 2
    normalize_output: bool = False
    # experts of a feed-forward layer; 0: dense; >= 0
    num_experts: int = 0
    # experts per token; >= 0
    experts_per_token: int = 0
    # width of an expert; >= 0
    expert_inter_size: int = 0
    # weights of the chosen experts add up to 1
    renormalize_experts: bool = True
    # function of the router's logits; softmax | sigmoid
    router_score: str = "softmax"
    # the router has a bias for each expert; it is added to the scores that choose experts, but not to their weights
    router_bias: bool = False
    # groups of experts: the best groups are chosen first, then experts in them; 0: no groups; >= 0; a group's score is
    # the sum of its two best experts' scores
    router_groups: int = 0
    # groups whose experts can be chosen for a token; >= 0
    router_top_groups: int = 0
    # factor of the weights of the chosen experts; > 0
    router_scale: float = 1.0
    # with renormalize_experts: minimum divisor of the weights; >= 0
    router_norm_min: float = 0.0
    # the router's weight stays fp32 if it is fp32 in the files
    router_fp32: bool = False
    # width of the shared expert, which every token uses; 0: none; >= 0
    shared_expert_inter_size: int = 0
    # the shared expert's output is multiplied by a sigmoid
    shared_expert_gate: bool = False
    # layers with experts (m) and dense ones (d); empty: all m; letters m and d
    layer_experts: str = ""
    # type of most of the weights; bf16 | fp16 | fp32 | int4 | int8 | fp8 | mxfp4
    weight_type: str = "bf16"
    # type of activations and of weights that are not quantised; empty: weight_type;  | bf16 | fp16 | fp32
    data_type: str = ""
    # input features that share a scale of a quantised weight; 0: one scale per output feature, or not quantised; >= 0
    group_size: int = 0
    # default temperature of requests, from generation_config.json; >= 0
    default_temperature: float = 1.0
    # default top_k of requests, from generation_config.json; >= 0 (0: all tokens)
    default_top_k: int = 0
    # default top_p of requests, from generation_config.json; in (0, 1]
    default_top_p: float = 1.0
    # default min_p of requests, from generation_config.json; in [0, 1]
    default_min_p: float = 0.0
    # default repetition_penalty of requests, from generation_config.json; in [0.01, 100]
    default_repetition_penalty: float = 1.0
