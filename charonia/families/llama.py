"""Llama 1 to 3.x, and the shape that the other families share."""

from __future__ import annotations

from typing import Any

from charonia.errors import ModelError
from charonia.families.hf_config import (
    MOST_KV_HEADS,
    activation,
    number,
    optional,
    refuse_unsupported,
    required,
    token_ids,
)
from charonia.families.names import LLAMA_NAMES, Names, family_tensors
from charonia.families.rope import rope_settings
from charonia.families.spec import Family, HfConfig, ModelConfig, ModelSpec

SILU = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}


def llama_config(
    config: HfConfig,
    model_name: str,
    family: str,
    *,
    head_dim: int = 0,
    norm_eps: float = 1e-6,
    theta: float = 10000.0,
    partial_rotary: bool = False,
    **own: Any,
) -> ModelConfig:
    """The engine's configuration of a Llama-shaped model.

    head_dim, norm_eps, theta: for a config.json that is silent; head_dim 0: hidden_size by heads. own: the keys of
    ModelConfig that the family sets itself; they win.
    """
    refuse_unsupported(config, own.pop("computed", ()))
    heads = required(config, "num_attention_heads")
    kv_heads = optional(config, "num_key_value_heads", heads)
    hidden = required(config, "hidden_size")
    if kv_heads <= 0 or heads % kv_heads:
        raise ModelError(f"config.json: {heads} attention heads cannot be grouped over {kv_heads} key/value heads")
    layers = required(config, "num_hidden_layers")
    if kv_heads * layers > MOST_KV_HEADS:
        raise ModelError(
            f"config.json: {kv_heads} key/value heads in each of {layers} layers are more than {MOST_KV_HEADS}, the "
            "most that are supported"
        )
    explicit = optional(config, "head_dim", head_dim)
    if not explicit and hidden % heads:
        raise ModelError(f"config.json: hidden_size {hidden} is no multiple of num_attention_heads {heads}")
    size_per_head = explicit or hidden // heads
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
        settings |= rope_settings(config, size_per_head, theta=theta, partial=partial_rotary)
    if "activation" not in own:
        settings["activation"] = activation(config, "hidden_act", supported=SILU)
    return ModelConfig(model_name=model_name, model_family=family, **(settings | own))


def llama_spec(model: ModelConfig, names: Names = LLAMA_NAMES, **more: Any) -> ModelSpec:
    """A model with these names of tensors; more: ModelSpec's other fields."""
    ignored = (f"{names.output}.",) if model.tie_word_embeddings else ()
    return ModelSpec(model, family_tensors(model, names), ignored=(*ignored, *more.pop("ignored", ())), **more)


def _describe(config: HfConfig, model_name: str) -> ModelSpec:
    bias = optional(config, "attention_bias", False)
    model = llama_config(
        config,
        model_name,
        "llama",
        attn_bias=bias,
        attn_output_bias=bias,
        mlp_bias=optional(config, "mlp_bias", False),
    )
    return llama_spec(model)


FAMILY = Family("llama", ("llama",), "Llama 1 to 3.x", _describe)
