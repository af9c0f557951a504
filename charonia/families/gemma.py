"""Gemma 2 and the text part of Gemma 3.

Norms multiply by 1 + weight and stand before and after attention and feed-forward; the embedding is scaled by the root
of its width and is the output layer too; layers with a window alternate with layers without. Gemma 2 caps attention
scores and logits; Gemma 3 has norms on the heads of q and k, and a rotary base of their own for layers with a window.
"""

from __future__ import annotations

import math
from typing import Any

from charonia.errors import ModelError
from charonia.families.hf_config import activation, number, optional, required
from charonia.families.llama import llama_config, llama_spec
from charonia.families.names import Names
from charonia.families.rope import rope_settings
from charonia.families.spec import Family, HfConfig, ModelConfig, ModelSpec
from charonia.families.windows import window_settings

NAMES = Names(ffn_norm="pre_feedforward_layernorm")
_TANH = {"gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}
# What config.json leaves out where it is the same for all sizes: the text part of `gemma3` often does.
_DEFAULTS = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "tie_word_embeddings": True}
_GEMMA3_DEFAULTS = {
    **_DEFAULTS,
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}


def _with_defaults(config: HfConfig, defaults: dict[str, Any]) -> dict[str, Any]:
    return {**defaults, **{key: value for key, value in config.items() if value is not None or key not in defaults}}


def _gemma_config(
    config: HfConfig, model_name: str, family: str, period: int, caps: tuple[str, ...], **own: Any
) -> ModelConfig:
    """period: every period-th layer has no window, where config.json does not list them."""
    bias = optional(config, "attention_bias", False)
    query_scale = number(config, "query_pre_attn_scalar", 256.0)
    if query_scale == 0:
        raise ModelError("config.json: query_pre_attn_scalar is 0; it must be positive")
    return llama_config(
        config,
        model_name,
        family,
        computed=caps,
        attn_bias=bias,
        attn_output_bias=bias,
        norm_unit_offset=True,
        post_norms=True,
        activation=activation(config, "hidden_activation", supported=_TANH),
        embedding_scale=math.sqrt(required(config, "hidden_size")),
        attention_scale=1 / math.sqrt(query_scale),
        **window_settings(config, has_window=lambda layer: (layer + 1) % period != 0),
        **own,
    )


def _gemma2(config: HfConfig, model_name: str) -> ModelSpec:
    config = _with_defaults(config, {**_DEFAULTS, "sliding_window": 4096})
    # A null says that there is no cap; where the key is missing there is the usual one.
    caps = {key: number(config, key, 0.0 if key in config else usual) for key, usual in _GEMMA2_CAPS.items()}
    model = _gemma_config(
        config,
        model_name,
        "gemma2",
        2,
        tuple(caps),
        attention_soft_cap=caps["attn_logit_softcapping"],
        logit_soft_cap=caps["final_logit_softcapping"],
    )
    return llama_spec(model, NAMES)


_GEMMA2_CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}


def _gemma3_text(config: HfConfig, model_name: str) -> ModelSpec:
    config = _with_defaults(config, _GEMMA3_DEFAULTS)
    period = optional(config, "sliding_window_pattern", optional(config, "_sliding_window_pattern", 6))
    if period <= 0:
        raise ModelError(f"config.json: sliding_window_pattern is {period}; it must be a positive integer")
    cap = "final_logit_softcapping"
    model = _gemma_config(
        config,
        model_name,
        "gemma3",
        period,
        (cap,),
        qk_norm=True,
        logit_soft_cap=number(config, cap, 0.0),
        **rope_settings(config, required(config, "head_dim"), theta=1e6, local_theta=1e4),
    )
    return llama_spec(model, NAMES)


def _gemma3(config: HfConfig, model_name: str) -> ModelSpec:
    text = config.get("text_config")
    if not isinstance(text, dict):
        raise ModelError("config.json: text_config is missing, the part of a gemma3 model that writes text")
    shared = ("bos_token_id", "eos_token_id", "tie_word_embeddings", "quantization_config")
    text = {**text, **{key: config[key] for key in shared if config.get(key) is not None}}
    spec = _gemma3_text(text, model_name)
    return ModelSpec(
        spec.config,
        spec.tensors,
        prefixes=(("language_model.model.", "model."), ("language_model.", ""), ("model.language_model.", "model.")),
        ignored=(
            *spec.ignored,
            *(f"{place}{part}." for place in ("", "model.") for part in ("vision_tower", "multi_modal_projector")),
        ),
    )


GEMMA2 = Family("gemma2", ("gemma2",), "Gemma 2", _gemma2)
GEMMA3_TEXT = Family("gemma3", ("gemma3_text",), "Gemma 3", _gemma3_text)
GEMMA3 = Family("gemma3", ("gemma3",), "the text part of Gemma 3 with images", _gemma3)
