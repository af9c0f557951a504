"""Gemma 1, 2 and 3, and VaultGemma.

Norms multiply by 1 + weight. There are norms before and after attention and feed-forward. The embedding is scaled by
the root of its width, and is also the output layer. Layers with a window alternate with layers without. Gemma 2 caps
attention scores and logits. Gemma 3 has norms on the heads of q and k, and a separate rotary base for window layers.
"""

from __future__ import annotations

import math
from typing import Any

from charonia.errors import ModelError
from charonia.families.hf_config import activation, number, optional, required
from charonia.families.llama import attention_bias, llama_spec
from charonia.families.names import Names
from charonia.families.spec import HfConfig, ModelSpec, family
from charonia.families.windows import window_settings

NAMES = Names(ffn_norm="pre_feedforward_layernorm")
TANH = {"gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}
# Defaults of keys that are equal for all sizes. The text part of `gemma3` often omits them.
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


def with_defaults(config: HfConfig, defaults: dict[str, Any]) -> dict[str, Any]:
    return {**defaults, **{key: value for key, value in config.items() if value is not None or key not in defaults}}


def _with_windows(config: HfConfig, period: int, **own: Any) -> ModelSpec:
    """period: every period-th layer has no window, if config.json does not list the layers."""
    query_scale = number(config, "query_pre_attn_scalar", 256.0)
    if query_scale == 0:
        raise ModelError("config.json: query_pre_attn_scalar is 0; it must be positive")
    return llama_spec(
        config,
        NAMES,
        **attention_bias(config),
        norm_unit_offset=True,
        activation=activation(config, "hidden_activation", supported=TANH),
        embedding_scale=math.sqrt(required(config, "hidden_size")),
        attention_scale=1 / math.sqrt(query_scale),
        **{"post_norms": True} | window_settings(config, has_window=lambda layer: (layer + 1) % period != 0) | own,
    )


def _gemma(config: HfConfig) -> ModelSpec:
    """Gemma 1: norms only before attention and feed-forward, no windows and no caps."""
    defaults = {"num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 256, "tie_word_embeddings": True}
    config = with_defaults(config, defaults)
    # In the first releases, gelu means the approximation with tanh. Later the key was hidden_activation for some time.
    tanh = {**TANH, "gelu": "gelu_tanh"}
    return llama_spec(
        config,
        **attention_bias(config),
        norm_unit_offset=True,
        activation=activation(config, "hidden_activation", "hidden_act", supported=tanh),
        embedding_scale=math.sqrt(required(config, "hidden_size")),
    )


def _gemma2(config: HfConfig, **own: Any) -> ModelSpec:
    config = with_defaults(config, {**_DEFAULTS, "sliding_window": 4096})
    # null means no cap; a missing key means the default cap.
    caps = {key: number(config, key, 0.0 if key in config else usual) for key, usual in _GEMMA2_CAPS.items()}
    attention_cap, logit_cap = caps.values()
    return _with_windows(config, 2, attention_soft_cap=attention_cap, logit_soft_cap=logit_cap, **own)


def _vaultgemma(config: HfConfig) -> ModelSpec:
    """Gemma 2 without the norms after attention and feed-forward."""
    return _gemma2(config, post_norms=False)


_GEMMA2_CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}


def _gemma3_text(config: HfConfig) -> ModelSpec:
    config = with_defaults(config, _GEMMA3_DEFAULTS)
    period = optional(config, "sliding_window_pattern", optional(config, "_sliding_window_pattern", 6))
    if period <= 0:
        raise ModelError(f"config.json: sliding_window_pattern is {period}; it must be a positive integer")
    cap = number(config, "final_logit_softcapping", 0.0)
    return _with_windows(config, period, qk_norm=True, logit_soft_cap=cap, theta=1e6, local_theta=1e4)


_KEYS = "attention_bias final_logit_softcapping hidden_activation layer_types query_pre_attn_scalar sliding_window"
_GEMMA3_KEYS = f"{_KEYS} _sliding_window_pattern rope_local_base_freq sliding_window_pattern"

GEMMA = family("gemma", "Gemma 1", _gemma, "attention_bias hidden_activation")
VAULTGEMMA = family("vaultgemma", "VaultGemma", _vaultgemma, f"{_KEYS} attn_logit_softcapping")
# The first files of Gemma 2 have two keys for the window; transformers reads `sliding_window`.
GEMMA2 = family("gemma2", "Gemma 2", _gemma2, f"{_KEYS} attn_logit_softcapping", harmless="sliding_window_size")
GEMMA3_TEXT = family("gemma3 gemma3_text", "Gemma 3", _gemma3_text, _GEMMA3_KEYS)
