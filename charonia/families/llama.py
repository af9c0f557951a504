"""Llama 1 to 3.x, and the shape that the other families share: their tensor names are Llama's."""

from __future__ import annotations

from charonia.errors import ModelError
from charonia.families.hf_config import optional, refuse_unsupported, required, rope, token_ids
from charonia.families.spec import Family, HfConfig, ModelConfig, ModelSpec, TensorMap, TensorPart


def llama_config(
    config: HfConfig,
    model_name: str,
    family: str,
    *,
    attn_bias: bool = False,
    attn_output_bias: bool = False,
    mlp_bias: bool = False,
    tie_word_embeddings: bool = False,
    norm_eps: float = 1e-6,
) -> ModelConfig:
    """The engine's configuration of a Llama-shaped model; the last two are for a config.json that is silent."""
    refuse_unsupported(config)
    heads = required(config, "num_attention_heads")
    kv_heads = optional(config, "num_key_value_heads", heads)
    hidden = required(config, "hidden_size")
    head_dim = optional(config, "head_dim", 0) or hidden // heads
    if kv_heads <= 0 or heads % kv_heads:
        raise ModelError(f"config.json: {heads} attention heads cannot be grouped over {kv_heads} key/value heads")
    if config.get("head_dim") is None and hidden % heads:
        raise ModelError(f"config.json: hidden_size {hidden} is no multiple of num_attention_heads {heads}")
    rotary = rope(config)
    start = token_ids(config, "bos_token_id")
    return ModelConfig(
        model_name=model_name,
        model_family=family,
        head_num=heads,
        kv_head_num=kv_heads,
        size_per_head=head_dim,
        hidden_units=hidden,
        inter_size=required(config, "intermediate_size"),
        num_layer=required(config, "num_hidden_layers"),
        vocab_size=required(config, "vocab_size"),
        max_position_embeddings=required(config, "max_position_embeddings"),
        norm_eps=optional(config, "rms_norm_eps", norm_eps),
        attn_bias=attn_bias,
        attn_output_bias=attn_output_bias,
        mlp_bias=mlp_bias,
        tie_word_embeddings=optional(config, "tie_word_embeddings", tie_word_embeddings),
        start_id=start[0] if start else -1,
        end_id=token_ids(config, "eos_token_id"),
        rotary_embedding=head_dim,
        rope_theta=rotary.theta,
        rope_scaling_type=rotary.kind,
        rope_factor=rotary.factor,
        rope_low_freq_factor=rotary.low_freq_factor,
        rope_high_freq_factor=rotary.high_freq_factor,
        rope_original_max_position_embeddings=rotary.original_max_position_embeddings,
    )


def llama_tensors(config: ModelConfig) -> TensorMap:
    """Canonical names to Hugging Face's for a Llama-shaped model; shapes are `(out, in)` and `(out,)`."""
    hidden, inter = config.hidden_units, config.inter_size
    q_size, kv_size = config.head_num * config.size_per_head, config.kv_head_num * config.size_per_head
    tensors: TensorMap = {
        "tok_embeddings.weight": (TensorPart("model.embed_tokens.weight", (config.vocab_size, hidden)),),
        "norm.weight": (TensorPart("model.norm.weight", (hidden,)),),
    }
    if not config.tie_word_embeddings:
        tensors["output.weight"] = (TensorPart("lm_head.weight", (config.vocab_size, hidden)),)

    def linear(canonical: str, has_bias: bool, *parts: tuple[str, int, int]) -> None:
        tensors[f"{canonical}.weight"] = tuple(TensorPart(f"{name}.weight", (out, into)) for name, out, into in parts)
        if has_bias:
            tensors[f"{canonical}.bias"] = tuple(TensorPart(f"{name}.bias", (out,)) for name, out, _ in parts)

    for layer in range(config.num_layer):
        ours, theirs = f"layers.{layer}", f"model.layers.{layer}"
        tensors[f"{ours}.attention_norm.weight"] = (TensorPart(f"{theirs}.input_layernorm.weight", (hidden,)),)
        tensors[f"{ours}.ffn_norm.weight"] = (TensorPart(f"{theirs}.post_attention_layernorm.weight", (hidden,)),)
        linear(
            f"{ours}.attention.w_qkv.0",
            config.attn_bias,
            (f"{theirs}.self_attn.q_proj", q_size, hidden),
            (f"{theirs}.self_attn.k_proj", kv_size, hidden),
            (f"{theirs}.self_attn.v_proj", kv_size, hidden),
        )
        linear(f"{ours}.attention.wo.0", config.attn_output_bias, (f"{theirs}.self_attn.o_proj", hidden, q_size))
        linear(f"{ours}.feed_forward.w1.0", config.mlp_bias, (f"{theirs}.mlp.gate_proj", inter, hidden))
        linear(f"{ours}.feed_forward.w3.0", config.mlp_bias, (f"{theirs}.mlp.up_proj", inter, hidden))
        linear(f"{ours}.feed_forward.w2.0", config.mlp_bias, (f"{theirs}.mlp.down_proj", hidden, inter))
    return tensors


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
    return ModelSpec(model, llama_tensors(model))


FAMILY = Family("llama", ("llama",), "Llama 1 to 3.x", _describe)
