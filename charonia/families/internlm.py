"""InternLM 1 (biases on q, k, v and o), 2 (one interleaved tensor for q, k and v) and 3: Llama's architecture."""

from __future__ import annotations

from charonia.errors import UnsupportedError
from charonia.families.hf_config import number, optional
from charonia.families.llama import llama_spec
from charonia.families.names import Names
from charonia.families.spec import HfConfig, ModelSpec, family

INTERNLM2_NAMES = Names(
    embedding="model.tok_embeddings",
    output="output",
    attention_norm="attention_norm",
    ffn_norm="ffn_norm",
    qkv=("attention.wqkv",),
    qkv_interleaved=True,
    attention_output="attention.wo",
    gate="feed_forward.w1",
    up="feed_forward.w3",
    down="feed_forward.w2",
)


def _internlm(config: HfConfig) -> ModelSpec:
    # InternLM 1 has its own format: {"base": 10000, "type": "dynamic"}.
    rotary = config.get("rotary")
    if isinstance(rotary, dict):
        kind = rotary.get("type", "origin")
        if kind not in ("origin", "dynamic"):
            raise UnsupportedError(f"config.json: rotary of type {kind!r} is not supported; supported: origin, dynamic")
        config = {**config, "rope_theta": number(rotary, "base", 10000.0)}
        if kind == "dynamic":
            config["rope_parameters"] = {"type": "dynamic", "factor": number(rotary, "scaling_factor", 1.0)}
    bias = optional(config, "bias", True)
    return llama_spec(config, attn_bias=bias, attn_output_bias=bias)


def _internlm2(config: HfConfig) -> ModelSpec:
    bias = optional(config, "bias", True)
    return llama_spec(config, INTERNLM2_NAMES, attn_bias=bias, attn_output_bias=bias)


def _internlm3(config: HfConfig) -> ModelSpec:
    # Older files have qkv_bias and bias; transformers 5 has attention_bias for q, k, v and o, and mlp_bias.
    both = optional(config, "attention_bias", False)
    bias = optional(config, "bias", optional(config, "mlp_bias", False))
    return llama_spec(
        config,
        head_dim=128,
        norm_eps=1e-5,
        attn_bias=optional(config, "qkv_bias", both),
        attn_output_bias=bias if config.get("attention_bias") is None else both,
        mlp_bias=bias,
    )


INTERNLM = family("internlm", "InternLM 1", _internlm, "bias rotary")
INTERNLM2 = family("internlm2", "InternLM 2 and 2.5", _internlm2, "bias", harmless="reward_token_id")
INTERNLM3 = family("internlm3", "InternLM 3", _internlm3, "attention_bias bias mlp_bias qkv_bias")
