"""Small random models of every family, and their output in transformers, or in numpy for families it does not have."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from numpy_models import NumpyFamily, NumpyModel, baichuan, internlm2, qwen
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Cohere2Config,
    CwmConfig,
    Dots1Config,
    DynamicCache,
    Ernie4_5_MoeConfig,
    Ernie4_5Config,
    Exaone4Config,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    Glm4Config,
    Glm4MoeConfig,
    Glm4vConfig,
    Glm4vMoeConfig,
    GlmConfig,
    GraniteConfig,
    HeliumConfig,
    HunYuanDenseV1Config,
    HunYuanMoEV1Config,
    HyperCLOVAXConfig,
    HyperCLOVAXVisionV2Config,
    HYV3Config,
    Idefics3Config,
    InternVLConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaNextConfig,
    LlavaOnevisionConfig,
    MellumConfig,
    MiniMaxM2Config,
    Ministral3Config,
    MinistralConfig,
    Mistral3Config,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen2VLConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
    SeedOssConfig,
    SmolLM3Config,
    SmolVLMConfig,
    SolarOpenConfig,
    VaultGemmaConfig,
)

from charonia.bench.random_model import write_byte_tokenizer

# Transformers 5.17, which machines with a GPU may have, does not have it.
InternLM3Config = getattr(transformers, "InternLM3Config", None)
if InternLM3Config is None and os.environ.get("CI") == "true":
    raise ImportError(f"transformers {transformers.__version__} has no InternLM3, which must not go untested unseen")

# The models are tiny, so more threads would only wait for each other.
torch.set_num_threads(1)

VOCAB = 320
WINDOW = 24  # tokens, in models with a window
_BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
_MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
_TOWER = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
_CLIP = {"model_type": "clip_vision_model", **_TOWER}
_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 1.8],
    "long_factor": [1.0, 1.5, 2.5, 4.0, 6.0, 8.0],
}


@dataclass(frozen=True)
class Variant:
    """A config of transformers, or a family of numpy_models, with changes to its config.json."""

    config: Any
    rewrite: dict[str, Any] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()  # keys of config.json that the family's original files do not have
    settings: dict[str, Any] = field(default_factory=dict)  # of the engine
    stepwise: bool = False  # the reference must generate token by token, because its output depends on this


def _variant(
    config_class: type[Any] = LlamaConfig,
    rewrite: dict[str, Any] | None = None,
    dropped: tuple[str, ...] = (),
    **changes: Any,
) -> Variant:
    return Variant(config_class(**{**_BASE, **changes}), rewrite or {}, dropped)


def _with_images(config_class: type[Any], text: dict[str, Any], **vision: Any) -> Variant:
    """Return a model that also reads images, with a small vision tower."""
    return Variant(config_class(text_config={**_BASE, **text}, vision_config=vision))


def _beyond(variant: Variant, **settings: float) -> Variant:
    """Return a model that is used beyond its trained length."""
    stepwise = isinstance(variant.config, LlamaConfig)
    return replace(variant, settings={"session_len": 512, **settings}, stepwise=stepwise)


VARIANTS = {
    "llama1": _variant(num_key_value_heads=6, rms_norm_eps=1e-6),
    "llama2-grouped": Variant(LlamaConfig(**_BASE), stepwise=True),
    "llama3": _variant(rope_parameters=_LLAMA3_ROPE),
    "llama-tied": _variant(tie_word_embeddings=True),
    "llama-biases": _variant(attention_bias=True, mlp_bias=True),
    "llama-head-dim": _variant(head_dim=32),
    "llama-linear": _variant(rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}),
    "llama-dynamic": _beyond(_variant(max_position_embeddings=100, rope_parameters=_DYNAMIC)),
    # The setting sets what its config.json does not have.
    "llama-dynamic-by-setting": _beyond(
        _variant(
            rewrite={"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
            max_position_embeddings=100,
            rope_parameters=_DYNAMIC,
        ),
        rope_scaling_factor=2.0,
    ),
    "llama-yarn": _variant(rope_parameters=_YARN),
    "llama-yarn-mscale": _variant(
        rope_parameters=_YARN
        | {"mscale": 0.7, "mscale_all_dim": 1.3, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False}
    ),
    # Saved by transformers 5, with YaRN added manually, as READMEs recommend.
    "llama-yarn-added": _variant(
        rewrite={
            "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
            "rope_scaling": {key: value for key, value in _YARN.items() if key != "rope_theta"},
        },
        rope_parameters=_YARN | {"rope_theta": 5000.0},
    ),
    "mistral": _variant(MistralConfig, sliding_window=None, head_dim=16),
    "mistral-layer-types": _variant(
        MinistralConfig, rewrite={"model_type": "mistral"}, sliding_window=WINDOW, head_dim=16, layer_types=_MIXED
    ),
    "ministral": _variant(MinistralConfig, sliding_window=WINDOW, head_dim=16, layer_types=_MIXED),
    "cwm": _variant(CwmConfig, sliding_window=WINDOW, head_dim=16, rope_parameters=_LLAMA3_ROPE),
    # The queries grow beyond 64 positions. Prompts are shorter and longer than that.
    "ministral3": _variant(
        Ministral3Config,
        head_dim=16,
        rope_parameters={**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.4},
    ),
    "glm": _variant(GlmConfig, head_dim=16),
    "glm4": _variant(Glm4Config, head_dim=16),
    "ernie4.5": _variant(Ernie4_5Config, head_dim=16),
    "granite": _variant(
        GraniteConfig,
        attention_multiplier=0.2,
        embedding_multiplier=3.0,
        residual_multiplier=0.6,
        logits_scaling=2.5,
        tie_word_embeddings=True,
    ),
    "hyperclovax": _variant(
        HyperCLOVAXConfig,
        attention_multiplier=0.2,
        embedding_multiplier=3.0,
        residual_multiplier=0.6,
        logits_scaling=0.4,
    ),
    # The attention factor that its class computes, and no norms after attention and feed-forward.
    "hyperclovax-pre-norms": _variant(
        HyperCLOVAXConfig, use_post_norm=False, head_dim=20, dropped=("attention_multiplier",), attention_bias=True
    ),
    # Its class has a square projection after attention, so the heads must be as wide as hidden_size.
    "helium": _variant(HeliumConfig, head_dim=16, attention_bias=True, mlp_bias=True),
    "smollm3": _variant(SmolLM3Config, no_rope_layer_interval=2, tie_word_embeddings=True),
    "smollm3-window": _variant(
        SmolLM3Config,
        no_rope_layers=[0, 1, 0],
        use_sliding_window=True,
        sliding_window=WINDOW,
        tie_word_embeddings=True,
    ),
    "olmo2": _variant(Olmo2Config),
    "olmo3": _variant(
        Olmo3Config,
        sliding_window=WINDOW,
        layer_types=_MIXED,
        rope_parameters={"full_attention": _YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}},
    ),
    "exaone4": _variant(Exaone4Config, sliding_window=None, layer_types=["full_attention"] * 3),
    "exaone4-window": _variant(Exaone4Config, sliding_window=WINDOW, sliding_window_pattern=2),
    "hunyuan": _variant(HunYuanDenseV1Config, head_dim=16, rope_parameters={**_DYNAMIC, "factor": 1.0, "alpha": 50.0}),
    "cohere2": _variant(
        Cohere2Config, sliding_window=WINDOW, layer_types=_MIXED, logit_scale=0.5, tie_word_embeddings=True
    ),
    "seed-oss": _variant(SeedOssConfig, head_dim=20, attention_bias=True),
    "gemma": _variant(GemmaConfig, head_dim=32, tie_word_embeddings=True),
    "vaultgemma": _variant(
        VaultGemmaConfig, head_dim=32, sliding_window=WINDOW, query_pre_attn_scalar=24, tie_word_embeddings=True
    ),
    "hyperclovax-vision": _with_images(
        HyperCLOVAXVisionV2Config,
        {"attention_multiplier": 0.2, "embedding_multiplier": 0.5, "residual_multiplier": 1.5, "logits_scaling": 0.4},
        **{"model_type": "qwen2_5_vl_vision", "depth": 1, "hidden_size": 16, "out_hidden_size": 96},
        **{"num_heads": 1, "intermediate_size": 16},
    ),
    "qwen2-vl": _with_images(
        Qwen2VLConfig, {"rope_parameters": _MROPE}, depth=1, embed_dim=16, hidden_size=96, num_heads=1
    ),
    "qwen2.5-vl": _with_images(
        Qwen2_5_VLConfig,
        {"rope_parameters": _MROPE, "tie_word_embeddings": True},
        **{"depth": 1, "hidden_size": 16, "out_hidden_size": 96, "num_heads": 1, "intermediate_size": 16},
    ),
    "qwen3-vl": _with_images(
        Qwen3VLConfig,
        {"head_dim": 16, "rope_parameters": {**_MROPE, "mrope_interleaved": True}},
        **{"depth": 1, "hidden_size": 16, "out_hidden_size": 96, "num_heads": 1, "intermediate_size": 16},
        deepstack_visual_indexes=[0],
    ),
    # Two tensors contain all experts of a layer.
    "qwen3-vl-moe": _with_images(
        Qwen3VLMoeConfig,
        {"head_dim": 16, "rope_parameters": {**_MROPE, "mrope_interleaved": True}}
        | {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 44},
        **{"depth": 1, "hidden_size": 16, "out_hidden_size": 96, "num_heads": 1, "intermediate_size": 16},
        deepstack_visual_indexes=[0],
    ),
    "mistral3": _with_images(
        Mistral3Config,
        {"model_type": "mistral", "head_dim": 16, "sliding_window": None},
        **{"model_type": "pixtral", "hidden_size": 16, "intermediate_size": 16},
        **{"num_hidden_layers": 1, "num_attention_heads": 1, "head_dim": 16},
    ),
    "llava-next": _with_images(LlavaNextConfig, {"model_type": "mistral", "sliding_window": None}, **_CLIP),
    "llava-onevision": _with_images(
        LlavaOnevisionConfig, {"model_type": "qwen2"}, **{**_CLIP, "model_type": "siglip_vision_model"}
    ),
    "idefics3": _with_images(Idefics3Config, {"model_type": "llama"}, **_TOWER),
    "smolvlm": _with_images(SmolVLMConfig, {"model_type": "llama"}, **_TOWER),
    "glm4v": _with_images(
        Glm4vConfig,
        {"rope_parameters": {**_MROPE, "mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5}},
        **{"depth": 1, "hidden_size": 16, "out_hidden_size": 96, "num_heads": 1, "intermediate_size": 16},
    ),
    "internvl": _with_images(
        InternVLConfig,
        {"model_type": "qwen2"},
        **{"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1},
    ),
    "llava": _with_images(LlavaConfig, {"model_type": "llama"}, **_CLIP),
    "mistral-window": Variant(MistralConfig(**_BASE, sliding_window=WINDOW, head_dim=16), stepwise=True),
    "qwen1": Variant(qwen(trained=40)),
    "qwen2": _variant(Qwen2Config, rope_parameters={"rope_type": "default", "rope_theta": 1000000.0}),
    "qwen2-window": _variant(Qwen2Config, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
    "qwen2-yarn": _variant(Qwen2Config, rope_parameters=_YARN),
    "qwen3": _variant(Qwen3Config, head_dim=20),
    "qwen3-window": _variant(
        Qwen3Config,
        head_dim=32,
        use_sliding_window=True,
        sliding_window=WINDOW,
        layer_types=_MIXED,
    ),
    "yi": _variant(rewrite={"model_type": "Yi"}, rope_parameters={"rope_type": "default", "rope_theta": 5000000.0}),
    # transformers has no class for InternLM 1, which is Llama with biases on q, k, v and o.
    "internlm": _variant(
        rewrite={"model_type": "internlm", "bias": True},
        dropped=("attention_bias",),
        num_key_value_heads=6,
        attention_bias=True,
    ),
    "internlm-dynamic": _beyond(
        _variant(
            rewrite={"model_type": "internlm", "bias": True}
            | {"rotary": {"base": 10000, "type": "dynamic", "scaling_factor": 2.0}},
            dropped=("attention_bias", "rope_parameters"),
            num_key_value_heads=6,
            attention_bias=True,
            max_position_embeddings=100,
            rope_parameters=_DYNAMIC,
        )
    ),
    "internlm2": Variant(internlm2(bias=False)),
    "internlm2-bias": Variant(internlm2(bias=True)),
    "internlm2-dynamic": _beyond(Variant(internlm2(bias=False, trained=100, dynamic=True))),
    "internlm2-log-n-by-setting": _beyond(Variant(internlm2(bias=False, trained=40, with_log_n=True)), use_logn_attn=1),
    "baichuan-7b": Variant(baichuan(7, 1)),
    "baichuan-13b": Variant(baichuan(13, 1)),
    "baichuan2-7b": Variant(baichuan(7, 2)),
    "baichuan2-13b": Variant(baichuan(13, 2, heads=8)),
    "phi3": _variant(Phi3Config, sliding_window=WINDOW),
    "phi3-longrope": _variant(
        Phi3Config,
        original_max_position_embeddings=64,
        rope_parameters=_LONGROPE | {"partial_rotary_factor": 0.75},
        tie_word_embeddings=True,
    ),
    "gemma2": _variant(
        Gemma2Config,
        head_dim=32,
        sliding_window=WINDOW,
        query_pre_attn_scalar=24,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=8.0,
        tie_word_embeddings=True,
    ),
    "gemma3": _variant(
        Gemma3TextConfig,
        head_dim=32,
        sliding_window=WINDOW,
        query_pre_attn_scalar=24,
        layer_types=_MIXED,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
        tie_word_embeddings=True,
    ),
    "mixtral": _variant(MixtralConfig, num_local_experts=5, num_experts_per_tok=2),
    "mixtral-window": _variant(MixtralConfig, num_local_experts=4, num_experts_per_tok=3, sliding_window=WINDOW),
    "qwen2-moe": _variant(
        Qwen2MoeConfig,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=44,
        shared_expert_intermediate_size=72,
        mlp_only_layers=[1],
        norm_topk_prob=True,
    ),
    "glm4-moe": _variant(
        Glm4MoeConfig,
        head_dim=16,
        attention_bias=True,
        use_qk_norm=True,
        first_k_dense_replace=1,
        n_routed_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=48,
        n_shared_experts=2,
        routed_scaling_factor=1.8,
    ),
    "glm4v-moe": _with_images(
        Glm4vMoeConfig,
        {
            **{"n_routed_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 44, "head_dim": 16},
            "rope_parameters": {**_MROPE, "mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5},
        },
        **{"depth": 1, "hidden_size": 16, "out_hidden_size": 96, "num_heads": 1, "intermediate_size": 16},
    ),
    "solar-open": _variant(
        SolarOpenConfig,
        dropped=("intermediate_size",),
        head_dim=16,
        n_routed_experts=5,
        num_experts_per_tok=2,
        moe_intermediate_size=44,
        attention_bias=True,
    ),
    "dots1": _variant(
        Dots1Config,
        head_dim=16,
        n_routed_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=44,
        n_shared_experts=2,
        first_k_dense_replace=1,
        routed_scaling_factor=1.7,
        n_group=2,
        topk_group=1,
        norm_topk_prob=True,
    ),
    "mellum": _variant(
        MellumConfig,
        head_dim=16,
        num_experts=5,
        num_experts_per_tok=2,
        moe_intermediate_size=44,
        sliding_window=WINDOW,
        layer_types=_MIXED,
        mlp_layer_types=["dense", "sparse", "sparse"],
        rope_parameters={"full_attention": _YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0}},
    ),
    "minimax-m2": _variant(
        MiniMaxM2Config,
        rewrite={"rotary_dim": 8},
        dropped=("rope_parameters",),
        head_dim=16,
        num_local_experts=5,
        num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
    ),
    "hunyuan-moe": _variant(
        HunYuanMoEV1Config,
        head_dim=16,
        num_experts=5,
        moe_topk=2,
        rope_parameters={**_DYNAMIC, "factor": 1.0, "alpha": 50.0},
    ),
    "hy-v3": _variant(
        HYV3Config, head_dim=16, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=44, num_shared_experts=2
    ),
    "glm4-moe-groups": _variant(
        Glm4MoeConfig,
        head_dim=16,
        n_routed_experts=12,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        moe_intermediate_size=44,
        norm_topk_prob=False,
    ),
    "ernie4.5-moe": _variant(
        Ernie4_5_MoeConfig,
        moe_num_experts=7,
        moe_k=3,
        moe_intermediate_size=48,
        moe_num_shared_experts=1,
        moe_norm_min=0.14,
        tie_word_embeddings=True,
    ),
    "qwen3-moe": _variant(
        Qwen3MoeConfig,
        head_dim=20,
        num_experts=7,
        num_experts_per_tok=3,
        moe_intermediate_size=44,
        norm_topk_prob=True,
    ),
    "qwen3-moe-dense-layers": _variant(
        Qwen3MoeConfig,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        mlp_only_layers=[1],
        norm_topk_prob=False,
    ),
}
if InternLM3Config is not None:
    VARIANTS["internlm3"] = _variant(InternLM3Config, head_dim=24)
    VARIANTS["internlm3-biases"] = _variant(
        InternLM3Config,
        {"qkv_bias": True, "bias": True},
        ("attention_bias", "mlp_bias"),
        head_dim=16,
        attention_bias=True,
        mlp_bias=True,
    )


def _model(config: Any, **options: Any) -> PreTrainedModel:
    """Return a random model of a config; with images, the complete model."""
    causal = AutoModelForCausalLM if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModelForImageTextToText
    model: PreTrainedModel = causal.from_config(config, attn_implementation="eager", **options)
    return model.eval()


def write_model(
    folder: Path, variant: Variant, seed: int, dtype: torch.dtype = torch.float32, *, scale: float = 0.2
) -> PreTrainedModel:
    """Write a model of transformers and return it, with its weights rounded to `dtype` and stored in fp32.

    Weights are large enough that logits spread over several units and the most likely token is clear. scale: their
    standard deviation; a wider model needs a smaller one.
    """
    generator = torch.Generator().manual_seed(seed)
    model = _model(variant.config)
    gemma = "gemma" in variant.config.model_type
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if re.search(r"norm\d*\.weight$", name):
                # Gemma's norms add 1. Without this, its scaled and tied embedding would outweigh the layers, and the
                # model would repeat every token.
                center = (8 if ".post_" in name else 0) if gemma else 1
                weight.copy_(center + 0.2 * noise)
            elif name.endswith(".bias"):
                weight.copy_(0.3 * noise)
            else:
                weight.copy_(scale * noise)
        for name, bias in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                bias.copy_(0.3 * torch.randn(bias.shape, generator=generator))
    # Not model.to(dtype), which would also round the rotary frequencies, which no checkpoint contains.
    for name, parameter in model.named_parameters():
        if not _stays_fp32(model, name):
            parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype
    model.save_pretrained(folder)
    file = folder / "config.json"
    config = {**json.loads(file.read_text()), **variant.rewrite}
    file.write_text(json.dumps({key: value for key, value in config.items() if key not in variant.dropped}))
    write_byte_tokenizer(folder, VOCAB)
    # Gemma's embedding factor is rounded like the weights.
    scaling = getattr(model.get_input_embeddings(), "embed_scale", None)
    if scaling is not None:
        scaling.copy_(scaling.to(dtype))
    return model.to(torch.float32)


def _stays_fp32(model: PreTrainedModel, name: str) -> bool:
    """Whether the family keeps a weight in fp32, such as the router's."""
    return any(kept in name for kept in model._keep_in_fp32_modules_strict or ())


def load_model(folder: Path, variant: Variant, dtype: torch.dtype) -> PreTrainedModel:
    """Load a written model like users of transformers: computed in `dtype`, except for values that transformers keeps
    in fp32, such as the rotary frequencies."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, config=variant.config, dtype=dtype, attn_implementation="eager", local_files_only=True
    )
    assert model.dtype == dtype
    return model.eval()


def prompts_of(seed: int, lengths: Sequence[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in lengths]


@dataclass(frozen=True)
class Reference:
    """Greedy tokens, the log probabilities of the whole vocabulary at each, and the smallest lead of a top token."""

    token_ids: list[int]
    logprobs: torch.Tensor  # [tokens, vocab], float64
    least_lead: float


def _reference(token_ids: list[int], logprobs: torch.Tensor) -> Reference:
    top = logprobs.topk(2).values
    return Reference(token_ids, logprobs, float((top[:, 0] - top[:, 1]).min()))


def greedy(model: PreTrainedModel, prompt: list[int], tokens: int) -> Reference:
    """Generate with transformers, one prompt at a time and without an end token."""
    _forget_lengths(model)
    with torch.no_grad():
        out: Any = model.generate(
            torch.tensor([prompt], device=model.device),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long, device=model.device),
            max_new_tokens=tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
    logprobs = torch.log_softmax(torch.cat(out.logits).double(), dim=-1)
    return _reference(out.sequences[0, len(prompt) :].tolist(), logprobs)


def logprobs_of(model: PreTrainedModel, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """[answer, vocab]: the model's log probabilities at each token of the given answer."""
    cache = DynamicCache(config=model.config)
    logits = []
    with torch.no_grad():
        for piece in _pieces(model, prompt, answer):
            logits.append(model(torch.tensor([piece], device=model.device), past_key_values=cache).logits[0])
    return torch.log_softmax(torch.cat(logits)[len(prompt) - 1 : -1].double(), dim=-1)


def _pieces(model: PreTrainedModel, prompt: list[int], answer: list[int]) -> list[list[int]]:
    """Split the sequence if longrope changes to its long factors within the answer; otherwise return it whole.

    A step beyond the original length uses the long factors for rotation, all others use the short ones. (When it
    generates, transformers computes a sequence again there, which needs a prefill of twice the length for one token.)
    """
    whole = prompt + answer
    rotary = getattr(model.model, "rotary_emb", None)
    if rotary is None or getattr(rotary, "rope_type", "") != "longrope":
        return [whole]
    turn: int = model.config.rope_parameters["original_max_position_embeddings"]
    return [whole[:turn], whole[turn:]] if len(prompt) <= turn < len(whole) else [whole]


def _forget_lengths(model: PreTrainedModel) -> None:
    """Reset dynamic scaling, which remembers the longest sequence, before each prompt."""
    rotary = getattr(model.model, "rotary_emb", None)
    if rotary is not None and getattr(rotary, "rope_type", "") == "dynamic":
        rotary.max_seq_len_cached = rotary.original_max_seq_len
        rotary.inv_freq = rotary.original_inv_freq.clone()


class ReferenceModel:
    """A model of a variant in a folder, and its expected output."""

    def __init__(self, variant: Variant, folder: Path, seed: int) -> None:
        self._stepwise = variant.stepwise
        self._numpy: NumpyModel | None = None
        self._torch: PreTrainedModel | None = None
        if isinstance(variant.config, NumpyFamily):
            self._numpy = NumpyModel(variant.config, folder, seed)
            write_byte_tokenizer(folder, VOCAB)
        else:
            self._torch = write_model(folder, variant, seed)

    def expected(self, prompt: list[int], answer: list[int]) -> Reference:
        """Return the greedy answer with the length of `answer`.

        Unless it must be generated, it is computed by giving `answer` to the model. If each of its tokens is the most
        likely one, it is the greedy answer. Otherwise the first other token is the difference.
        """
        if self._numpy is not None:
            logprobs = torch.from_numpy(self._numpy.logprobs(prompt, answer))
        elif self._stepwise:
            assert self._torch is not None
            return greedy(self._torch, prompt, len(answer))
        else:
            assert self._torch is not None
            logprobs = logprobs_of(self._torch, prompt, answer)
        return _reference(logprobs.argmax(-1).tolist(), logprobs)


def ranks(count: int) -> dict[str, int | str]:
    """Return settings for this number of ranks: each on its own GPU if there are enough, otherwise all on the first."""
    settings: dict[str, int | str] = {"tensor_para_size": count}
    if os.environ.get("CHARONIA_DEVICE") == "cuda" and torch.cuda.device_count() < count:
        settings["device_ids"] = ",".join(["0"] * count)
    return settings
