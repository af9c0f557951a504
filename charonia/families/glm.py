"""GLM-4 (9B) and GLM-4-0414: interleaved rotation of half of each head; one tensor for gate and up.

GLM-4-0414 also normalises the outputs of attention and feed-forward.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from charonia.families.hf_config import optional
from charonia.families.llama import llama_spec
from charonia.families.names import Names
from charonia.families.spec import HfConfig, ModelSpec, family

_GLM_NAMES = Names(gate="mlp.gate_up_proj", up="mlp.gate_up_proj")
_GLM4_NAMES = replace(_GLM_NAMES, attention_post_norm="post_self_attn_layernorm", ffn_post_norm="post_mlp_layernorm")
_ENDS = [151329, 151336, 151338]  # defaults in transformers: <|endoftext|>, <|user|>, <|observation|>


def _describe(config: HfConfig, names: Names, **own: Any) -> ModelSpec:
    if config.get("eos_token_id") is None:
        config = {**config, "eos_token_id": _ENDS}
    return llama_spec(
        config,
        names,
        rotary_interleaved=True,
        attn_bias=optional(config, "attention_bias", True),
        **{"head_dim": 128, "norm_eps": 1.5625e-07, "partial_rotary": 0.5, **own},
    )


def _glm(config: HfConfig) -> ModelSpec:
    return _describe(config, _GLM_NAMES)


def _glm4(config: HfConfig, **own: Any) -> ModelSpec:
    return _describe(config, _GLM4_NAMES, post_norms=True, **own)


def _glm4v(config: HfConfig) -> ModelSpec:
    """The text part of GLM-4.1V and GLM-4.6V-Flash."""
    return _glm4(config, head_dim=0, norm_eps=1e-5, partial_rotary=1.0)


_KEYS = "attention_bias"

GLM = family("glm", "GLM-4 9B", _glm, _KEYS)
GLM4V_TEXT = family(
    "glm4 glm4v_text", "the text part of GLM-4.1V", _glm4v, _KEYS, harmless="image_token_id video_token_id"
)
GLM4 = family("glm4", "GLM-4-0414 and GLM-Z1", _glm4, _KEYS)
