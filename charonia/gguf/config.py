"""Translates the metadata of a GGUF file to the config.json of the model's Hugging Face folder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from charonia.errors import ModelError, UnsupportedError
from charonia.gguf.reader import GgufFile
from charonia.gguf.tokenizer import end_ids

METHOD = "gguf"  # quant_method in the written config.json
# Architectures whose rows of q and k are in the order of an interleaved rotation, but not in Hugging Face's files.
INTERLEAVED = ("baichuan", "granite", "internlm2", "llama", "mistral3", "smollm3")
# Architectures whose norms have 1 added.
ADDED_ONE = ("gemma", "gemma2", "gemma3", "qwen35", "qwen35moe", "qwen3next")
# Architectures with gated delta nets whose v heads are in the order of ggml (ModelConfig.delta_tiled).
TILED = ("qwen35", "qwen35moe")
# Those whose files have -exp(A_log) (ModelConfig.delta_decays).
DECAYS = (*TILED, "qwen3next")
_SOFTMAX, _SIGMOID = 1, 2  # expert_gating_func
_NO_POOLING, _LAST_TOKEN = 0, 3  # pooling_type
_SCALINGS = ("none", "linear", "yarn", "longrope")
_YARN_FACTORS = ("attn_factor", "yarn_attn_factor", "yarn_ext_factor")  # other values than 1 are rejected
_BAICHUAN_13B = 40  # layers; this model has ALiBi, which no metadata say
# Groups of experts, and those that a token reads, for files of DeepSeek V2-Lite, V2 and V3 that lack them: by
# expert_gating_func, number of experts, and number of layers.
_GROUPS = {(_SOFTMAX, 64, 27): (1, 1), (_SOFTMAX, 160, 60): (8, 3), (_SIGMOID, 256, 61): (8, 4)}
_SCALED_BY_WIDTH = (46, 62)  # layers of Gemma 2 27B and Gemma 3 27B, whose queries are scaled by the width of a head
# Keys of config.json that say how many columns of a head are rotated.
_ROTATED_SIZES = {"partial_rotary_factor", "qk_rope_head_dim", "rotary_dim", "rotary_pct"}
# Tensors that config.json has as numbers.
FREQUENCIES = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")

Config = dict[str, Any]


class _Keys:
    """The metadata of an architecture. ModelError names a key that is missing."""

    def __init__(self, model: GgufFile, frequencies: Callable[[str], list[float]]) -> None:
        self.model = model
        self.frequencies = frequencies
        self._all = model.metadata

    def get(self, name: str, default: Any = None) -> Any:
        value = self._all.get(f"{self.model.architecture}.{name}", default)
        if isinstance(value, list) and value and all(one == value[0] for one in value):
            return value[0]  # the same in every layer
        return value

    def need(self, name: str) -> Any:
        value = self.get(name)
        if value is None:
            raise ModelError(f"the GGUF file has no {self.model.architecture}.{name}: use a file of a newer converter")
        return value

    def has(self, tensor: str) -> bool:
        return tensor in self.model.tensors

    @property
    def head_size(self) -> int:
        return int(
            self.get("attention.key_length") or self.need("embedding_length") // self.need("attention.head_count")
        )


def hf_config(model: GgufFile, frequencies: Callable[[str], list[float]]) -> Config:
    """Return config.json. frequencies: returns the values of a tensor of FREQUENCIES.

    Raises UnsupportedError for an unsupported architecture, and ModelError for missing values.
    """
    keys = _Keys(model, frequencies)
    if model.architecture not in ARCHITECTURES:
        raise UnsupportedError(
            f"the GGUF file has the architecture {model.architecture!r}, which is not supported; supported: "
            f"{', '.join(sorted(ARCHITECTURES))}. Use the model's Hugging Face folder, if its family is supported"
        )
    if not keys.get("attention.causal", True):
        raise UnsupportedError(
            "the GGUF file has attention.causal = false: its tokens attend to later tokens, which is not supported. "
            "Use a model that generates text, or an embedding model with causal attention"
        )
    table = model.tensors.get("token_embd.weight")
    if table is None:
        raise ModelError("the GGUF file has no token_embd.weight: it is not the file of a whole language model")
    if keys.need("block_count") > len(model.tensors):
        raise ModelError(f"the GGUF file has {len(model.tensors)} tensors, but {keys.need('block_count')} layers")
    beginning = model.metadata.get("tokenizer.ggml.bos_token_id")
    config: Config = {
        "vocab_size": table.shape[0],
        "hidden_size": keys.need("embedding_length"),
        "num_hidden_layers": keys.need("block_count"),
        "num_attention_heads": keys.need("attention.head_count"),
        "num_key_value_heads": keys.get("attention.head_count_kv", keys.need("attention.head_count")),
        "intermediate_size": keys.get("feed_forward_length", keys.get("expert_feed_forward_length"))
        or keys.need("feed_forward_length"),
        "head_dim": keys.head_size,
        "max_position_embeddings": keys.need("context_length"),
        "rms_norm_eps": keys.get("attention.layer_norm_rms_epsilon", 1e-5),
        "tie_word_embeddings": not keys.has("output.weight"),
        "eos_token_id": end_ids(model.metadata),
        **({} if beginning is None else {"bos_token_id": beginning}),
        "rope_theta": keys.get("rope.freq_base", 10000.0),
        "rope_scaling": _scaling(keys),
        **ARCHITECTURES[model.architecture](keys),
        "dtype": _data_type(model),
        "quantization_config": {"quant_method": METHOD},
    }
    pooling = keys.get("pooling_type", _NO_POOLING)
    if pooling == _LAST_TOKEN:
        config["architectures"] = [f"{config['model_type']}Model"]
    elif pooling != _NO_POOLING:
        raise UnsupportedError(
            f"the GGUF file is an embedding model or a reranker with pooling_type {pooling}, which is not supported; "
            f"supported: {_LAST_TOKEN}, the last token. Use the model's Hugging Face folder"
        )
    rotated = keys.get("rope.dimension_count", keys.head_size)
    if rotated != keys.head_size and not config.keys() & _ROTATED_SIZES:
        raise UnsupportedError(
            f"the GGUF file rotates {rotated} of {keys.head_size} columns of a head (rope.dimension_count), which is "
            f"not supported for {model.architecture}: use the Hugging Face folder"
        )
    return config


def generation_config(model: GgufFile) -> Config:
    """Return the sampling defaults of the file, in the keys of generation_config.json."""
    names = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
    found = {theirs: model.metadata.get(f"general.sampling.{ours}") for ours, theirs in names.items()}
    return {key: value for key, value in found.items() if value is not None}


def _data_type(model: GgufFile) -> str:
    """Return the type of most weights; bf16 if they are quantised."""
    sizes: dict[str, int] = {}
    for tensor in model.tensors.values():
        sizes[tensor.type] = sizes.get(tensor.type, 0) + tensor.end - tensor.begin
    largest = max(sizes, key=lambda kind: sizes[kind])
    return {"F32": "float32", "F16": "float16"}.get(largest, "bfloat16")


def _scaling(keys: _Keys) -> Config | None:
    """Return rope_scaling."""
    kind, longest = keys.get("rope.scaling.type", "linear"), keys.need("context_length")
    # Files of 2023 have the factor as rope.scale_linear. 0 means no factor.
    factor = keys.get("rope.scaling.factor", keys.get("rope.scale_linear", 1.0)) or 1.0
    has_tensors = any(keys.has(name) for name in FREQUENCIES)
    changed = [name for name in _YARN_FACTORS if keys.get(f"rope.scaling.{name}", 1.0) != 1.0] if kind == "yarn" else []
    if kind not in _SCALINGS or changed or (has_tensors and kind in ("linear", "yarn") and factor != 1.0):
        raise UnsupportedError(
            f"the GGUF file has rope.scaling.type {kind!r}{' with ' if changed else ''}{', '.join(changed)}"
            f"{' and frequencies' if has_tensors else ''}, which is not supported; supported: {', '.join(_SCALINGS)}. "
            "Use the Hugging Face folder"
        )
    original = {"original_max_position_embeddings": keys.get("rope.scaling.original_context_length", longest)}
    if keys.has("rope_freqs.weight"):  # of Llama 3: each frequency has a factor, at any length
        factors = keys.frequencies("rope_freqs.weight")
        return {"rope_type": "longrope", "short_factor": factors, "long_factor": factors, "attention_factor": 1.0}
    if keys.has("rope_factors_long.weight"):
        long, short = (keys.frequencies(f"rope_factors_{kind}.weight") for kind in ("long", "short"))
        attention = {"attention_factor": keys.get("rope.scaling.attn_factor", 1.0)}
        return {"rope_type": "longrope", "short_factor": short, "long_factor": long, **attention, **original}
    if kind == "yarn":
        betas = {name: keys.get(f"rope.scaling.yarn_{name}") for name in ("beta_fast", "beta_slow")}
        return {"rope_type": kind, "factor": factor, **original, **betas}
    return {"rope_type": kind, "factor": factor} if kind == "linear" and factor != 1.0 else None


def _layers(keys: _Keys) -> Config:
    """The number of layers without those for multi-token prediction, which are not used."""
    all_layers, predicting = keys.need("block_count"), keys.get("nextn_predict_layers", 0)
    if not 0 <= predicting < all_layers:
        raise ModelError(
            f"the GGUF file has {keys.model.architecture}.nextn_predict_layers = {predicting}; it must be 0 to "
            f"{all_layers - 1}, because block_count is {all_layers}: download the file again"
        )
    return {"num_hidden_layers": all_layers - predicting, "num_nextn_predict_layers": predicting}


def _partial_rotary(keys: _Keys) -> Config:
    return {"partial_rotary_factor": keys.get("rope.dimension_count", keys.head_size) / keys.head_size}


def _attention_bias(keys: _Keys) -> Config:
    return {"attention_bias": keys.has("blk.0.attn_q.bias") or keys.has("blk.0.attn_qkv.bias")}


def _biases(keys: _Keys) -> Config:
    return {**_attention_bias(keys), "mlp_bias": keys.has("blk.0.ffn_up.bias")}


def _window(keys: _Keys, period: int, default: int = 0) -> Config:
    """The window, and which layers have one: all except every period-th, if the file does not list them. default: the
    window, if the file has none."""
    window, layers = keys.get("attention.sliding_window", default), keys.need("block_count")
    if not window:
        return {"sliding_window": None}
    listed = keys.get("attention.sliding_window_pattern", period)
    if isinstance(listed, bool):  # the same in every layer
        listed = [listed] * layers
    if not isinstance(listed, list):
        listed = [(layer + 1) % listed != 0 for layer in range(layers)]
    types = ["sliding_attention" if has_window else "full_attention" for has_window in listed[:layers]]
    return {"sliding_window": window, "layer_types": types}


def _llama(keys: _Keys) -> Config:
    if not keys.get("expert_count"):
        return {"model_type": "llama", **_biases(keys)}
    counts = {"num_local_experts": keys.need("expert_count"), "num_experts_per_tok": keys.need("expert_used_count")}
    return {"model_type": "mixtral", "sliding_window": None, **counts}


def _mistral3(keys: _Keys) -> Config:
    """Mistral Small 3.1 and later, and Ministral 3, whose queries grow with their position."""
    beta = keys.get("attention.temperature_scale")
    mscale, scaling = keys.get("rope.scaling.yarn_log_multiplier", 0.0), _scaling(keys) or {}
    if beta is None and not mscale:
        return {"model_type": "mistral", "sliding_window": None}
    if beta is None or mscale != 1.0 or scaling.get("rope_type") != "yarn":
        raise UnsupportedError(
            f"the GGUF file has rope.scaling.type {scaling.get('rope_type')!r} with yarn_log_multiplier {mscale:g} and "
            f"attention.temperature_scale {beta}, which is not supported for mistral3; supported: yarn with 1 and a "
            "scale, or neither. Use the Hugging Face folder"
        )
    own = {"llama_4_scaling_beta": beta, "mscale": mscale, "mscale_all_dim": mscale}
    return {"model_type": "ministral3", "rope_scaling": {**scaling, **own}}


def _experts(keys: _Keys) -> Config:
    return {
        "num_experts": keys.need("expert_count"),
        "num_experts_per_tok": keys.need("expert_used_count"),
        "moe_intermediate_size": keys.need("expert_feed_forward_length"),
    }


def _qwen2_moe(keys: _Keys) -> Config:
    shared = keys.need("expert_shared_feed_forward_length")
    return {"model_type": "qwen2_moe", **_experts(keys), "shared_expert_intermediate_size": shared}


def _query_scale(keys: _Keys) -> float:
    by_width = keys.need("block_count") in _SCALED_BY_WIDTH
    return float(keys.need("embedding_length") // keys.need("attention.head_count") if by_width else keys.head_size)


def _gemma2(keys: _Keys) -> Config:
    return {
        "model_type": "gemma2",
        "query_pre_attn_scalar": _query_scale(keys),
        # The first files have neither these nor the window: the model's numbers.
        "attn_logit_softcapping": keys.get("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.get("final_logit_softcapping", 30.0),
        **_window(keys, 2, 4096),
    }


def _gemma3(keys: _Keys) -> Config:
    cap = keys.get("final_logit_softcapping")
    return {
        "model_type": "gemma3_text",
        "query_pre_attn_scalar": _query_scale(keys),
        "rope_local_base_freq": keys.get("rope.freq_base_swa", 10000.0),
        "rope_theta": keys.get("rope.freq_base", 1e6),
        **({"final_logit_softcapping": cap} if cap else {}),
        **_window(keys, 6),
    }


def _gemma4(keys: _Keys) -> Config:
    experts = {
        "enable_moe_block": True,
        "num_experts": keys.get("expert_count", 0),
        "top_k_experts": keys.get("expert_used_count"),
        "moe_intermediate_size": keys.get("expert_feed_forward_length"),
    }
    layers, has_window = keys.need("block_count"), _of_layers(keys, "attention.sliding_window_pattern")
    widths, heads = (_of_layers(keys, name) for name in ("feed_forward_length", "attention.head_count_kv"))
    full = next(layer for layer in range(layers) if not has_window[layer])
    size, turned = keys.head_size, keys.frequencies("rope_freqs.weight").count(1.0)
    per_layer = keys.get("embedding_length_per_layer_input", 0)
    table = keys.model.tensors.get("per_layer_token_embd.weight")
    return {
        "model_type": "gemma4_text",
        **(experts if experts["num_experts"] else {}),
        "intermediate_size": widths[0],
        "use_double_wide_mlp": max(widths) > widths[0],
        "head_dim": keys.get("attention.key_length_swa", size),
        "global_head_dim": size,
        "num_key_value_heads": next(count for count, one in zip(heads, has_window, strict=True) if one),
        "num_global_key_value_heads": heads[full],
        "attention_k_eq_v": not keys.has(f"blk.{full}.attn_v.weight"),
        "num_kv_shared_layers": keys.get("attention.shared_kv_layers", 0),
        "hidden_size_per_layer_input": per_layer,
        "vocab_size_per_layer_input": table.shape[0] if table else 0,
        "final_logit_softcapping": keys.get("final_logit_softcapping", 0.0),
        "rope_scaling": None,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": 2 * turned / size,
                "rope_theta": keys.get("rope.freq_base", 1e6),
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": keys.get("rope.freq_base_swa", 1e4)},
        },
        **_window(keys, 6),
    }


def _of_layers(keys: _Keys, name: str) -> list[Any]:
    """Return a value for each layer."""
    value = keys.need(name)
    return value if isinstance(value, list) else [value] * keys.need("block_count")


def _phi3(keys: _Keys) -> Config:
    window = keys.get("attention.sliding_window", 0) or None
    original = keys.get("rope.scaling.original_context_length", keys.need("context_length"))
    config = {"model_type": "phi3", "sliding_window": window, **_partial_rotary(keys)}
    return {**config, "original_max_position_embeddings": original}


def _granite(keys: _Keys) -> Config:
    names = {
        "attention.scale": "attention_multiplier",
        "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier",
        "logit_scale": "logits_scaling",
    }
    factors = {theirs: keys.get(ours, 1.0) for ours, theirs in names.items()}
    return {"model_type": "granite", **_biases(keys), **factors}


def _olmo2(keys: _Keys) -> Config:
    if not keys.get("attention.sliding_window"):
        return {"model_type": "olmo2"}
    return {"model_type": "olmo3", **_window(keys, 4)}


def _cohere2(keys: _Keys) -> Config:
    return {
        "model_type": "cohere2",
        "logit_scale": keys.need("logit_scale"),
        "layer_norm_eps": keys.need("attention.layer_norm_epsilon"),
        **_window(keys, 4),
    }


def _glm4(keys: _Keys) -> Config:
    return {"model_type": "glm4", **_attention_bias(keys), **_partial_rotary(keys)}


def _gpt_oss(keys: _Keys) -> Config:
    scaling = _scaling(keys)
    return {
        "model_type": "gpt_oss",
        "num_local_experts": keys.need("expert_count"),
        "num_experts_per_tok": keys.need("expert_used_count"),
        "intermediate_size": keys.need("expert_feed_forward_length"),
        "rope_scaling": scaling and {**scaling, "truncate": False},
        **_window(keys, 2),
    }


def _expert_counts(keys: _Keys, normed: bool = True) -> Config:
    """The experts of GLM-4.5 and DeepSeek. normed: the default of norm_topk_prob."""
    groups = keys.get("expert_group_count", 1) or 1
    return {
        "n_routed_experts": keys.need("expert_count"),
        "num_experts_per_tok": keys.need("expert_used_count"),
        "moe_intermediate_size": keys.need("expert_feed_forward_length"),
        "n_shared_experts": keys.get("expert_shared_count", 0),
        "n_group": groups,
        "topk_group": keys.need("expert_group_used_count") if groups > 1 else 1,
        "first_k_dense_replace": keys.get("leading_dense_block_count", 0),
        "routed_scaling_factor": keys.get("expert_weights_scale", 1.0),
        "norm_topk_prob": keys.get("expert_weights_norm", normed),
    }


def _gate(keys: _Keys, default: int, *supported: int) -> int:
    gate = int(keys.get("expert_gating_func") or default)
    if gate not in supported:
        raise UnsupportedError(
            f"the GGUF file has expert_gating_func {gate}, which is not supported for {keys.model.architecture}; "
            f"supported: {' and '.join(map(str, supported))} ({_SOFTMAX} is the softmax, {_SIGMOID} the sigmoid)"
        )
    return gate


def _sigmoid_experts(keys: _Keys) -> Config:
    _gate(keys, _SIGMOID, _SIGMOID)
    return {**_expert_counts(keys), **_attention_bias(keys)}


def _latents(keys: _Keys) -> Config:
    """Multi-head latent attention, and experts."""
    rotated, scaling = keys.need("rope.dimension_count"), _scaling(keys)
    # The file has a tenth of mscale_all_dim, in 32 bits.
    mscale = round(keys.get("rope.scaling.yarn_log_multiplier", 0.0) * 10, 6)
    if scaling and mscale:
        scaling |= {"mscale": mscale if keys.model.architecture == "deepseek2" else 1.0, "mscale_all_dim": mscale}
    return {
        **_layers(keys),
        "q_lora_rank": keys.get("attention.q_lora_rank"),
        "kv_lora_rank": keys.need("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotated,
        # The first files have no sizes for the absorbed form.
        "qk_nope_head_dim": keys.get("attention.key_length_mla", keys.head_size) - rotated,
        "v_head_dim": keys.get("attention.value_length_mla") or keys.need("attention.value_length"),
        "rope_scaling": scaling,
        **_expert_counts(keys, normed=False),
    }


def _deepseek2(keys: _Keys) -> Config:
    """DeepSeek V2 and V3, and GLM-4.7-Flash. Only routers with sigmoids have biases."""
    if (scale := keys.get("attention.temperature_scale")) is not None:
        raise UnsupportedError(
            f"the GGUF file has attention.temperature_scale {scale:g}, which is not supported for deepseek2"
        )
    config = _latents(keys)
    has_bias = keys.has(f"blk.{config['first_k_dense_replace']}.exp_probs_b.bias")
    gate = _gate(keys, _SIGMOID if has_bias else _SOFTMAX, _SOFTMAX, _SIGMOID)
    if keys.get("expert_group_count") is None:
        experts, layers = config["n_routed_experts"], config["num_hidden_layers"]
        if (gate, experts, layers) not in _GROUPS:
            raise UnsupportedError(
                f"the GGUF file has no deepseek2.expert_group_count, and no known model has {experts} experts in "
                f"{layers} layers with expert_gating_func {gate}: use a file of a newer converter, or the Hugging Face "
                "folder"
            )
        config["n_group"], config["topk_group"] = _GROUPS[gate, experts, layers]
    if gate == _SIGMOID:
        return {"model_type": "deepseek_v3", **config}
    how = "greedy" if config["n_group"] == 1 else "group_limited_greedy"
    return {"model_type": "deepseek_v2", **config, "topk_method": how}


def _mistral4(keys: _Keys) -> Config:
    _gate(keys, _SOFTMAX, _SOFTMAX)
    config = _latents(keys)
    # Converters leave out the growth of queries: the model's number.
    beta = {"llama_4_scaling_beta": keys.get("attention.temperature_scale", 0.1)}
    rope = {"rope_type": "default", "rope_theta": keys.get("rope.freq_base", 10000.0), **(config["rope_scaling"] or {})}
    return {"model_type": "mistral4", **config, "rope_scaling": None, "rope_parameters": {**rope, **beta}}


def _glm4_moe(keys: _Keys) -> Config:
    return {
        "model_type": "glm4_moe",
        **_layers(keys),
        "use_qk_norm": keys.has("blk.0.attn_q_norm.weight"),
        **_sigmoid_experts(keys),
        **_partial_rotary(keys),
    }


def _dots1(keys: _Keys) -> Config:
    return {"model_type": "dots1", "max_window_layers": keys.need("block_count"), **_sigmoid_experts(keys)}


def _hunyuan(keys: _Keys) -> Config:
    """The file has the base of the rotation with alpha."""
    return {"model_type": "hunyuan_v1_dense", **_attention_bias(keys)}


def _hunyuan_moe(keys: _Keys) -> Config:
    return {
        **_hunyuan(keys),
        "model_type": "hunyuan_v1_moe",
        "intermediate_size": keys.need("expert_feed_forward_length"),
        "num_experts": keys.need("expert_count"),
        "moe_topk": keys.need("expert_used_count"),
        "num_shared_expert": keys.get("expert_shared_count", 1),
    }


def _hy_v3(keys: _Keys) -> Config:
    _gate(keys, _SIGMOID, _SIGMOID)
    layers, experts = _layers(keys), _experts(keys)
    has_experts = [keys.has(f"blk.{layer}.ffn_gate_inp.weight") for layer in range(layers["num_hidden_layers"])]
    shared = keys.get("expert_shared_feed_forward_length", experts["moe_intermediate_size"])
    return {
        "model_type": "hy_v3",
        **layers,
        "mlp_layer_types": ["sparse" if one else "dense" for one in has_experts],
        **experts,
        "num_shared_experts": shared // experts["moe_intermediate_size"],
        "router_scaling_factor": keys.get("expert_weights_scale", 1.0),
        **({} if keys.get("expert_weights_norm", True) else {"route_norm": False}),
    }


def _ernie4_5_moe(keys: _Keys) -> Config:
    return {
        "model_type": "ernie4_5_moe",
        "use_bias": False,
        "moe_num_experts": keys.need("expert_count"),
        "moe_k": keys.need("expert_used_count"),
        "moe_intermediate_size": keys.need("expert_feed_forward_length"),
        "moe_num_shared_experts": keys.get("expert_shared_count", 0),
        "moe_layer_start_index": keys.get("leading_dense_block_count", 0),
        "moe_layer_interval": keys.get("interleave_moe_layer_step", 1),
    }


def _minimax_m2(keys: _Keys) -> Config:
    return {
        "model_type": "minimax_m2",
        "num_local_experts": keys.need("expert_count"),
        "num_experts_per_tok": keys.need("expert_used_count"),
        "intermediate_size": keys.need("expert_feed_forward_length"),
        "rotary_dim": keys.get("rope.dimension_count", keys.head_size),
    }


def _lfm2(keys: _Keys) -> Config:
    heads = _of_layers(keys, "attention.head_count_kv")  # 0 in layers with a convolution
    return {
        "model_type": "lfm2",
        "num_key_value_heads": max(heads),
        "layer_types": ["full_attention" if count else "conv" for count in heads],
        "conv_L_cache": keys.need("shortconv.l_cache"),
        "norm_eps": keys.get("attention.layer_norm_rms_epsilon", 1e-5),
        "block_auto_adjust_ff_dim": False,
    }


def _qwen3_5(keys: _Keys, with_experts: str = "qwen3_5_moe_text") -> Config:
    """with_experts: the model_type with experts."""
    layers, v_heads = _layers(keys)["num_hidden_layers"], keys.need("ssm.time_step_rank")
    is_delta = [keys.has(f"blk.{layer}.ssm_a") for layer in range(layers)]
    config = {
        "model_type": "qwen3_5_text",
        "num_hidden_layers": layers,
        "num_key_value_heads": max(_of_layers(keys, "attention.head_count_kv")),
        "layer_types": ["linear_attention" if one else "full_attention" for one in is_delta],
        "linear_num_key_heads": keys.need("ssm.group_count"),
        "linear_num_value_heads": v_heads,
        "linear_key_head_dim": keys.need("ssm.state_size"),
        "linear_value_head_dim": keys.need("ssm.inner_size") // v_heads,
        "linear_conv_kernel_dim": keys.need("ssm.conv_kernel"),
        "attention_bias": any(keys.has(f"blk.{layer}.attn_q.bias") for layer in range(layers)),
        **_partial_rotary(keys),
    }
    if not keys.get("expert_count"):
        return config
    shared = keys.need("expert_shared_feed_forward_length")
    return {**config, **_experts(keys), "model_type": with_experts, "shared_expert_intermediate_size": shared}


def _lfm2_moe(keys: _Keys) -> Config:
    dense = keys.get("leading_dense_block_count", 0)
    return {
        **_lfm2(keys),
        **_experts(keys),
        "model_type": "lfm2_moe",
        "num_dense_layers": dense,
        "norm_topk_prob": True,
        "routed_scaling_factor": keys.get("expert_weights_scale", 1.0),
        "use_expert_bias": keys.has(f"blk.{dense}.exp_probs_b.bias"),
    }


def _qwen3_moe(keys: _Keys) -> Config:
    return {"model_type": "qwen3_moe", "norm_topk_prob": True, **_experts(keys)}


def _mellum(keys: _Keys) -> Config:
    base = keys.get("rope.freq_base", 10000.0)
    local = {"rope_type": "default", "rope_theta": keys.get("rope.freq_base_swa", base)}
    full = {"rope_type": "default", "rope_theta": base, **(_scaling(keys) or {})}
    return {
        **_qwen3_moe(keys),
        "model_type": "mellum",
        "rope_scaling": None,
        "rope_parameters": {"full_attention": full, "sliding_attention": local},
        **_window(keys, 4),
    }


def _baichuan(keys: _Keys) -> Config:
    """Whether a model is Baichuan 2 follows from its vocabulary."""
    if keys.need("block_count") != _BAICHUAN_13B:
        return {"model_type": "baichuan"}
    longest = keys.need("context_length")
    return {"model_type": "baichuan", "max_position_embeddings": None, "model_max_length": longest}


def _qwen(keys: _Keys) -> Config:
    """Qwen 1. Its files lack the trained length, so dynamic NTK and log-n scaling are off, as in llama.cpp."""
    size = keys.head_size
    eps = keys.get("attention.layer_norm_rms_epsilon", keys.get("attention.layer_norm_epsilon", 1e-6))
    own = {"kv_channels": size, "layer_norm_epsilon": eps, "use_dynamic_ntk": False, "use_logn_attn": False}
    rotated = keys.get("rope.dimension_count", size) / size
    return {"model_type": "qwen", **own, "rotary_pct": rotated, "rotary_emb_base": keys.get("rope.freq_base", 10000.0)}


def _plain(model_type: str) -> Callable[[_Keys], Config]:
    return lambda keys: {"model_type": model_type}


ARCHITECTURES: dict[str, Callable[[_Keys], Config]] = {
    "llama": _llama,
    "qwen2": _plain("qwen2"),
    "qwen3": _plain("qwen3"),
    "qwen2moe": _qwen2_moe,
    "qwen3moe": _qwen3_moe,
    "gemma": lambda keys: {"model_type": "gemma", "hidden_activation": "gelu_pytorch_tanh"},
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "phi3": _phi3,
    "smollm3": lambda keys: {"model_type": "smollm3", **_biases(keys)},
    "granite": _granite,
    "olmo2": _olmo2,
    "cohere2": _cohere2,
    "glm4": _glm4,
    "exaone4": lambda keys: {"model_type": "exaone4", **_window(keys, 4)},
    "gpt-oss": _gpt_oss,
    "seed_oss": lambda keys: {"model_type": "seed_oss", **_biases(keys)},
    "glm4moe": _glm4_moe,
    "lfm2": _lfm2,
    "lfm2moe": _lfm2_moe,
    "dots1": _dots1,
    "hunyuan-dense": _hunyuan,
    "hunyuan-moe": _hunyuan_moe,
    "hy_v3": _hy_v3,
    "ernie4_5-moe": _ernie4_5_moe,
    "internlm2": _plain("llama"),  # q, k and v are separate in the file
    "qwen35": _qwen3_5,
    "qwen35moe": _qwen3_5,
    "mistral3": _mistral3,
    "qwen2vl": _plain("qwen2"),
    "qwen3vl": _plain("qwen3"),
    "minimax-m2": _minimax_m2,
    "qwen3vlmoe": _qwen3_moe,
    "mellum": _mellum,
    "baichuan": _baichuan,
    "qwen": _qwen,
    "chatglm": lambda keys: {**_glm4(keys), "model_type": "glm"},
    "deepseek2": _deepseek2,
    "mistral4": _mistral4,
    "qwen3next": lambda keys: _qwen3_5(keys, "qwen3_next"),
    "ernie4_5": lambda keys: {"model_type": "ernie4_5", "use_bias": False},
}
