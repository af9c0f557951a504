"""Qwen 1: one tensor for q, k and v, and its own scaling for contexts beyond the trained length.

The model computes `w1(x) * silu(w2(x))`; each weight is half as wide as `intermediate_size`. For contexts beyond
`seq_length`, the rotary base depends on the prompt's length (dynamic NTK), and queries grow with the logarithm of their
position (log-n).
"""

from __future__ import annotations

from charonia.errors import ModelError, UnsupportedError
from charonia.families.hf_config import number, optional, required, token_ids
from charonia.families.llama import llama_spec
from charonia.families.names import Names
from charonia.families.rope import refuse_scaling
from charonia.families.spec import HfConfig, ModelSpec, family

NAMES = Names(
    layer="transformer.h.{}.",
    embedding="transformer.wte",
    norm="transformer.ln_f",
    attention_norm="ln_1",
    ffn_norm="ln_2",
    qkv=("attn.c_attn",),
    attention_output="attn.c_proj",
    gate="mlp.w2",
    up="mlp.w1",
    down="mlp.c_proj",
)

# Token ids, equal for all sizes: <|endoftext|>, and <|im_end|> and <|im_start|>.
_END_OF_TEXT = 151643
_ENDS_OF_TURN = (151645, 151644)


def _rotary_share(config: HfConfig) -> float:
    share = number(config, "rotary_pct", 1.0)
    if share > 1:
        raise ModelError(f"config.json: rotary_pct is {share}; it must be from 0 to 1")
    return share


def _describe(config: HfConfig) -> ModelSpec:
    trained = optional(config, "seq_length", 2048)
    head_dim = optional(config, "kv_channels", 128)
    inter = required(config, "intermediate_size")
    if inter % 2:
        raise ModelError(f"config.json: intermediate_size {inter} is odd; Qwen 1's layers have half this width")
    if not optional(config, "scale_attn_weights", True):
        raise UnsupportedError("config.json: scale_attn_weights False is not supported; supported: True")
    bias = not optional(config, "no_bias", True)
    ends = token_ids(config, "eos_token_id") or (_END_OF_TEXT,)
    if config.get("chat_format") == "chatml":
        ends = (*ends, *(end for end in _ENDS_OF_TURN if end not in ends))
    dynamic = optional(config, "use_dynamic_ntk", True)
    refuse_scaling(config, "Qwen 1 has its own scaling (use_dynamic_ntk)")
    return llama_spec(
        {"max_position_embeddings": trained, **config, "rms_norm_eps": config.get("layer_norm_epsilon")},
        NAMES,
        head_dim=head_dim,
        inter_size=inter // 2,
        end_id=ends,
        attn_bias=True,
        attn_output_bias=bias,
        mlp_bias=bias,
        activation="silu",
        rotary_embedding=int(head_dim * _rotary_share(config)),
        rope_theta=number(config, "rotary_emb_base", 10000.0),
        rope_scaling_type="qwen" if dynamic else "default",
        rope_original_max_position_embeddings=trained if dynamic else 0,
        logn_length=trained if optional(config, "use_logn_attn", True) else 0,
    )


_KEYS = """
    chat_format kv_channels layer_norm_epsilon no_bias rotary_emb_base rotary_pct scale_attn_weights seq_length
    use_dynamic_ntk use_logn_attn
"""
_HARMLESS = "attn_dropout_prob bf16 emb_dropout_prob fp16 fp32 onnx_safe"

FAMILY = family("qwen", "Qwen 1", _describe, _KEYS, harmless=_HARMLESS)
