"""Keys in config.json of released models: each model is described, and no key gets a note.

The tables have the keys in addition to the ordinary ones (ORDINARY), with the relevant values. The sizes are small.
"""

from __future__ import annotations

from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from charonia.errors import UnsupportedError
from charonia.families import COMPOSITES, FAMILIES, describe

Keys = dict[str, Any]

ORDINARY: Keys = {
    "architectures": ["AForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 64,
    "initializer_range": 0.02,
    "intermediate_size": 160,
    "max_position_embeddings": 4096,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.57.1",
    "use_cache": True,
    "vocab_size": 320,
}
# Everything that PretrainedConfig of transformers 4.30 to 4.57 can write for any model, with its defaults.
TRANSFORMERS_4: Keys = {
    "_attn_implementation_autoset": True,
    "_commit_hash": None,
    "_name_or_path": "org/model",
    "add_cross_attention": False,
    "bad_words_ids": None,
    "begin_suppress_tokens": None,
    "chunk_size_feed_forward": 0,
    "cross_attention_hidden_size": None,
    "decoder_start_token_id": None,
    "diversity_penalty": 0.0,
    "do_sample": False,
    "early_stopping": False,
    "encoder_no_repeat_ngram_size": 0,
    "exponential_decay_length_penalty": None,
    "finetuning_task": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "id2label": {"0": "LABEL_0", "1": "LABEL_1"},
    "is_decoder": False,
    "is_encoder_decoder": False,
    "label2id": {"LABEL_0": 0, "LABEL_1": 1},
    "length_penalty": 1.0,
    "max_length": 20,
    "min_length": 0,
    "name_or_path": "org/model",
    "no_repeat_ngram_size": 0,
    "num_beam_groups": 1,
    "num_beams": 1,
    "num_return_sequences": 1,
    "output_attentions": False,
    "output_hidden_states": False,
    "output_scores": False,
    "prefix": None,
    "problem_type": None,
    "pruned_heads": {},
    "remove_invalid_values": False,
    "repetition_penalty": 1.0,
    "return_dict": True,
    "return_dict_in_generate": False,
    "sep_token_id": None,
    "suppress_tokens": None,
    "task_specific_params": None,
    "temperature": 1.0,
    "tf_legacy_loss": False,
    "tie_encoder_decoder": False,
    "tokenizer_class": None,
    "top_k": 50,
    "top_p": 1.0,
    "torchscript": False,
    "typical_p": 1.0,
    "use_bfloat16": False,
    "xla_device": None,
}
FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
FP8_STATIC = {"activation_scheme": "static", "dequantize": False, "quant_method": "fp8", "weight_block_size": None}
AWQ = {"bits": 4, "group_size": 128, "quant_method": "awq", "version": "gemm", "zero_point": True}
LLAMA3 = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 1024,
    "rope_type": "llama3",
}
LONGROPE = {"long_factor": [1.0, 2.0], "short_factor": [1.0, 1.0]}
LLAMA: Keys = {"attention_bias": False, "mlp_bias": False, "pretraining_tp": 1, "rope_scaling": None}
QWEN: Keys = {"max_window_layers": 2, "sliding_window": None, "use_sliding_window": False}
QWEN3: Keys = {**QWEN, "attention_bias": False, "head_dim": 128, "rope_scaling": None}
QWEN3_MOE: Keys = {
    **QWEN3,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
}
BAICHUAN: Keys = {
    "_from_model_config": True,
    "auto_map": {"AutoConfig": "configuration_baichuan.BaichuanConfig"},
    "num_key_value_heads": None,
}
INTERNLM2: Keys = {
    "attn_implementation": "eager",
    "auto_map": {"AutoConfig": "configuration_internlm2.InternLM2Config"},
    "bias": False,
    "pretraining_tp": 1,
    "rope_scaling": {"factor": 2.0, "type": "dynamic"},
}
QWEN1: Keys = {
    "attn_dropout_prob": 0.0,
    "auto_map": {"AutoConfig": "configuration_qwen.QWenConfig"},
    "bf16": True,
    "emb_dropout_prob": 0.0,
    "fp16": False,
    "fp32": False,
    "kv_channels": 16,
    "layer_norm_epsilon": 1e-6,
    "no_bias": True,
    "num_key_value_heads": None,
    "onnx_safe": None,
    "rms_norm_eps": None,
    "rope_theta": None,
    "rotary_emb_base": 10000,
    "rotary_pct": 1.0,
    "scale_attn_weights": True,
    "seq_length": 2048,
    "softmax_in_fp32": False,
    "tokenizer_class": "QWenTokenizer",
    "use_cache_kernel": False,
    "use_cache_quantization": False,
    "use_dynamic_ntk": True,
    "use_flash_attn": "auto",
    "use_logn_attn": True,
}
PHI3: Keys = {
    "attention_bias": False,
    "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"},
    "embd_pdrop": 0.0,
    "original_max_position_embeddings": 4096,
    "resid_pdrop": 0.0,
    "rope_scaling": None,
}
PHI3_128K: Keys = {**PHI3, "max_position_embeddings": 131072}
GEMMA2: Keys = {
    "attention_bias": False,
    "attn_logit_softcapping": 50.0,
    "cache_implementation": "hybrid",
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
GEMMA3: Keys = {
    **GEMMA2,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "sliding_window": 512,
}
MIXTRAL: Keys = {
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
}
WINDOWS = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]
FULL = ["full_attention"] * 4

# The publisher's name of the model: its model_type, and its keys in addition to ORDINARY.
RELEASED: dict[str, tuple[str, Keys]] = {
    "Llama 2": ("llama", {**LLAMA, "_name_or_path": "meta-llama/Llama-2-13b-hf"}),
    "Llama 3.1": ("llama", {**LLAMA, "eos_token_id": [3, 4, 5], "rope_scaling": LLAMA3}),
    "Llama 3.1, by Unsloth": (
        "llama",
        {**LLAMA, "rope_scaling": LLAMA3, "unsloth_fixed": True, "unsloth_version": "2"},
    ),
    "Llama 3.1 FP8": ("llama", {**LLAMA, "compression_config": {}, "rope_scaling": LLAMA3}),
    "LLaMA": ("llama", {"max_sequence_length": 2048, "pad_token_id": -1}),
    "Vicuna 1.5 16k": (
        "llama",
        {**LLAMA, "max_sequence_length": 16384, "rope_scaling": {"factor": 4.0, "type": "linear"}},
    ),
    "Yarn Llama 2": (
        "llama",
        {
            **LLAMA,
            "rope_scaling": {
                "factor": 16.0,
                "finetuned": True,
                "original_max_position_embeddings": 256,
                "type": "yarn",
            },
        },
    ),
    "ALLaM": ("llama", {**LLAMA, "head_dim": 16, "internal_version": "7b-alpha-v2.33.0.30"}),
    "Granite Code 8B": ("llama", {**LLAMA, "attention_bias": True, "mlp_bias": True}),
    "Falcon 3": ("llama", {**LLAMA, "head_dim": 256, "rope_theta": 1000042}),
    "SmolLM2": (
        "llama",
        {
            **LLAMA,
            "is_llama_config": True,
            "rope_interleaved": False,
            "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
        },
    ),
    "a Qwen2.5 with Llama's names": ("llama", {**LLAMA, **QWEN, "attention_bias": True, "sliding_window": 131072}),
    "IQuest-Coder": ("iquestcoder", {**QWEN, "attention_bias": False, "clip_qkv": None, "mlp_bias": False}),
    "Seed-OSS": (
        "seed_oss",
        {
            "attention_bias": True,
            "attention_out_bias": False,
            "head_dim": 128,
            "mlp_bias": False,
            "residual_dropout": 0.1,
            "rope_scaling": {"rope_type": "default"},
        },
    ),
    "CWM": ("cwm", {"head_dim": 128, "layer_types": WINDOWS, "rope_scaling": LLAMA3, "sliding_window": 8192}),
    "Mistral 7B 0.1": ("mistral", {"sliding_window": 4096}),
    "Mistral 7B 0.3": ("mistral", {**TRANSFORMERS_4, "sliding_window": None}),
    "Mistral Nemo": ("mistral", {"head_dim": 128, "sliding_window": None}),
    "Ministral 8B": ("mistral", {"head_dim": 128, "layer_types": WINDOWS, "sliding_window": 32768}),
    "Mixtral": ("mixtral", MIXTRAL),
    "Mixtral AWQ": ("mixtral", {**MIXTRAL, "quantization_config": AWQ, "router_jitter_noise": 0.0}),
    "InternLM 7B": (
        "internlm",
        {
            "auto_map": {"AutoConfig": "configuration_internlm.InternLMConfig"},
            "bias": True,
            "rotary": {"base": 10000, "type": "dynamic"},
        },
    ),
    "InternLM2": ("internlm2", INTERNLM2),
    "InternLM2 in InternVL 2": ("internlm2", {**TRANSFORMERS_4, **INTERNLM2}),
    "InternLM2 Reward": ("internlm2", {**INTERNLM2, "reward_token_id": 92527}),
    "InternLM3": (
        "internlm3",
        {"bias": False, "head_dim": 128, "qkv_bias": False, "rope_scaling": {"factor": 6.0, "rope_type": "dynamic"}},
    ),
    "Baichuan 7B": ("baichuan", {"auto_map": {}, "num_key_value_heads": None}),
    "Baichuan 13B": (
        "baichuan",
        {**BAICHUAN, "gradient_checkpointing": False, "max_position_embeddings": None, "model_max_length": 4096},
    ),
    "Baichuan 2 7B": (
        "baichuan",
        {**BAICHUAN, "model_max_length": 4096, "tokenizer_class": "BaichuanTokenizer", "z_loss_weight": 0},
    ),
    "Yi 34B, first files": ("Yi", {"auto_map": {"AutoConfig": "configuration_yi.YiConfig"}}),
    "Qwen 7B": ("qwen", QWEN1),
    "Qwen 7B, first files": ("qwen", {**QWEN1, "tokenizer_type": "QWenTokenizer"}),
    "Qwen 72B": ("qwen", {**QWEN1, "seq_length": 32768, "use_dynamic_ntk": False, "use_logn_attn": False}),
    "Qwen2.5": ("qwen2", {**QWEN, "sliding_window": 131072}),
    "Qwen2.5 AWQ": ("qwen2", {**QWEN, "quantization_config": AWQ, "sliding_window": 131072}),
    "DeepSeek R1 Distill Qwen": ("qwen2", {**QWEN, "sliding_window": 131072, "use_mrope": False}),
    "Qwen2, with names of its biases": ("qwen2", {**QWEN, "attention_bias": True, "qkv_bias": True}),
    "Qwen2.5 of transformers 4.53": ("qwen2", {**QWEN, "layer_types": FULL}),
    "Qwen3": ("qwen3", QWEN3),
    "Qwen3 FP8": ("qwen3", {**QWEN3, "quantization_config": FP8}),
    "Qwen3 30B A3B": ("qwen3_moe", QWEN3_MOE),
    "Qwen3 Coder 480B": (
        "qwen3_moe",
        {**QWEN3_MOE, "qkv_bias": False, "shared_expert_intermediate_size": 0, "use_qk_norm": True},
    ),
    "Phi-3 mini 4k": ("phi3", {**PHI3, "sliding_window": 2047}),
    "Phi-3 mini 128k": (
        "phi3",
        {**PHI3_128K, "head_dim": 4, "rope_scaling": {**LONGROPE, "type": "longrope"}, "sliding_window": 262144},
    ),
    "Phi-4": ("phi3", {**PHI3, "auto_map": None, "sliding_window": None}),
    "Phi-4 mini": (
        "phi3",
        {
            **PHI3_128K,
            "full_attn_mod": 1,
            "head_dim": 8,
            "interpolate_factor": 1,
            "lm_head_bias": False,
            "mlp_bias": False,
            "partial_rotary_factor": 0.5,
            "rope_scaling": {**LONGROPE, "type": "longrope"},
            "sliding_window": 262144,
        },
    ),
    "Gemma 7B": ("gemma", {"attention_bias": False, "head_dim": 256, "hidden_act": "gelu", "hidden_activation": None}),
    "Gemma 2 2B": ("gemma2", GEMMA2),
    "Gemma 2 9B": ("gemma2", {**GEMMA2, "sliding_window_size": 4096}),
    "Gemma 3 1B": ("gemma3_text", {**GEMMA3, "sliding_window_pattern": 6}),
    "Gemma 3 270M": (
        "gemma3_text",
        {**GEMMA3, "_sliding_window_pattern": 6, "layer_types": WINDOWS, "use_bidirectional_attention": False},
    ),
    "VaultGemma": ("vaultgemma", {**GEMMA2, "layer_types": WINDOWS}),
}

HUNYUAN: Keys = {
    "add_classification_head": False,
    "attention_bias": False,
    "attention_head_dim": 128,
    "cla_share_factor": 2,
    "class_num": 0,
    "dense_list": [4096, 0],
    "eod_token_id": 3,
    "head_dim": 128,
    "im_end_id": 5,
    "im_newline_id": 11,
    "im_start_id": 4,
    "mask_init_id": 12,
    "mlp_bias": False,
    "norm_type": "rms",
    "org_vocab_size": 320,
    "pad_id": 9,
    "pool_type": "last",
    "pretraining_tp": 1,
    "rope_scaling": {
        "alpha": 1000.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "type": "dynamic",
    },
    "rope_theta": 10000.0,
    "sep_token_id": 8,
    "text_end_id": 7,
    "text_start_id": 6,
    "tie_word_embeddings": True,
    "use_cla": False,
    "use_qk_norm": True,
    "use_rotary_pos_emb": True,
}
HUNYUAN_A13B: Keys = {
    **HUNYUAN,
    "moe_drop_tokens": False,
    "moe_intermediate_size": [160] * 4,
    "moe_layer_num_skipped": 0,
    "moe_random_routing_dropped_token": False,
    "moe_topk": [2] * 4,
    "norm_topk_prob": True,
    "num_experts": 8,
    "num_shared_expert": [1] * 4,
    "routed_scaling_factor": 1.0,
    "use_mixed_mlp_moe": True,
}
GLM: Keys = {"attention_bias": True, "head_dim": 128, "partial_rotary_factor": 0.5, "rope_theta": 10000.0}
GLM4_MOE: Keys = {
    **GLM,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 2,
    "num_nextn_predict_layers": 1,
    "rope_scaling": None,
    "routed_scaling_factor": 2.5,
    "topk_group": 1,
}
MINIMAX: Keys = {
    "attn_type_list": [1, 1, 1, 1],
    "auto_map": {"AutoConfig": "configuration_minimax_m2.MiniMaxM2Config"},
    "head_dim": 128,
    "mtp_transformer_layers": 1,
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "num_mtp_modules": 3,
    "output_router_logits": False,
    "qk_norm_type": "per_layer",
    "quantization_config": {**FP8, "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"]},
    "rotary_dim": 64,
    "router_aux_loss_coef": 0.001,
    "router_jitter_noise": 0.0,
    "scoring_func": "sigmoid",
    "shared_intermediate_size": 0,
    "sliding_window": None,
    "use_mtp": True,
    "use_qk_norm": True,
    "use_routing_bias": True,
}
ERNIE_MOE: Keys = {
    "is_quantized": False,
    "moe_capacity": [64, 64, 64],
    "moe_gate": "topk",
    "moe_intermediate_size": 32,
    "moe_k": 2,
    "moe_layer_end_index": 3,
    "moe_layer_interval": 1,
    "moe_layer_start_index": 1,
    "moe_num_experts": 8,
    "moe_num_shared_experts": 2,
    "moe_use_aux_free": True,
    "num_nextn_predict_layers": 1,
    "use_bias": False,
    "use_rmsnorm": True,
}
YARN_MISTRAL: Keys = {
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "factor": 4.0,
    "llama_4_scaling_beta": 0.1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 1024,
    "rope_theta": 1e6,
    "rope_type": "yarn",
    "type": "yarn",
}
OLMO3_YARN: Keys = {
    "attention_factor": 1.2079441541679836,
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 8.0,
    "original_max_position_embeddings": 512,
    "rope_type": "yarn",
}
QWEN2_MOE: Keys = {
    **QWEN,
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 32,
    "norm_topk_prob": False,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 64,
    "sliding_window": 32768,
}
# The same for types that may be unsupported.
RELEASED_LATER: dict[str, tuple[str, Keys]] = {
    "Devstral 2 123B": (
        "ministral3",
        {
            "dtype": "bfloat16",
            "head_dim": 128,
            "quantization_config": FP8_STATIC,
            "rope_parameters": {**YARN_MISTRAL, "llama_4_scaling_beta": 0.0, "mscale_all_dim": 0.0},
            "rope_theta": None,
            "sliding_window": None,
        },
    ),
    "Ministral 3": (
        "ministral3",
        {"head_dim": 128, "rope_parameters": YARN_MISTRAL, "rope_theta": None, "sliding_window": None},
    ),
    "GLM-4 9B Chat HF": ("glm", {**GLM, "eos_token_id": [3, 4, 5]}),
    "GLM-4 32B 0414": ("glm4", {**GLM, "attention_bias": False}),
    "ERNIE 4.5 0.3B PT": (
        "ernie4_5",
        {"auto_map": {}, "head_dim": 128, "tie_word_embeddings": True, "use_bias": False},
    ),
    "ERNIE 4.5 21B A3B PT": ("ernie4_5_moe", ERNIE_MOE),
    "SmolLM3": (
        "smollm3",
        {
            **QWEN,
            "attention_bias": False,
            "layer_types": FULL,
            "max_window_layers": 28,
            "mlp_bias": False,
            "no_rope_layer_interval": 4,
            "no_rope_layers": [1, 1, 1, 0],
            "pretraining_tp": 2,
            "rope_scaling": None,
            "tie_word_embeddings": True,
        },
    ),
    "Granite 3.3": (
        "granite",
        {
            **LLAMA,
            "attention_multiplier": 0.0078125,
            "embedding_multiplier": 12.0,
            "logits_scaling": 16.0,
            "residual_multiplier": 0.22,
            "tie_word_embeddings": True,
        },
    ),
    "Helium 1 preview": (
        "helium",
        {**LLAMA, "head_dim": 128, "num_key_value_heads": 4, "rms_norm_eps": 1e-8, "rope_theta": 1e5},
    ),
    "OLMo 2": ("olmo2", {"attention_bias": False, "num_key_value_heads": 4, "rope_scaling": None}),
    "OLMo 3.1": (
        "olmo3",
        {"attention_bias": False, "layer_types": WINDOWS, "rope_scaling": OLMO3_YARN, "sliding_window": 4096},
    ),
    "EXAONE 4.0 32B": (
        "exaone4",
        {
            "head_dim": 128,
            "layer_types": WINDOWS,
            "rope_scaling": LLAMA3,
            "sliding_window": 4096,
            "sliding_window_pattern": "LLLG",
        },
    ),
    "EXAONE 4.0 1.2B": (
        "exaone4",
        {
            "head_dim": 64,
            "layer_types": FULL,
            "rope_scaling": LLAMA3,
            "sliding_window": None,
            "sliding_window_pattern": None,
            "tie_word_embeddings": True,
        },
    ),
    "Hunyuan 7B": ("hunyuan_v1_dense", HUNYUAN),
    "Hunyuan A13B": ("hunyuan_v1_moe", HUNYUAN_A13B),
    "Command R7B": (
        "cohere2",
        {
            "attention_bias": False,
            "cache_implementation": "hybrid",
            "head_dim": 128,
            "layer_norm_eps": 1e-5,
            "layer_switch": 4,
            "logit_scale": 0.25,
            "order_of_interleaved_layers": "local_attn_first",
            "position_embedding_type": "rope_gptj",
            "rms_norm_eps": None,
            "rope_scaling": None,
            "rotary_pct": 1.0,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            "tie_word_embeddings": None,
            "use_embedding_sharing": True,
            "use_gated_activation": True,
            "use_parallel_block": True,
            "use_parallel_embedding": True,
        },
    ),
    "GLM-4.6": ("glm4_moe", {**GLM4_MOE, "eos_token_id": [3, 4, 5], "use_qk_norm": True}),
    "GLM-4.5 Air": ("glm4_moe", {**GLM4_MOE, "use_qk_norm": False}),
    "Qwen1.5 MoE": ("qwen2_moe", QWEN2_MOE),
    "MiniMax M2": ("minimax_m2", MINIMAX),
}
NOT_YET: set[str] = set()
# Types without an entry here: the text parts of models with images, and models without public files.
NO_DATA = {
    "internvl_chat",
    "dots1",
    "glm4v_moe",
    "glm4v_moe_text",
    "hy_v3",
    "hyperclovax",
    "hyperclovax_vision_v2",
    "mellum",
    "solar_open",
    "glm46v",
    "glm4v",
    "glm4v_text",
    "idefics3",
    "ministral",
    "qwen2_5_vl_text",
    "qwen2_vl_text",
    "qwen3_vl_moe_text",
    "qwen3_vl_text",
    "yi",
}

TEXT: Keys = {key: value for key, value in ORDINARY.items() if key not in ("bos_token_id", "eos_token_id")}
OUTER: Keys = {"architectures": ["A"], "torch_dtype": "bfloat16", "transformers_version": "4.57.1"}
VISION: Keys = {"hidden_size": 32, "model_type": "a_vision_model", "num_hidden_layers": 2}
QWEN_TOKENS: Keys = {"image_token_id": 5, "video_token_id": 6, "vision_end_token_id": 7, "vision_start_token_id": 8}
MROPE: Keys = {"rope_scaling": {"mrope_section": [2, 3, 3], "rope_type": "default", "type": "default"}}
QWEN_VL: Keys = {**ORDINARY, **QWEN, **QWEN_TOKENS, "vision_token_id": 9}
LLAVA: Keys = {
    "ignore_index": -100,
    "image_seq_length": 576,
    "image_token_index": 32000,
    "projector_hidden_act": "gelu",
    "vision_feature_layer": -2,
    "vision_feature_select_strategy": "default",
}
MISTRAL3: Keys = {
    "image_token_index": 10,
    "multimodal_projector_bias": False,
    "projector_hidden_act": "gelu",
    "spatial_merge_size": 2,
    "vision_feature_layer": -1,
}
# Whole config.json files of models that also read images, without vision_config.
COMPOSITE: dict[str, tuple[str, Keys]] = {
    "Gemma 3 27B": (
        "gemma3",
        {
            "boi_token_index": 255999,
            "eoi_token_index": 256000,
            "eos_token_id": [1, 106],
            "image_token_index": 262144,
            "initializer_range": 0.02,
            "mm_tokens_per_image": 256,
            "text_config": {
                "head_dim": 128,
                "hidden_size": 64,
                "intermediate_size": 160,
                "model_type": "gemma3_text",
                "num_attention_heads": 4,
                "num_hidden_layers": 4,
                "num_key_value_heads": 2,
                "query_pre_attn_scalar": 168,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                "sliding_window": 1024,
            },
        },
    ),
    "Mistral Small 3.1": (
        "mistral3",
        {**MISTRAL3, "text_config": {**TEXT, "head_dim": 128, "model_type": "mistral", "sliding_window": None}},
    ),
    "LLaVA 1.5": (
        "llava",
        {
            **LLAVA,
            "pad_token_id": 32001,
            "text_config": {
                "_name_or_path": "lmsys/vicuna-7b-v1.5",
                "architectures": ["LlamaForCausalLM"],
                "max_position_embeddings": 4096,
                "model_type": "llama",
                "rms_norm_eps": 1e-5,
                "vocab_size": 32064,
            },
            "tie_word_embeddings": False,
            "vocab_size": 32064,
        },
    ),
    "BakLLaVA": (
        "llava",
        {
            **LLAVA,
            "text_config": {
                "_name_or_path": "mistralai/Mistral-7B-v0.1",
                "intermediate_size": 14336,
                "max_position_embeddings": 32768,
                "model_type": "mistral",
                "num_key_value_heads": 8,
                "rms_norm_eps": 1e-5,
                "sliding_window": 4096,
                "vocab_size": 32064,
            },
        },
    ),
    "LLaVA-NeXT with Mistral": (
        "llava_next",
        {
            **LLAVA,
            "image_grid_pinpoints": [[336, 672], [672, 336]],
            "text_config": {
                "_name_or_path": "mistralai/Mistral-7B-Instruct-v0.2",
                "architectures": ["MistralForCausalLM"],
                "intermediate_size": 14336,
                "max_position_embeddings": 32768,
                "model_type": "mistral",
                "num_key_value_heads": 8,
                "rms_norm_eps": 1e-5,
                "rope_theta": 1e6,
                "sliding_window": None,
                "vocab_size": 32064,
            },
            "use_image_newline_parameter": True,
            "vocab_size": 32064,
        },
    ),
    "LLaVA-OneVision": (
        "llava_onevision",
        {
            **LLAVA,
            "image_grid_pinpoints": [[384, 384], [384, 768]],
            "text_config": {
                "hidden_size": 64,
                "intermediate_size": 160,
                "model_type": "qwen2",
                "num_attention_heads": 4,
                "num_hidden_layers": 4,
                "num_key_value_heads": 2,
                "rope_theta": 1e6,
                "vocab_size": 320,
            },
            "use_image_newline_parameter": True,
            "video_token_index": 151647,
            "vision_aspect_ratio": "anyres_max_9",
        },
    ),
    "SmolVLM": (
        "smolvlm",
        {
            "image_token_id": 300,
            "scale_factor": 3,
            "text_config": {
                **ORDINARY,
                **LLAMA,
                "_flash_attn_2_enabled": True,
                "head_dim": 64,
                "is_llama_config": True,
                "model_type": "llama",
                "neftune_noise_alpha": 0.0,
                "perceiver_config": {"model_type": "vllama3", "resampler_depth": 6},
                "pixel_shuffle_factor": 4,
                "qk_layer_norms": False,
                "rope_interleaved": False,
                "use_resampler": False,
            },
            "vocab_size": 320,
        },
    ),
    "InternVL 3": (
        "internvl",
        {
            **LLAVA,
            "downsample_ratio": 0.5,
            "ignore_index": None,
            "text_config": {
                **TEXT,
                **QWEN,
                "model_type": "qwen2",
                "moe_config": None,
                "rope_scaling": {"factor": 2.0, "rope_type": "dynamic", "type": "dynamic"},
            },
        },
    ),
    "Qwen2-VL": ("qwen2_vl", {**QWEN_VL, "rope_scaling": {"mrope_section": [2, 3, 3], "type": "mrope"}}),
    "Qwen2.5-VL, by AllenAI": (
        "qwen2_5_vl",
        {
            **QWEN_VL,
            **MROPE,
            "sliding_window": 32768,
            "text_config": {
                **QWEN_VL,
                **MROPE,
                "image_token_id": None,
                "layer_types": FULL,
                "model_type": "qwen2_5_vl_text",
                "video_token_id": None,
            },
        },
    ),
    "Qwen3-VL": (
        "qwen3_vl",
        {
            **QWEN_TOKENS,
            "text_config": {
                **ORDINARY,
                "attention_bias": False,
                "head_dim": 128,
                "model_type": "qwen3_vl_text",
                "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
            },
            "tie_word_embeddings": True,
        },
    ),
    "Qwen3-VL 30B A3B": (
        "qwen3_vl_moe",
        {
            **QWEN_TOKENS,
            "text_config": {
                **ORDINARY,
                **{key: value for key, value in QWEN3_MOE.items() if key not in QWEN},
                "model_type": "qwen3_vl_moe_text",
                "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
            },
            "tie_word_embeddings": False,
        },
    ),
}
SUPPORTED = {one for family in FAMILIES for one in family.model_types} | {one.model_type for one in COMPOSITES}


@pytest.mark.parametrize(
    "name", [name for name, (model_type, _) in {**RELEASED, **RELEASED_LATER}.items() if model_type in SUPPORTED]
)
def test_a_released_model_is_described_without_notes(name: str) -> None:
    model_type, keys = {**RELEASED, **RELEASED_LATER}[name]
    assert describe({**ORDINARY, **keys, "model_type": model_type}, "m").notes == ()


@pytest.mark.parametrize("name", [name for name, (model_type, _) in COMPOSITE.items() if model_type in SUPPORTED])
def test_a_released_model_with_images_is_described_without_notes(name: str) -> None:
    model_type, config = COMPOSITE[name]
    assert describe({**OUTER, **config, "model_type": model_type, "vision_config": VISION}, "m").notes == ()


def test_each_type_is_supported_or_listed_as_not_yet() -> None:
    types = {model_type for model_type, _ in (*RELEASED.values(), *RELEASED_LATER.values(), *COMPOSITE.values())}
    assert types - SUPPORTED == NOT_YET
    assert SUPPORTED - types - NO_DATA == set()


def test_the_first_files_of_llama_have_the_context_of_the_class() -> None:
    config = {key: value for key, value in ORDINARY.items() if key != "max_position_embeddings"}
    found = describe({**config, "max_sequence_length": 2048, "model_type": "llama"}, "m").config
    assert found.max_position_embeddings == CONFIG_MAPPING["llama"]().max_position_embeddings == 2048


def test_sizes_that_older_files_leave_out_are_those_of_the_class() -> None:
    model_type, config = COMPOSITE["BakLLaVA"]
    found = describe({**config, "model_type": model_type, "vision_config": VISION}, "m").config
    assert (found.hidden_units, found.num_layer, found.head_num, found.kv_head_num) == (4096, 32, 32, 8)
    assert (found.sliding_window, found.max_position_embeddings) == (4096, 32768)


@pytest.mark.parametrize("text_type", ["mistral", "qwen2"])
def test_sizes_of_a_text_part_are_those_of_transformers(text_type: str) -> None:
    """llava has no own defaults for these types."""
    found = describe({"model_type": "llava", "text_config": {"model_type": text_type}}, "m").config
    theirs = CONFIG_MAPPING[text_type]()
    assert found.max_position_embeddings == theirs.max_position_embeddings
    assert (found.vocab_size, found.hidden_units) == (theirs.vocab_size, theirs.hidden_size)
    assert (found.inter_size, found.num_layer) == (theirs.intermediate_size, theirs.num_hidden_layers)
    assert (found.head_num, found.kv_head_num) == (theirs.num_attention_heads, theirs.num_key_value_heads)


def test_keys_of_transformers_4_are_known_to_every_family() -> None:
    for model_type, keys in RELEASED.values():
        assert describe({**TRANSFORMERS_4, **ORDINARY, **keys, "model_type": model_type}, "m").notes == ()


@pytest.mark.parametrize(
    ("model_type", "key", "value"),
    [
        ("qwen3_moe", "shared_expert_intermediate_size", 64),
        ("qwen3_moe", "use_qk_norm", False),
        ("qwen3", "use_qk_norm", False),
        ("llama", "use_qk_norm", True),
        ("llama", "use_sliding_window", True),
        ("llama", "sliding_window_size", 4096),
        ("llama", "sliding_window", 4096),
        ("qwen2", "qkv_bias", False),
        ("phi3", "full_attn_mod", 2),
        # Embedding models of Qwen2, such as gte-Qwen2, also attend to later tokens.
        ("qwen2", "is_causal", False),
    ],
)
def test_values_that_would_be_computed_wrongly_are_rejected(model_type: str, key: str, value: Any) -> None:
    keys = next(keys for name, (one, keys) in RELEASED.items() if one == model_type)
    with pytest.raises(UnsupportedError, match=key):
        describe({**ORDINARY, **keys, "model_type": model_type, key: value}, "m")
