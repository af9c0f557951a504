"""Hunyuan V1, dense: norms on the heads of q and k behind the rotation, whose base grows by a fixed `alpha`."""

from __future__ import annotations

from typing import Any

from charonia.errors import ModelError
from charonia.families.config_keys import words
from charonia.families.hf_config import number, optional, required
from charonia.families.llama import llama_config, llama_spec
from charonia.families.names import Names
from charonia.families.spec import Family, HfConfig, ModelSpec

NAMES = Names(q_norm="self_attn.query_layernorm", k_norm="self_attn.key_layernorm")


def _with_base(config: HfConfig) -> HfConfig:
    """`dynamic` scaling with an `alpha` is a larger base: base * alpha^(d / (d - 2))."""
    for key in ("rope_scaling", "rope_parameters"):
        settings = config.get(key)
        if not isinstance(settings, dict) or not settings.get("alpha"):
            continue
        kind = settings.get("rope_type") or settings.get("type")
        if kind != "dynamic":
            raise ModelError(f"config.json: {key} has an alpha and is of type {kind!r}; it must be of type 'dynamic'")
        heads, hidden = required(config, "num_attention_heads"), required(config, "hidden_size")
        size = optional(config, "head_dim", hidden // heads)
        base = number(settings, "rope_theta", number(config, "rope_theta", 10000.0))
        plain: dict[str, Any] = {
            "rope_type": "default",
            "rope_theta": base * number(settings, "alpha", 1.0) ** (size / (size - 2)),
        }
        return {**config, "rope_scaling": None, "rope_parameters": plain}
    return config


def hunyuan_settings(config: HfConfig) -> dict[str, Any]:
    """ModelConfig's keys that the dense models and those with experts share."""
    bias = optional(config, "attention_bias", False)
    return {"attn_bias": bias, "attn_output_bias": bias, "qk_norm": True, "qk_norm_after_rotary": True}


def _describe(config: HfConfig, model_name: str) -> ModelSpec:
    config = _with_base(config)
    model = llama_config(config, model_name, "hunyuan_v1_dense", norm_eps=1e-5, **hunyuan_settings(config))
    return llama_spec(model, NAMES)


# Keys of released files: of other tasks, of images, and of variants that Hunyuan V1 does not use.
HARMLESS = words(
    """
    add_classification_head attention_head_dim cla_share_factor class_num dense_list im_end_id im_newline_id im_start_id
    mask_init_id org_vocab_size pad_id pool_type text_end_id text_start_id
    """
)
ONLY = {
    "norm_type": ("rms", "hf_rms"),
    "position_embedding_xdrope": (False,),
    "use_cla": (False,),
    "use_qk_norm": (True,),
    "use_rotary_pos_emb": (True,),
}

DENSE = Family(
    "hunyuan_v1_dense",
    ("hunyuan_v1_dense",),
    "Hunyuan V1",
    _describe,
    keys=words("attention_bias"),
    harmless=HARMLESS,
    only={**ONLY, "num_experts": (1,)},
)
