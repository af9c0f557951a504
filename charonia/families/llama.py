"""Llama 1 to 3.x, families that differ from it by a few defaults, and the architecture that all families share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from charonia.errors import ModelError
from charonia.families.hf_config import (
    MOST_KV_HEADS,
    activation,
    number,
    optional,
    required,
    token_ids,
)
from charonia.families.layer_attributes import LayerAttributes
from charonia.families.names import LLAMA_NAMES, Names, family_tensors, mtp_tensors
from charonia.families.rope import rope_settings
from charonia.families.spec import HfConfig, ModelConfig, ModelSpec, family
from charonia.families.windows import window_settings

SILU = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}


def head_size(config: HfConfig, default: int = 0) -> int:
    """Return the size of a head. default: used if config.json has no head_dim; 0, or null: hidden_size / heads."""
    if config.get("head_dim") is not None:
        return required(config, "head_dim")
    if default and "head_dim" not in config:
        return default
    heads, hidden = required(config, "num_attention_heads"), required(config, "hidden_size")
    if hidden % heads:
        raise ModelError(f"config.json: hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    return hidden // heads


def attention_bias(config: HfConfig) -> dict[str, Any]:
    """Return the biases of q, k, v and of the attention output, for families with one key for both."""
    bias = optional(config, "attention_bias", False)
    return {"attn_bias": bias, "attn_output_bias": bias}


def all_biases(config: HfConfig) -> dict[str, Any]:
    return {**attention_bias(config), "mlp_bias": optional(config, "mlp_bias", False)}


def _layer(model: ModelConfig, window: int, rotated: bool, experts: bool, mixer: str) -> LayerAttributes:
    rotation = "local" if window and model.rope_local_theta else "global"
    return LayerAttributes(
        window=window,
        rotation=rotation if rotated and model.rotary_embedding and mixer == "attention" else "none",
        ffn="experts" if experts and model.num_experts else "dense",
        mixer=mixer,
    )


def llama_spec(
    config: HfConfig,
    names: Names = LLAMA_NAMES,
    ignored: tuple[str, ...] = (),
    notes: tuple[str, ...] = (),
    *,
    head_dim: int = 0,
    norm_eps: float = 1e-6,
    theta: float = 10000.0,
    partial_rotary: float | None = None,
    per_layer_rope: bool = False,
    local_theta: float = 0.0,
    rope_keys: tuple[str, ...] = (),
    windows: Sequence[int] = (),
    rotated: Sequence[bool] = (),
    with_experts: Sequence[bool] = (),
    mixers: Sequence[str] = (),
    layer_attributes: Sequence[Mapping[str, Any]] = (),
    mtp: bool = False,
    **own: Any,
) -> ModelSpec:
    """Return the description of a Llama-shaped model, without its name and family.

    names: of its tensors. ignored, notes: see ModelSpec. head_dim, norm_eps, theta, local_theta, partial_rotary:
    defaults of values that config.json does not have. head_dim: see head_size(). partial_rotary None: heads are fully
    rotated. local_theta > 0: window layers have a separate rotary base. per_layer_rope: the family reads
    rope_parameters per layer type. rope_keys: keys of rope_parameters that the family reads itself. windows: the window
    of each layer, 0 for none; empty: no layer has one. rotated, with_experts: whether a layer has a rotation, or
    experts if the model has them; empty: all layers. mixers: LayerAttributes.mixer of each layer; empty: attention.
    layer_attributes: other attributes of each layer. own: keys of ModelConfig that the family sets itself; they
    override the others.
    """
    heads = required(config, "num_attention_heads")
    kv_heads = optional(config, "num_key_value_heads", heads)
    hidden = required(config, "hidden_size")
    if kv_heads <= 0 or heads % kv_heads:
        raise ModelError(f"config.json: {heads} attention heads cannot be grouped over {kv_heads} key/value heads")
    layers = required(config, "num_hidden_layers")
    if kv_heads * layers > MOST_KV_HEADS:
        raise ModelError(
            f"config.json: {kv_heads} key/value heads in each of {layers} layers exceed the supported maximum of "
            f"{MOST_KV_HEADS}"
        )
    size_per_head = head_size(config, head_dim)
    start = token_ids(config, "bos_token_id")
    settings: dict[str, Any] = {
        "head_num": heads,
        "kv_head_num": kv_heads,
        "size_per_head": size_per_head,
        "hidden_units": hidden,
        "inter_size": own.pop("inter_size", None) or required(config, "intermediate_size"),
        "num_layer": layers,
        "vocab_size": required(config, "vocab_size"),
        "max_position_embeddings": required(config, "max_position_embeddings"),
        "norm_eps": number(config, "rms_norm_eps", norm_eps),
        "tie_word_embeddings": optional(config, "tie_word_embeddings", False),
        "start_id": start[0] if start else -1,
        "end_id": token_ids(config, "eos_token_id"),
    }
    if not own.get("alibi") and "rotary_embedding" not in own:
        settings |= rope_settings(
            config,
            size_per_head,
            theta=theta,
            partial=partial_rotary,
            per_layer=per_layer_rope,
            local_theta=local_theta,
            read=rope_keys,
        )
    if "activation" not in own:
        settings["activation"] = activation(config, "hidden_act", supported=SILU)
    model = ModelConfig(model_name="", model_family="", **(settings | own))
    every = [True] * layers
    by_layer = (windows or [0] * layers, rotated or every, with_experts or every, mixers or ["attention"] * layers)
    described = [_layer(model, *of_layer) for of_layer in zip(*by_layer, strict=True)]
    others = layer_attributes or [{}] * layers
    model = replace(model, layers=tuple(replace(one, **other) for one, other in zip(described, others, strict=True)))
    tied = f"{names.output}.weight" if model.tie_word_embeddings else ""
    extra = mtp_tensors(model, names) if mtp else {}
    return ModelSpec(model, family_tensors(model, names), mtp=extra, ignored=ignored, notes=notes, tied_output=tied)


def _describe(config: HfConfig) -> ModelSpec:
    return llama_spec(config, **all_biases(config))


_KEYS = "attention_bias mlp_bias"


def _llama(config: HfConfig) -> ModelSpec:
    # The first files of LLaMA omit this key; this is the default in transformers.
    return _describe({"max_position_embeddings": 2048, **config})


FAMILY = family("llama", "Llama 1 to 3.x", _llama, _KEYS)


def _iquestcoder(config: HfConfig) -> ModelSpec:
    return _describe({"head_dim": 128, "rms_norm_eps": 1e-5, **config})


IQUESTCODER = family("llama iquestcoder", "IQuest-Coder", _iquestcoder, _KEYS)


def _seed_oss(config: HfConfig) -> ModelSpec:
    return llama_spec(
        config,
        head_dim=128,
        attn_bias=optional(config, "attention_bias", True),
        attn_output_bias=optional(config, "attention_out_bias", False),
        mlp_bias=optional(config, "mlp_bias", False),
    )


SEED_OSS = family("seed_oss", "Seed-OSS", _seed_oss, f"{_KEYS} attention_out_bias")

# Default of rope_parameters for CWM in transformers.
_CWM_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e6,
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _cwm(config: HfConfig) -> ModelSpec:
    config = {"sliding_window": 8192, "rms_norm_eps": 1e-5, **config}
    if not config.get("rope_parameters") and not config.get("rope_scaling"):
        config["rope_parameters"] = _CWM_ROPE
    if config.get("eos_token_id") is None:
        config["eos_token_id"] = [128001, 128008, 128009]
    return llama_spec(
        config,
        head_dim=128,
        theta=1e6,
        per_layer_rope=True,
        mlp_bias=optional(config, "mlp_bias", False),
        **window_settings(config, has_window=lambda layer: layer % 4 != 0),
    )


CWM = family("cwm", "Code World Model", _cwm, "layer_types mlp_bias sliding_window")


def _yi(config: HfConfig) -> ModelSpec:
    """Newer releases have the model_type `llama`, the first ones `Yi`."""
    return llama_spec(config, norm_eps=1e-5)


YI = family("yi yi Yi", "Yi", _yi)


def _helium(config: HfConfig) -> ModelSpec:
    biases = {**all_biases(config), "attn_output_bias": False}
    return llama_spec(config, head_dim=128, norm_eps=1e-8, theta=1e5, rotary_interleaved=True, **biases)


HELIUM = family("helium", "Helium 1 preview", _helium, _KEYS)


def _ernie4_5(config: HfConfig) -> ModelSpec:
    config, bias = {"tie_word_embeddings": True, **config}, optional(config, "use_bias", False)
    biases: dict[str, Any] = dict.fromkeys(("attn_bias", "attn_output_bias", "mlp_bias"), bias)
    return llama_spec(config, head_dim=128, norm_eps=1e-5, theta=5e5, rotary_interleaved=True, **biases)


ERNIE4_5 = family("ernie4_5", "ERNIE 4.5", _ernie4_5, "use_bias")
