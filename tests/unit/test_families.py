"""Families: what config.json says becomes the engine's keys, and what the engine lacks is refused by name."""

from __future__ import annotations

import re
from typing import Any

import pytest

from charonia import _engine
from charonia.errors import ModelError, UnsupportedError
from charonia.families import FAMILIES, describe

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 300,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3_ROPE = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def test_every_model_key_is_one_of_the_engines_and_none_is_left_out() -> None:
    attributes = {field.key for field in _engine.config_fields() if field.model_attribute}
    assert set(describe(LLAMA, "m").config.settings()) == attributes


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_the_engine_accepts_what_every_family_writes(family: Any) -> None:
    for model_type in family.model_types:
        spec = describe({**LLAMA, "model_type": model_type}, "m")
        assert spec.config.model_family == family.name
        assert _engine.check_settings(spec.config.settings()) == []


def test_llama_without_newer_keys_has_as_many_kv_heads_as_heads() -> None:
    config = describe(LLAMA, "m").config
    assert (config.head_num, config.kv_head_num, config.size_per_head, config.rotary_embedding) == (4, 4, 16, 16)
    assert (config.start_id, config.end_id, config.rope_theta, config.norm_eps) == (1, (2,), 10000.0, 1e-5)


def test_explicit_head_dim_wins_over_hidden_size_by_heads() -> None:
    spec = describe({**LLAMA, "head_dim": 32}, "m")
    assert spec.config.size_per_head == 32
    assert spec.tensors["layers.0.attention.wo.0.weight"][0].shape == (64, 128)


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3_ROPE}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3_ROPE}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3_ROPE}},
        {"rope_parameters": {"rope_theta": 5e5}, "rope_scaling": {"rope_type": "llama3", **LLAMA3_ROPE}},
    ],
)
def test_llama3_rope_scaling_in_its_older_and_newer_spelling(spelling: dict[str, Any]) -> None:
    config = describe({**LLAMA, **spelling}, "m").config
    assert (config.rope_theta, config.rope_scaling_type, config.rope_factor) == (5e5, "llama3", 8.0)
    assert (config.rope_low_freq_factor, config.rope_high_freq_factor) == (1.0, 4.0)
    assert config.rope_original_max_position_embeddings == 64


def test_biases_are_the_familys_own() -> None:
    def biases(**changes: Any) -> tuple[bool, bool, bool]:
        config = describe({**LLAMA, **changes}, "m").config
        return config.attn_bias, config.attn_output_bias, config.mlp_bias

    assert biases() == (False, False, False)
    assert biases(attention_bias=True) == (True, True, False)
    assert biases(attention_bias=True, mlp_bias=True) == (True, True, True)
    assert biases(model_type="qwen2") == (True, False, False)
    assert biases(model_type="internlm") == (True, True, False)
    assert biases(model_type="internlm", bias=False) == (False, False, False)
    assert biases(model_type="mistral") == (False, False, False)


def test_tied_embeddings_have_no_output_tensor() -> None:
    assert "output.weight" in describe(LLAMA, "m").tensors
    assert "output.weight" not in describe({**LLAMA, "tie_word_embeddings": True}, "m").tensors


def test_qkv_is_stacked_in_that_order_with_grouped_shapes() -> None:
    parts = describe({**LLAMA, "num_key_value_heads": 2}, "m").tensors["layers.1.attention.w_qkv.0.weight"]
    assert [(part.name, part.shape) for part in parts] == [
        ("model.layers.1.self_attn.q_proj.weight", (64, 64)),
        ("model.layers.1.self_attn.k_proj.weight", (32, 64)),
        ("model.layers.1.self_attn.v_proj.weight", (32, 64)),
    ]


def test_mistrals_window_limits_session_len_with_a_warning() -> None:
    spec = describe({**LLAMA, "model_type": "mistral", "sliding_window": 32}, "m")
    assert spec.session_len == 32
    assert "32 instead of 128" in spec.warnings[0]
    for window in (None, 128, 4096):
        spec = describe({**LLAMA, "model_type": "mistral", "sliding_window": window}, "m")
        assert (spec.session_len, spec.warnings) == (0, ())


def test_internlms_own_rotary_spelling() -> None:
    spec = describe({**LLAMA, "model_type": "internlm", "rotary": {"base": 20000, "type": "dynamic"}}, "m")
    assert (spec.config.rope_theta, spec.config.rope_scaling_type, spec.session_len) == (20000.0, "default", 128)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "gpt2"}, "'gpt2' is not supported; supported: Llama 1 to 3.x"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "'yarn'"),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, "'linear'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "per layer type"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"quantization_config": {"quant_method": "awq"}}, "method awq"),
        ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 32}, "use_sliding_window"),
        ({"model_type": "qwen2", "layer_types": ["full_attention", "sliding_attention"]}, "sliding"),
        ({"model_type": "internlm", "rotary": {"type": "xpos"}}, "'xpos'"),
    ],
)
def test_what_the_engine_lacks_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedError, match=re.escape(named)):
        describe({**LLAMA, **changes}, "m")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": None}, "no model_type"),
        ({"hidden_size": None}, "hidden_size is None"),
        ({"vocab_size": "300"}, "vocab_size is '300'"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot be grouped over 3"),
        ({"hidden_size": 66}, "66 is no multiple"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "lacks low_freq_factor, high_freq_factor"),
    ],
)
def test_a_wrong_value_is_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=re.escape(named)):
        describe({**LLAMA, **changes}, "m")
