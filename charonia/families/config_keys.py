"""Known keys of config.json. An unknown key causes a note, or an error if it may change results.

There are three lists: keys that a family reads (READ_BY_ALL and `Family.keys`), keys that never change what a model
computes (HARMLESS and `Family.harmless`), and keys that change nothing if they have certain values (ONLY and
`Family.only`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

from charonia.errors import UnsupportedError


def words(text: str) -> frozenset[str]:
    """Split a text at white space into keys."""
    return frozenset(text.split())


# llama_spec() reads these for every family. Types and quantisation are read together with the weights.
READ_BY_ALL = words(
    """
    bos_token_id eos_token_id head_dim hidden_act hidden_size intermediate_size max_position_embeddings model_type
    num_attention_heads num_hidden_layers num_key_value_heads original_max_position_embeddings partial_rotary_factor
    rms_norm_eps rope_parameters rope_scaling rope_theta tie_word_embeddings vocab_size
    compression_config dtype quantization_config torch_dtype
    """
)

# These do not change what a trained model computes: names, training, memory, other tasks and generation. Layers for
# multi-token prediction (num_nextn_predict_layers) change no logits. max_window_layers matters only with
# use_sliding_window, and perceiver_config only with use_resampler; both are in ONLY.
HARMLESS = words(
    """
    _attn_implementation _attn_implementation_autoset _attn_implementation_internal _commit_hash
    _flash_attn_2_enabled _from_model_config _model_name_or_path _name_or_path _output_attentions architectures
    attention_dropout attention_probs_dropout_prob attn_implementation attn_pdrop auto_map bad_words_ids
    begin_suppress_tokens bos_token cache_implementation chat_format chunk_size_feed_forward classifier_dropout
    custom_pipelines decoder_start_token_id diversity_penalty do_sample early_stopping embd_pdrop
    encoder_no_repeat_ngram_size eod_token_id eos_token exponential_decay_length_penalty finetuning_task
    forced_bos_token_id forced_eos_token_id gradient_checkpointing hidden_dropout hidden_dropout_prob id2label
    initializer_range internal_version is_decoder is_llama_config label2id length_penalty license loss_type
    low_cpu_mem_usage max_length max_sequence_length max_window_layers min_length mlp_dropout model_max_length
    model_name name_or_path neftune_noise_alpha no_repeat_ngram_size num_beam_groups num_beams num_labels
    num_nextn_predict_layers num_return_sequences output_attentions output_hidden_states output_router_logits
    output_scores pad_token pad_token_id perceiver_config pixel_shuffle_factor prefix pretraining_tp problem_type
    reduce_loss remove_invalid_values repetition_penalty resid_pdrop residual_dropout return_dict
    return_dict_in_generate sbert_ce_default_activation_function sentence_transformers
    router_aux_loss_coef router_jitter_noise router_z_loss_coef sep_token_id softmax_in_fp32
    special_dataset_text_max_len suppress_tokens task_specific_params temperature tf_legacy_loss tokenizer_class
    tokenizer_type top_k top_p torchscript training transformers.js_config transformers_version type_vocab_size
    typical_p unk_token_id unsloth_fixed unsloth_version use_bfloat16 use_cache use_cache_kernel
    use_cache_quantization use_dynamic_ntk_warmup use_flash_attention use_flash_attention_2 use_flash_attn
    use_return_dict xla_device
    """
)


def _full_attention(value: Any) -> bool:
    return isinstance(value, list) and all(kind == "full_attention" for kind in value)


# These keys have no effect if they have one of these values, or null.
ONLY: dict[str, Any] = {
    "add_cross_attention": (False,),
    "alibi": (False,),
    "attention_bias": (False,),
    "attention_in_fp32": (False, True),  # attention is always computed in fp32 here
    "attention_multiplier": (),
    "attention_out_bias": (False,),
    "attention_sink": (False, 0),
    "attn_logit_softcapping": (),
    "bias": (False,),
    "clip_qkv": (),
    "cross_attention_hidden_size": (),
    "embedding_multiplier": (1, 1.0),
    "final_logit_softcapping": (),
    "full_attn_mod": (1,),  # Phi-4-mini: every layer
    "interpolate_factor": (1,),  # likewise
    "is_causal": (True,),
    "is_encoder_decoder": (False,),
    "layer_types": _full_attention,
    "lm_head_bias": (False,),
    "logits_scaling": (1, 1.0),
    "mlp_bias": (False,),
    "mlp_only_layers": ([],),
    "no_bias": (True,),
    "num_sink_tokens": (0,),
    "position_embedding_type": ("rope", "rotary"),
    "pruned_heads": ({},),
    "qk_layer_norms": (False,),
    "qkv_bias": (False,),
    "residual_multiplier": (1, 1.0),
    "rope_interleaved": (False,),
    "rotary_pct": (1, 1.0),
    "scale_attention_softmax_in_fp32": (True,),
    "scale_attn_weights": (True,),
    "shared_expert_intermediate_size": (0,),
    "sliding_window": (0,),
    "tie_encoder_decoder": (False,),
    "use_attention_sinks": (False,),
    "use_bias": (False,),
    "use_bidirectional_attention": (False, "vision"),  # "vision": only within an image
    "use_logn_attn": (False,),
    "use_mrope": (False,),
    "use_qk_norm": (False,),
    "use_resampler": (False,),
    "use_sliding_window": (False,),
    "window_attention": (False,),
}

# A key that contains one of these words may change what a model computes.
_COMPUTES = re.compile(
    r"rope|rotary|attn|attention|sliding|window|interleav|scal|multiplier|norm|expert|moe|router|scoring|topk|bias|causal"
    r"|chunk|mrope|sink|cap|window|group|residual|parallel_block|ntk|yarn|swiglu|clamp",
    re.I,
)


def check_keys(
    config: Mapping[str, Any],
    read: frozenset[str],
    harmless: frozenset[str],
    family: str,
    only: Mapping[str, Any] = MappingProxyType({}),
    of_text: Collection[str] = (),
) -> list[str]:
    """Return the unknown keys that can hardly change results.

    read, harmless, only: the lists of the family. of_text: keys that belong into text_config. Raises UnsupportedError
    with key and value for a known key with a value that the engine would ignore, and for an unknown key that may change
    results.
    """
    unknown = []
    for key, value in config.items():
        if value is None or key in read or (key not in only and key in harmless | HARMLESS):
            continue
        if key == "sliding_window" and config.get("use_sliding_window") is False:
            continue  # models with keys of Qwen and the model_type of Llama
        allowed = only.get(key, ONLY.get(key))
        if allowed is not None:
            if allowed(value) if callable(allowed) else _among(value, allowed):
                continue
            error = f"config.json: {key} {_shown(value)} is not supported for {family}{_supported(allowed)}"
        elif _COMPUTES.search(key):
            error = (
                f"config.json: the key {key} ({_shown(value)}) is unknown for {family}, and results may be wrong "
                "without it. If the model does not use the key, remove it from config.json"
            )
        else:
            unknown.append(key)
            continue
        if key in of_text:
            error = (
                f"config.json: {key} ({_shown(value)}) has no effect outside text_config: move it into text_config, or "
                "remove it"
            )
        raise UnsupportedError(error)
    return unknown


def _supported(allowed: Any) -> str:
    """Return the supported values, in JSON."""
    return "" if callable(allowed) else f"; supported: {', '.join(map(json.dumps, (*allowed, None)))}"


def _among(value: Any, allowed: tuple[Any, ...]) -> bool:
    """Whether `allowed` contains the value. True does not equal 1 here, and False does not equal 0."""
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in allowed)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
