"""Families: config.json is mapped to the engine's keys, and unsupported features are rejected with their names."""

from __future__ import annotations

import re
from typing import Any

import pytest

from charonia import _engine
from charonia.errors import ModelError, UnsupportedError
from charonia.families import FAMILIES, TensorPart, describe

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
        spec = describe({**LLAMA, "model_type": model_type, "num_key_value_heads": 2}, "m")
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


@pytest.mark.parametrize("model_type", ["ernie4_5", "seed_oss", "ministral3", "cwm", "iquestcoder", "internlm3"])
def test_a_head_dim_of_null_is_hidden_size_by_heads(model_type: str) -> None:
    config = {**LLAMA, "model_type": model_type}
    assert describe(config, "m").config.size_per_head == 128
    assert describe({**config, "head_dim": None}, "m").config.size_per_head == 16


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


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        ({"type": "linear", "factor": 4.0}, {"rope_factor": 4.0}),
        (
            {"rope_type": "dynamic", "factor": 2.0},
            {"rope_factor": 2.0, "rope_original_max_position_embeddings": 128},
        ),
        (
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": None},
            {
                "rope_factor": 4.0,
                "rope_original_max_position_embeddings": 32,
                "rope_beta_fast": 32.0,
                "rope_beta_slow": 1.0,
                "rope_truncate": True,
                "rope_attention_factor": 0.0,
            },
        ),
        (
            {
                "type": "yarn",
                "original_max_position_embeddings": 32,
                "mscale": 0.7,
                "mscale_all_dim": 1,
                "truncate": False,
            }
            | {"beta_fast": 16, "beta_slow": 2, "attention_factor": 1.5},
            {
                "rope_factor": 4.0,  # max_position_embeddings / original_max_position_embeddings
                "rope_beta_fast": 16.0,
                "rope_beta_slow": 2.0,
                "rope_truncate": False,
                "rope_attention_factor": 1.5,
                "rope_mscale": 0.7,
                "rope_mscale_all_dim": 1.0,
            },
        ),
        (
            {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.5] * 8}
            | {"original_max_position_embeddings": 64},
            {
                "rope_factor": 2.0,
                "rope_original_max_position_embeddings": 64,
                "rope_short_factors": (1.0,) * 8,
                "rope_long_factors": (2.5,) * 8,
            },
        ),
    ],
)
def test_every_rope_scaling_is_read(scaling: dict[str, Any], expected: dict[str, Any]) -> None:
    for spelling in ({"rope_scaling": scaling}, {"rope_parameters": {"rope_theta": 10000.0, **scaling}}):
        config = describe({**LLAMA, **spelling}, "m").config
        assert config.rope_scaling_type == scaling.get("rope_type", scaling.get("type"))
        assert {key: getattr(config, key) for key in expected} == expected


def test_windows_are_those_of_the_family() -> None:
    def windows(**changes: Any) -> tuple[int, str]:
        config = describe({**LLAMA, **changes}, "m").config
        return config.sliding_window, config.layer_windows

    mixed = ["sliding_attention", "full_attention"]
    assert windows(model_type="mistral", sliding_window=32) == (32, "")
    assert windows(model_type="mistral", sliding_window=None) == (0, "")
    assert windows(model_type="qwen2", sliding_window=32) == (0, "")
    qwen = {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 32}
    assert windows(**qwen, max_window_layers=1) == (32, "fs")
    assert windows(**qwen, max_window_layers=0) == (32, "")
    assert windows(**qwen, max_window_layers=28) == (0, "")
    assert windows(**qwen, layer_types=mixed) == (32, "sf")
    assert windows(model_type="phi3", sliding_window=32) == (32, "")
    assert windows(model_type="gemma2", num_hidden_layers=3) == (4096, "sfs")
    assert windows(model_type="gemma3_text", num_hidden_layers=7, sliding_window=16) == (16, "sssssfs")
    assert windows(model_type="gemma3_text", num_hidden_layers=4, sliding_window_pattern=2) == (4096, "sfsf")
    # A missing key means the default window; null means no window.
    assert windows(model_type="mistral") == (4096, "")
    assert windows(model_type="mistral", sliding_window=32, layer_types=mixed) == (32, "sf")
    assert windows(model_type="ministral", sliding_window=32, layer_types=mixed) == (32, "sf")
    # If the window is disabled, layers that are listed with a window have none.
    assert windows(model_type="qwen2", sliding_window=32, layer_types=mixed) == (0, "")
    assert windows(model_type="llama", sliding_window=None) == (0, "")


@pytest.mark.parametrize("model_type", ["exaone4", "cohere2"])
def test_only_layers_with_a_window_are_rotated_even_if_there_is_none(model_type: str) -> None:
    def rotated(**changes: Any) -> str:
        return describe({**LLAMA, "model_type": model_type, **changes}, "m").config.layer_rotary

    assert rotated(sliding_window=32, layer_types=["full_attention"] * 2) == "nn"
    assert rotated(sliding_window=32, layer_types=["full_attention", "sliding_attention"]) == "nr"
    assert rotated(sliding_window=32, layer_types=["sliding_attention"] * 2) == ""


def test_phi3_was_trained_for_4096_positions_where_config_json_does_not_say_it() -> None:
    rope = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    phi3 = {**LLAMA, "model_type": "phi3", "max_position_embeddings": 131072, "rope_scaling": rope}
    assert describe(phi3, "m").config.rope_original_max_position_embeddings == 4096
    named = {**phi3, "original_max_position_embeddings": 64}
    assert describe(named, "m").config.rope_original_max_position_embeddings == 64


def test_internlms_own_rotary_spelling() -> None:
    config = describe({**LLAMA, "model_type": "internlm", "rotary": {"base": 20000, "type": "dynamic"}}, "m").config
    assert (config.rope_theta, config.rope_scaling_type, config.rope_factor) == (20000.0, "dynamic", 1.0)
    config = describe({**LLAMA, "model_type": "internlm", "rotary": {"base": 20000, "type": "origin"}}, "m").config
    assert (config.rope_theta, config.rope_scaling_type) == (20000.0, "default")


def test_internlm2s_interleaved_tensor_is_taken_apart_by_groups() -> None:
    spec = describe({**LLAMA, "model_type": "internlm2", "num_key_value_heads": 2, "bias": False}, "m")
    parts = spec.tensors["layers.1.attention.w_qkv.0.weight"]
    assert {(part.name, part.shape) for part in parts} == {("model.layers.1.attention.wqkv.weight", (128, 64))}
    # Two groups of two q heads, one k head and one v head, 16 rows each.
    assert [part.rows for part in parts] == [(0, 32), (64, 96), (32, 48), (96, 112), (48, 64), (112, 128)]
    assert spec.tensors["tok_embeddings.weight"][0].name == "model.tok_embeddings.weight"
    assert spec.tensors["output.weight"][0].name == "output.weight"
    assert spec.tensors["layers.0.feed_forward.w1.0.weight"][0].name == "model.layers.0.feed_forward.w1.weight"
    assert "layers.0.attention.w_qkv.0.bias" not in spec.tensors


def test_internlm3s_biases_in_both_spellings() -> None:
    def biases(**changes: Any) -> tuple[bool, bool, bool]:
        config = describe({**LLAMA, "model_type": "internlm3", **changes}, "m").config
        return config.attn_bias, config.attn_output_bias, config.mlp_bias

    assert biases() == (False, False, False)
    assert biases(qkv_bias=True, bias=False) == (True, False, False)
    assert biases(qkv_bias=False, bias=True) == (False, True, True)
    assert biases(attention_bias=True, mlp_bias=True) == (True, True, True)


def test_qwen1s_halved_layers_and_its_gate_that_comes_second() -> None:
    own = {"kv_channels": 16, "seq_length": 64, "rotary_emb_base": 2e4, "layer_norm_epsilon": 1e-5}
    spec = describe({**LLAMA, "model_type": "qwen", **own, "rms_norm_eps": None}, "m")
    config = spec.config
    assert (config.inter_size, config.size_per_head, config.norm_eps) == (80, 16, 1e-5)
    assert (config.rope_theta, config.rope_scaling_type, config.rope_original_max_position_embeddings) == (
        2e4,
        "qwen",
        64,
    )
    assert (config.logn_length, config.max_position_embeddings, config.rotary_embedding) == (64, 128, 16)
    assert (config.attn_bias, config.attn_output_bias, config.mlp_bias) == (True, False, False)
    assert spec.tensors["layers.0.feed_forward.w1.0.weight"][0].name == "transformer.h.0.mlp.w2.weight"
    assert spec.tensors["layers.0.feed_forward.w3.0.weight"][0].name == "transformer.h.0.mlp.w1.weight"
    bias = spec.tensors["layers.1.attention.w_qkv.0.bias"]
    assert [(part.name, part.rows) for part in bias] == [
        ("transformer.h.1.attn.c_attn.bias", rows) for rows in ((0, 64), (64, 128), (128, 192))
    ]
    ends = {"eos_token_id": None, "vocab_size": 151936}
    assert describe({**LLAMA, "model_type": "qwen", **own, **ends}, "m").config.end_id == (151643,)
    chat = {"eos_token_id": 151643, "chat_format": "chatml"}
    assert describe({**LLAMA, "model_type": "qwen", **own, **chat}, "m").config.end_id == (151643, 151645, 151644)
    plain = {"use_dynamic_ntk": False, "use_logn_attn": False, "no_bias": False}
    config = describe({**LLAMA, "model_type": "qwen", **own, **plain}, "m").config
    assert (config.rope_scaling_type, config.logn_length, config.mlp_bias) == ("default", 0, True)


def test_baichuans_are_told_apart_by_their_configs() -> None:
    seven = describe({**LLAMA, "model_type": "baichuan"}, "m").config
    assert (seven.alibi, seven.rotary_embedding, seven.normalize_output) == (False, 16, False)
    thirteen = {**LLAMA, "model_type": "baichuan", "model_max_length": 256}
    del thirteen["max_position_embeddings"]
    config = describe(thirteen, "m").config
    assert (config.alibi, config.rotary_embedding, config.max_position_embeddings) == (True, 0, 256)
    assert describe({**thirteen, "z_loss_weight": 0}, "m").config.normalize_output
    assert describe({**thirteen, "vocab_size": 125696}, "m").config.normalize_output
    parts = describe(thirteen, "m").tensors["layers.0.attention.w_qkv.0.weight"]
    assert [part.rows for part in parts] == [(0, 64), (64, 128), (128, 192)]
    with pytest.raises(ModelError, match="neither max_position_embeddings"):
        describe({**thirteen, "model_max_length": None}, "m")


def test_phi3s_stacked_tensors_and_partial_rotation() -> None:
    config = {**LLAMA, "model_type": "phi3", "num_key_value_heads": 2, "partial_rotary_factor": 0.75}
    spec = describe(config, "m")
    assert spec.config.rotary_embedding == 12
    assert [part.rows for part in spec.tensors["layers.0.attention.w_qkv.0.weight"]] == [(0, 64), (64, 96), (96, 128)]
    (gate,), (up,) = (spec.tensors[f"layers.0.feed_forward.{name}.0.weight"] for name in ("w1", "w3"))
    assert (gate.name, gate.rows, up.name, up.rows) == (
        "model.layers.0.mlp.gate_up_proj.weight",
        (0, 160),
        "model.layers.0.mlp.gate_up_proj.weight",
        (160, 320),
    )
    factors = {"short_factor": [1.0] * 6, "long_factor": [2.0] * 6}
    for name in ("su", "longrope"):
        scaled = {**config, "original_max_position_embeddings": 32, "rope_scaling": {"type": name, **factors}}
        found = describe(scaled, "m").config
        assert (found.rope_scaling_type, found.rope_factor) == ("longrope", 4.0)
        assert (found.rope_original_max_position_embeddings, found.rope_long_factors) == (32, (2.0,) * 6)


def test_gemmas_norms_caps_and_scales() -> None:
    spec = describe({**LLAMA, "model_type": "gemma2", "query_pre_attn_scalar": 64, "head_dim": 24}, "m")
    config = spec.config
    assert (config.norm_unit_offset, config.post_norms, config.activation) == (True, True, "gelu_tanh")
    assert (config.attention_soft_cap, config.logit_soft_cap, config.attention_scale) == (50.0, 30.0, 0.125)
    assert (config.embedding_scale, config.tie_word_embeddings, config.qk_norm) == (8.0, True, False)
    names = ("attention_norm", "attention_post_norm", "ffn_norm", "ffn_post_norm")
    assert [spec.tensors[f"layers.0.{name}.weight"][0].name.split(".")[-2] for name in names] == [
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ]
    assert (
        describe({**LLAMA, "model_type": "gemma2", "attn_logit_softcapping": None}, "m").config.attention_soft_cap == 0
    )


def test_gemma3s_two_rotary_bases_in_both_spellings() -> None:
    gemma = {**LLAMA, "model_type": "gemma3_text", "head_dim": 16}
    old = {"rope_theta": 2e6, "rope_local_base_freq": 2e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    new = {
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
        }
    }
    for spelling in (old, new):
        config = describe({**gemma, **spelling}, "m").config
        assert (config.rope_theta, config.rope_local_theta) == (2e6, 2e4)
        assert (config.rope_scaling_type, config.rope_factor) == ("linear", 8.0)
    config = describe(gemma, "m").config
    assert (config.rope_theta, config.rope_local_theta, config.qk_norm) == (1e6, 1e4, True)
    assert (config.logit_soft_cap, config.attention_soft_cap) == (0, 0)


def test_gemma3_with_images_is_its_text_part() -> None:
    text = {"model_type": "gemma3_text", "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2}
    spec = describe({"model_type": "gemma3", "text_config": text, "eos_token_id": [1, 106]}, "m")
    config = spec.config
    assert (config.head_num, config.kv_head_num, config.size_per_head, config.vocab_size) == (8, 4, 256, 262208)
    assert config.end_id == (1, 106)
    assert "vision_tower." in spec.ignored and ("language_model.model.", "model.") in spec.prefixes
    with pytest.raises(ModelError, match="text_config is missing"):
        describe({"model_type": "gemma3"}, "m")


def test_qwen2_moe_has_a_gated_shared_expert_beside_its_experts() -> None:
    given = {**LLAMA, "model_type": "qwen2_moe", "num_hidden_layers": 3, "num_experts": 4, "num_experts_per_tok": 2}
    given |= {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 96, "mlp_only_layers": [0]}
    spec = describe(given, "m")
    config = spec.config
    assert (config.attn_bias, config.attn_output_bias, config.layer_experts) == (True, False, "dmm")
    assert (config.shared_expert_inter_size, config.shared_expert_gate, config.router_bias) == (96, True, False)
    at = "layers.1.feed_forward."
    assert spec.tensors[f"{at}shared.w2.0.weight"] == (
        TensorPart("model.layers.1.mlp.shared_expert.down_proj.weight", (64, 96)),
    )
    assert spec.tensors[f"{at}shared_gate.weight"] == (
        TensorPart("model.layers.1.mlp.shared_expert_gate.weight", (1, 64)),
    )
    assert "layers.0.feed_forward.shared.w1.0.weight" not in spec.tensors
    assert describe({**given, "qkv_bias": False}, "m").config.attn_bias is False
    windows = describe({**given, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2}, "m").config
    assert (windows.sliding_window, windows.layer_windows) == (7, "sff")


def test_glm4_moe_chooses_by_sigmoids_and_biases() -> None:
    given = {**LLAMA, "model_type": "glm4_moe", "num_hidden_layers": 3, "n_routed_experts": 8, "head_dim": 16}
    given |= {"num_experts_per_tok": 3, "moe_intermediate_size": 32, "n_shared_experts": 2, "use_qk_norm": True}
    given |= {"routed_scaling_factor": 2.5, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 2}
    spec = describe(given, "m")
    config = spec.config
    assert (config.rotary_embedding, config.qk_norm, config.layer_experts) == (8, True, "ddm")
    assert (config.router_score, config.router_bias, config.router_scale) == ("sigmoid", True, 2.5)
    assert (config.router_groups, config.router_top_groups, config.router_fp32) == (4, 2, True)
    assert (config.shared_expert_inter_size, config.shared_expert_gate, config.renormalize_experts) == (64, False, True)
    assert spec.tensors["layers.2.feed_forward.gate.bias"] == (
        TensorPart("model.layers.2.mlp.gate.e_score_correction_bias", (8,)),
    )
    assert spec.tensors["layers.2.feed_forward.shared.w1.0.weight"][0].name.startswith("model.layers.2.mlp.shared_exp")
    assert "model.layers.3." in spec.ignored
    plain = describe({**given, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0}, "m").config
    assert (plain.router_groups, plain.router_top_groups, plain.layer_experts) == (0, 0, "")
    for changes, message in (
        ({"n_group": 3}, "n_group is 3; it must be 1 to 32 and divide the 8 experts into groups of 2 or more"),
        ({"n_group": 8}, "n_group is 8"),
        ({"topk_group": 1}, "topk_group is 1; it must be 1 to 4 (n_group), and these groups must have the 3 experts"),
    ):
        with pytest.raises(ModelError, match=re.escape(message)):
            describe({**given, **changes}, "m")


def test_layers_of_hunyuan_3_that_predict_further_tokens_are_ignored() -> None:
    hunyuan = {**LLAMA, "model_type": "hy_v3", "num_experts": 8}
    assert describe(hunyuan, "m").ignored == ("model.layers.2.",)
    assert describe({**hunyuan, "num_nextn_predict_layers": 2}, "m").ignored == ("model.layers.2.", "model.layers.3.")


def test_ernie4_5_moe_has_experts_in_the_layers_that_config_json_names() -> None:
    given = {**LLAMA, "model_type": "ernie4_5_moe", "num_hidden_layers": 6, "moe_num_experts": 8, "moe_k": 3}
    given |= {"moe_intermediate_size": 32, "moe_num_shared_experts": 2, "moe_norm_min": 1e-3}
    spec = describe(given, "m")
    config = spec.config
    assert (config.layer_experts, config.tie_word_embeddings, config.rotary_interleaved) == ("dmmmmm", True, True)
    assert (config.router_score, config.router_bias, config.router_norm_min) == ("softmax", True, 1e-3)
    assert (config.shared_expert_inter_size, config.shared_expert_gate) == (64, False)
    assert spec.tensors["layers.2.feed_forward.gate.bias"] == (
        TensorPart("model.layers.2.mlp.moe_statics.e_score_correction_bias", (1, 8)),
    )
    some = {"moe_layer_start_index": 1, "moe_layer_end_index": 4, "moe_layer_interval": 2}
    assert describe({**given, **some}, "m").config.layer_experts == "dmdmdd"
    with pytest.raises(ModelError, match="moe_k is 9; it must be 1 to 8"):
        describe({**given, "moe_k": 9}, "m")


def test_internvls_own_files_have_the_text_part_under_another_name() -> None:
    text = {**LLAMA, "model_type": "qwen2"}
    outer = {"template": "internvl2_5", "downsample_ratio": 0.5, "force_image_size": 448, "hidden_size": 64}
    spec = describe({"model_type": "internvl_chat", "llm_config": text, "vision_config": {}, **outer}, "m")
    assert (spec.config.model_family, spec.config.attn_bias, spec.notes) == ("qwen2", True, ())
    assert "mlp1." in spec.ignored and ("language_model.", "") in spec.prefixes


def test_experts_of_both_families() -> None:
    spec = describe({**LLAMA, "model_type": "mixtral", "num_local_experts": 3, "sliding_window": None}, "m")
    config = spec.config
    assert (config.num_experts, config.experts_per_token, config.expert_inter_size) == (3, 2, 160)
    assert (config.renormalize_experts, config.layer_experts) == (True, "")
    assert spec.tensors["layers.1.feed_forward.gate.weight"] == (
        TensorPart("model.layers.1.block_sparse_moe.gate.weight", (3, 64)),
    )
    names = [
        spec.tensors[f"layers.1.feed_forward.experts.2.{name}.0.weight"][0].name[-9:] for name in ("w1", "w3", "w2")
    ]
    assert names == ["w1.weight", "w3.weight", "w2.weight"]
    assert "layers.1.feed_forward.w1.0.weight" not in spec.tensors

    qwen = {**LLAMA, "model_type": "qwen3_moe", "num_hidden_layers": 4, "num_experts": 4, "num_experts_per_tok": 2}
    qwen |= {"moe_intermediate_size": 32, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    spec = describe(qwen, "m")
    assert (spec.config.layer_experts, spec.config.expert_inter_size) == ("dmdd", 32)
    assert (spec.config.renormalize_experts, spec.config.qk_norm) == (False, True)
    assert spec.tensors["layers.1.feed_forward.experts.3.w2.0.weight"] == (
        TensorPart("model.layers.1.mlp.experts.3.down_proj.weight", (64, 32)),
    )
    assert spec.tensors["layers.3.feed_forward.w1.0.weight"][0].shape == (160, 64)
    assert describe({**qwen, "norm_topk_prob": True}, "m").config.renormalize_experts
    with pytest.raises(ModelError, match="num_experts_per_tok is 5; it must be 1 to 4"):
        describe({**qwen, "num_experts_per_tok": 5}, "m")
    text = {**qwen, "model_type": "qwen3_vl_moe_text"}
    composite = describe({"model_type": "qwen3_vl_moe", "text_config": text, "vision_config": {}}, "m").config
    assert (composite.model_family, composite.renormalize_experts, composite.rope_theta) == ("qwen3_moe", True, 5e5)


def test_every_layers_tensors_are_made_and_none_is_used_twice() -> None:
    for family in FAMILIES:
        spec = describe({**LLAMA, "model_type": family.model_types[0], "num_key_value_heads": 2}, "m")
        taken = [(part.name, part.rows) for parts in spec.tensors.values() for part in parts]
        assert len(taken) == len(set(taken)), family.name
        rows = {}
        for parts in spec.tensors.values():
            for part in parts:
                rows[part.name, part.shape] = rows.get((part.name, part.shape), 0) + part.taken[0]
        assert all(count == shape[0] for (_, shape), count in rows.items()), family.name


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "gpt2"}, "'gpt2' is not supported; supported: Yi, baichuan, "),
        (
            {"model_type": "video_llava", "text_config": {"model_type": "llama"}},
            "'video_llava' (its text part is 'llama') is not supported; supported: Yi, baichuan, ",
        ),
        ({"rope_scaling": {"type": "xpos", "factor": 4.0}}, "'xpos' is not supported; supported: default, linear"),
        ({"model_type": "phi3", "rope_scaling": {"type": "yarn", "factor": 4.0}}, "'yarn' is not supported for Phi-3"),
        ({"rope_parameters": {"chunked_attention": {"rope_type": "default"}}}, "'chunked_attention'"),
        (
            {
                "model_type": "gemma3_text",
                "rope_parameters": {"sliding_attention": {"rope_type": "yarn", "factor": 2.0}},
            },
            "'yarn' in layers with a window",
        ),
        ({"model_type": "gemma3_text", "attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0"),
        ({"model_type": "gemma2", "hidden_activation": "gelu"}, "hidden_activation 'gelu'"),
        ({"model_type": "gemma2", "use_bidirectional_attention": True}, "use_bidirectional_attention True"),
        ({"position_embedding_type": "absolute"}, "position_embedding_type 'absolute'"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0"),
        ({"alibi": True}, "alibi True"),
        ({"model_type": "qwen", "scale_attn_weights": False}, "scale_attn_weights False"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "per layer type"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"hidden_act": ["silu"]}, "hidden_act ['silu']"),
        ({"model_type": "qwen2", "layer_types": [["full_attention"], {}]}, "layer_types has ['full_attention']"),
        ({"model_type": "qwen2", "layer_types": ["full_attention", "linear_attention"]}, "'linear_attention'"),
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
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"vocab_size": "300"}, "vocab_size is '300'"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot be grouped over 3"),
        ({"hidden_size": 66}, "66 is not a multiple"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"eos_token_id": [2, 10**12]}, "generation_config.json: eos_token_id is [2, 1000000000000]"),
        ({"bos_token_id": 1 << 31}, "config.json: bos_token_id is 2147483648"),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "requires low_freq_factor, high_freq_factor"),
        ({"rope_scaling": {"type": "linear"}}, "of type linear requires factor"),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0] * 8}},
            "short_factor must be 8 positive numbers",
        ),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps is -1.0"),
        ({"model_type": "qwen", "intermediate_size": 161}, "intermediate_size 161 is odd"),
        ({"model_type": "qwen2", "layer_types": ["full_attention"]}, "num_hidden_layers = 2 types"),
        (
            {"model_type": "mistral", "sliding_window": None, "layer_types": ["sliding_attention"] * 2},
            "there is no sliding_window",
        ),
        ({"rope_scaling": {"rope_type": ["linear"], "factor": 2.0}}, "the rope scaling's type is ['linear']"),
        ({"rope_scaling": {"type": {"a": 1}}}, "the rope scaling's type is {'a': 1}"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 0}},
            "original_max_position_embeddings is 0",
        ),
        ({"rope_theta": float("nan")}, "rope_theta is nan; it must be a finite number"),
        ({"rope_theta": float("inf")}, "rope_theta is inf; it must be a finite number"),
        ({"rope_theta": 10**400}, "rope_theta is an integer that is too large"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; it must be at most 1000"),
        ({"model_type": "mistral", "num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ({"model_type": "mixtral", "num_local_experts": 10**9}, "1000000000 experts in each of 2 layers"),
        ({"num_attention_heads": 2048, "hidden_size": 1 << 15}, "num_attention_heads is 2048; it must be at most 1024"),
        (
            {"num_attention_heads": 1024, "hidden_size": 1024, "num_hidden_layers": 1000},
            "1024 key/value heads in each of 1000 layers exceed the supported maximum of 100000",
        ),
        ({"model_type": "gemma2", "hidden_size": None}, "hidden_size is missing"),
        ({"model_type": "qwen", "rotary_pct": 1e308}, "rotary_pct is 1e+308; it must be from 0 to 1"),
        ({"head_dim": 10**400}, "head_dim is an integer of 1329 bits; it must be at most"),
        ({"max_position_embeddings": 10**400}, "max_position_embeddings is an integer of 1329 bits"),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [10**400] * 8, "long_factor": [1.0] * 8}},
            "short_factor must be 8 positive numbers up to 1e+30",
        ),
        ({"model_type": "gemma2", "query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0"),
        ({"model_type": "gemma3_text", "head_dim": [16]}, "head_dim is [16]"),
        ({"model_type": "gemma3_text", "sliding_window_pattern": 0}, "sliding_window_pattern is 0"),
        *(
            (
                {"model_type": model_type, "mlp_layer_types": [one] * 2},
                "mlp_layer_types must list num_hidden_layers = 2",
            )
            for model_type in ("mellum", "hy_v3")
            for one in ({}, "wide")
        ),
        ({"model_type": "minimax_m2", "head_dim": 0, "rotary_dim": 8}, "head_dim is 0"),
        *(
            ({"model_type": model_type, "rope_scaling": {"type": "dynamic", "alpha": 1e308}}, "has the alpha 1e+308")
            for model_type in ("hunyuan_v1_dense", "hunyuan_v1_moe")
        ),
        (
            {"model_type": "hunyuan_v1_dense", "head_dim": 2, "rope_scaling": {"type": "dynamic", "alpha": 1000.0}},
            "a head has 2 elements",
        ),
    ],
)
def test_a_wrong_value_is_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=re.escape(named)):
        describe({**LLAMA, **changes}, "m")
