"""Families: config.json is mapped to the engine's keys, and unsupported features are rejected with their names."""

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


def test_every_model_key_is_one_of_the_engines_and_none_is_left_out() -> None:
    attributes = {field.key for field in _engine.config_fields() if field.model_attribute}
    assert set(describe(LLAMA, "m").config.settings()) == attributes


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_engine_accepts_the_config_of_every_family(family: Any) -> None:
    for model_type in family.model_types:
        # Qwen3.5 has attention in every fourth layer.
        spec = describe({**LLAMA, "model_type": model_type, "num_key_value_heads": 2, "num_hidden_layers": 4}, "m")
        assert spec.config.model_family == family.name
        assert _engine.check_settings(spec.config.settings()) == []


MIXED = ["sliding_attention", "full_attention"]
CONV = ["conv", "full_attention"]
DENSE, EXPERTS = "dense", "experts"
TEXT = {"model_type": "gemma3_text", "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2}
QWEN1 = {"model_type": "qwen", "kv_channels": 16, "seq_length": 64}
CHAT = {"eos_token_id": 151643, "chat_format": "chatml"}
BAICHUAN = {"model_type": "baichuan", "max_position_embeddings": None, "model_max_length": 256}
INTERNLM1 = {"model_type": "internlm"}
QWEN3_MOE = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
GLM4_MOE = {"model_type": "glm4_moe", "n_routed_experts": 8, "num_experts_per_tok": 3, "head_dim": 16}
ERNIE = {"model_type": "ernie4_5_moe", "num_hidden_layers": 6, "moe_num_experts": 8, "moe_k": 3}
LONGROPE = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
GEMMA4: dict[str, Any] = {
    "model_type": "gemma4_text",
    "num_hidden_layers": 6,
    "layer_types": MIXED * 3,
    "hidden_size_per_layer_input": 0,
    "global_head_dim": 32,
    "sliding_window": 8,
}
OWN = {str(layer): {"head_dim": 32, "num_key_value_heads": 1} for layer in (1, 3, 5)}
TIED = {**LLAMA, "model_type": "qwen3_vl_text", "tie_word_embeddings": True}
PHI3 = {"model_type": "phi3", "max_position_embeddings": 131072, "rope_scaling": {"type": "longrope", **LONGROPE}}


# Changes of LLAMA, and the attributes that they give. tests/parity compares the families' results, with their tensors.
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {"kv_head_num": 4, "size_per_head": 16, "rotary_embedding": 16, "start_id": 1, "end_id": (2,)}),
        ({"head_dim": 32}, {"size_per_head": 32, "rotary_embedding": 32}),
        *(
            ({"model_type": one, **given}, {"size_per_head": size})
            for one in ("ernie4_5", "seed_oss", "ministral3", "cwm", "iquestcoder", "internlm3")
            for given, size in (({}, 128), ({"head_dim": None}, 16))
        ),
        # Biases
        ({"attention_bias": True}, {"attn_bias": True, "attn_output_bias": True, "mlp_bias": False}),
        ({"model_type": "qwen2"}, {"attn_bias": True, "attn_output_bias": False, "mlp_bias": False}),
        (INTERNLM1, {"attn_bias": True, "attn_output_bias": True, "mlp_bias": False}),
        ({**INTERNLM1, "bias": False}, {"attn_bias": False, "attn_output_bias": False}),
        *(
            ({"model_type": "internlm3", **given}, {"attn_bias": qkv, "attn_output_bias": out, "mlp_bias": out})
            for given, qkv, out in (
                ({}, False, False),
                ({"qkv_bias": True, "bias": False}, True, False),
                ({"qkv_bias": False, "bias": True}, False, True),
                ({"attention_bias": True, "mlp_bias": True}, True, True),
            )
        ),
        ({**QWEN1, "no_bias": False}, {"attn_bias": True, "attn_output_bias": True, "mlp_bias": True}),
        ({"model_type": "qwen2_moe", "qkv_bias": False}, {"attn_bias": False}),
        # Windows
        *(
            (changes, {"window": windows})
            for changes, windows in (
                ({"model_type": "mistral"}, [4096, 4096]),  # the default; null means no window
                ({"model_type": "mistral", "sliding_window": 32}, [32, 32]),
                ({"model_type": "mistral", "sliding_window": None}, [0, 0]),
                ({"model_type": "mistral", "sliding_window": 32, "layer_types": MIXED}, [32, 0]),
                ({"model_type": "qwen2", "sliding_window": 32}, [0, 0]),
                # If the window is disabled, layers that are listed with a window have none.
                ({"model_type": "qwen2", "sliding_window": 32, "layer_types": MIXED}, [0, 0]),
                ({"model_type": "gemma2", "num_hidden_layers": 3}, [4096, 0, 4096]),
                ({"model_type": "gpt_oss", "num_hidden_layers": 3}, [128, 0, 128]),
                ({**TEXT, "num_hidden_layers": 7, "sliding_window": 16}, [16, 16, 16, 16, 16, 0, 16]),
                ({**TEXT, "num_hidden_layers": 4, "sliding_window_pattern": 2}, [4096, 0, 4096, 0]),
                ({"sliding_window": None}, [0, 0]),
            )
        ),
        *(
            (
                {"use_sliding_window": True, "sliding_window": 7, **given},
                {"window": windows},
            )
            for given, windows in (
                ({"model_type": "qwen2", "max_window_layers": 1}, [0, 7]),
                ({"model_type": "qwen2", "max_window_layers": 0}, [7, 7]),
                ({"model_type": "qwen2", "max_window_layers": 28}, [0, 0]),
                ({"model_type": "qwen2", "layer_types": MIXED}, [7, 0]),
                ({"model_type": "qwen2_moe", "num_hidden_layers": 3, "max_window_layers": 2}, [7, 0, 0]),
            )
        ),
        # Gated delta nets
        *(
            (
                {"model_type": one, "num_hidden_layers": 4, **given},
                {"mixer": mixers, "ffn": ffn, "attention_gate": True},
            )
            for one, given, mixers, ffn in (
                ("qwen3_5_text", {}, ["delta_net"] * 3 + ["attention"], ["dense"] * 4),
                (
                    "qwen3_5_moe_text",
                    {"full_attention_interval": 2},
                    ["delta_net", "attention"] * 2,
                    ["experts"] * 4,
                ),
                (
                    "qwen3_next",
                    {"mlp_only_layers": [1], "layer_types": ["full_attention"] + ["linear_attention"] * 3},
                    ["attention"] + ["delta_net"] * 3,
                    ["experts", "dense", "experts", "experts"],
                ),
            )
        ),
        # Short convolutions
        *(
            ({"model_type": "lfm2", **given}, {"mixer": mixers, "inter_size": size})
            for given, mixers, size in (
                ({"layer_types": CONV}, ["short_conv", "attention"], 256),
                ({"full_attn_idxs": [0], "block_ff_dim": 900}, ["attention", "short_conv"], 768),
                ({"block_auto_adjust_ff_dim": False}, ["attention", "attention"], 160),
                ({"layer_types": CONV, "block_multiple_of": 8}, ["short_conv", "attention"], 112),
                ({"block_ffn_dim_multiplier": None}, ["attention", "attention"], 106),
            )
        ),
        (
            {"model_type": "lfm2", "tie_embedding": False, "norm_eps": 1e-3},
            {"tie_word_embeddings": False, "norm_eps": 1e-3},
        ),
        (
            {"model_type": "lfm2_moe", "layer_types": CONV, "num_dense_layers": 1},
            {"ffn": ["dense", "experts"], "inter_size": 160},
        ),
        # Only layers with a window are rotated, even if there is none.
        *(
            ({"model_type": one, "sliding_window": 32, "layer_types": types}, {"rotation": rotations})
            for one in ("exaone4", "cohere2")
            for types, rotations in (
                (["full_attention"] * 2, ["none", "none"]),
                (MIXED[::-1], ["none", "global"]),
                (MIXED[:1] * 2, ["global", "global"]),
            )
        ),
        # Rotation
        (PHI3, {"rope_original_max_position_embeddings": 4096}),
        ({**PHI3, "original_max_position_embeddings": 64}, {"rope_original_max_position_embeddings": 64}),
        *(
            ({**INTERNLM1, "rotary": {"base": 20000, "type": kind}}, {"rope_theta": 2e4, "rope_scaling_type": scaling})
            for kind, scaling in (("dynamic", "dynamic"), ("origin", "default"))
        ),
        (
            {
                **TEXT,
                "rope_theta": 2e6,
                "rope_local_base_freq": 2e4,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            },
            {
                "rope_theta": 2e6,
                "rope_local_theta": 2e4,
                "rope_scaling_type": "linear",
                "rope_factor": 8.0,
                "rotation": ["local", "local"],
            },
        ),
        (
            {**GLM4_MOE, "n_group": 1, "topk_group": 1},
            {"rotary_embedding": 8, "router_groups": 0, "router_top_groups": 0},
        ),
        (
            {**QWEN1, "use_dynamic_ntk": False, "use_logn_attn": False},
            {"rope_scaling_type": "default", "logn_length": 0, "rotary_embedding": 16},
        ),
        # Tokens
        ({**QWEN1, "eos_token_id": None}, {"end_id": (151643,)}),
        ({**QWEN1, **CHAT}, {"end_id": (151643, 151645, 151644)}),
        # Baichuan's sizes and versions
        ({"model_type": "baichuan"}, {"alibi": False, "rotary_embedding": 16, "normalize_output": False}),
        (
            BAICHUAN,
            {"alibi": True, "rotary_embedding": 0, "max_position_embeddings": 256, "rotation": ["none", "none"]},
        ),
        ({**BAICHUAN, "z_loss_weight": 0}, {"normalize_output": True}),
        ({**BAICHUAN, "vocab_size": 125696}, {"normalize_output": True}),
        # Gemma
        ({"model_type": "gemma2", "attn_logit_softcapping": None}, {"attention_soft_cap": 0, "logit_soft_cap": 30}),
        (
            {"model_type": "gemma3", "text_config": TEXT, "eos_token_id": [1, 106]},
            {"head_num": 8, "kv_head_num": 4, "size_per_head": 256, "vocab_size": 262208, "end_id": (1, 106)},
        ),
        # Older files have this key in the text part only.
        (
            {"model_type": "qwen3_vl", "tie_word_embeddings": False, "text_config": TIED},
            {"tie_word_embeddings": True},
        ),
        # Experts
        (
            {**QWEN3_MOE, "num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3]},
            {"ffn": [DENSE, EXPERTS, DENSE, DENSE], "expert_inter_size": 32, "renormalize_experts": False},
        ),
        ({**QWEN3_MOE, "norm_topk_prob": True}, {"renormalize_experts": True}),
        (
            {"model_type": "qwen3_vl_moe", "text_config": {**LLAMA, **QWEN3_MOE, "model_type": "qwen3_vl_moe_text"}},
            {"model_family": "qwen3_moe", "renormalize_experts": True, "rope_theta": 5e5},
        ),
        ({**GLM4_MOE, "num_hidden_layers": 3, "first_k_dense_replace": 2}, {"ffn": [DENSE, DENSE, EXPERTS]}),
        ({**GLM4_MOE, "first_k_dense_replace": 0}, {"ffn": [EXPERTS, EXPERTS]}),
        ({**GLM4_MOE, "n_group": 4, "topk_group": 2}, {"router_groups": 4, "router_top_groups": 2}),
        # Gemma 4
        ({**GEMMA4, "head_dim": 16}, {"head_size": [0, 32] * 3, "kv_heads": [0, 4] * 3, "rope_local_embedding": 16}),
        *(
            (
                {**GEMMA4, "attention_k_eq_v": True, **given},
                {
                    "head_size": [0, 32] * 3,
                    "kv_heads": [0, 1] * 3,
                    "values": ["projected", "keys"] * 3,
                    "rotary_embedding": 32,
                    "rope_turned": 8,
                },
            )
            for given in (
                {"num_global_key_value_heads": 1},
                {"per_layer_config": OWN},
                {"per_layer_config": {f"0{layer}": own for layer, own in OWN.items()}, "global_head_dim": None},
            )
        ),
        (
            {**GEMMA4, "num_kv_shared_layers": 3, "use_double_wide_mlp": True},
            {"kv_source": [0, 0, 0, 2, 2, 4], "inter_size": [0, 0, 0, 320, 320, 320]},
        ),
        # The last layer has no window in any case, as in transformers.
        ({**GEMMA4, "layer_types": MIXED[:1] * 6}, {"window": [8, 8, 8, 8, 8, 0]}),
        ({**GEMMA4, "layer_types": None}, {"window": [8, 8, 8, 8, 8, 0]}),
        (ERNIE, {"ffn": [DENSE, EXPERTS, EXPERTS, EXPERTS, EXPERTS, EXPERTS]}),
        (
            {**ERNIE, "moe_layer_start_index": 1, "moe_layer_end_index": 4, "moe_layer_interval": 2},
            {"ffn": [DENSE, EXPERTS, DENSE, EXPERTS, DENSE, DENSE]},
        ),
    ],
)
def test_keys_of_config_json_give_the_attributes(changes: dict[str, Any], expected: dict[str, Any]) -> None:
    config = changes if "text_config" in changes else {**LLAMA, **changes}
    found = describe(config, "m").config
    of_model = {key: vars(found)[key] for key, value in expected.items() if not isinstance(value, list)}
    of_layers = {key: [vars(one)[key] for one in found.layers] for key in expected.keys() - of_model.keys()}
    assert of_model | of_layers == expected


YARN = {"rope_type": "yarn", "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        ({"type": "linear", "factor": 4.0}, {"rope_factor": 4.0}),
        (
            {"rope_type": "dynamic", "factor": 2.0},
            {"rope_factor": 2.0, "rope_original_max_position_embeddings": 128},
        ),
        (
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
            {"rope_factor": 8.0, "rope_low_freq_factor": 1.0, "rope_high_freq_factor": 4.0},
        ),
        ({**YARN, "beta_fast": None}, {"rope_factor": 4.0, "rope_beta_fast": 32.0, "rope_attention_factor": 0.0}),
        (
            {**YARN, "beta_fast": 16, "beta_slow": 2, "attention_factor": 1.5, "truncate": False},
            {"rope_beta_fast": 16.0, "rope_beta_slow": 2.0, "rope_truncate": False, "rope_attention_factor": 1.5},
        ),
        ({**YARN, "mscale": 0.7, "mscale_all_dim": 1}, {"rope_mscale": 0.7, "rope_mscale_all_dim": 1.0}),
        (
            {"rope_type": "longrope", **LONGROPE, "original_max_position_embeddings": 64},
            {"rope_factor": 2.0, "rope_short_factors": (1.0,) * 8, "rope_long_factors": (2.0,) * 8},
        ),
        ({"type": "su", **LONGROPE, "original_max_position_embeddings": 64}, {"rope_factor": 2.0}),
    ],
)
def test_every_rope_scaling_is_read_in_its_older_and_newer_spelling(
    scaling: dict[str, Any], expected: dict[str, Any]
) -> None:
    kind = scaling.get("rope_type", scaling.get("type"))
    for spelling in (
        {"rope_theta": 5e5, "rope_scaling": scaling},
        {"rope_parameters": {"rope_theta": 5e5, **scaling}},
        {"rope_parameters": {"rope_theta": 5e5}, "rope_scaling": scaling},
    ):
        config = describe({**LLAMA, **spelling}, "m").config
        assert (config.rope_scaling_type, config.rope_theta) == ({"su": "longrope"}.get(kind, kind), 5e5)
        assert {key: getattr(config, key) for key in expected} == expected


@pytest.mark.parametrize(
    ("config", "ignored"),
    [
        ({**LLAMA, "model_type": "hy_v3", "num_experts": 8}, ["model.layers.2."]),
        (
            {**LLAMA, "model_type": "hy_v3", "num_experts": 8, "num_nextn_predict_layers": 2},
            ["model.layers.2.", "model.layers.3."],
        ),
        ({**LLAMA, **GLM4_MOE}, ["model.layers.2."]),
        ({"model_type": "gemma3", "text_config": TEXT}, ["vision_tower."]),
        ({"model_type": "internvl_chat", "llm_config": {**LLAMA, "model_type": "qwen2"}}, ["mlp1."]),
    ],
)
def test_tensors_that_the_language_model_does_not_need_are_ignored(config: dict[str, Any], ignored: list[str]) -> None:
    spec = describe(config, "m")
    assert set(ignored) <= set(spec.ignored) and spec.notes == ()
    assert any("." in prefix for prefix, _ in spec.prefixes) == ("text_config" in config or "llm_config" in config)


def test_every_layers_tensors_are_made_and_none_is_used_twice() -> None:
    for family in FAMILIES:
        config = {"model_type": family.model_types[0], "num_key_value_heads": 2, "num_hidden_layers": 4}
        spec = describe({**LLAMA, **config}, "m")
        taken = [(part.name, part.rows) for parts in spec.tensors.values() for part in parts]
        assert len(taken) == len(set(taken)), family.name
        rows = {}
        for parts in spec.tensors.values():
            for part in parts:
                rows[part.name, part.shape] = rows.get((part.name, part.shape), 0) + part.taken[0]
        assert all(count == shape[0] for (_, shape), count in rows.items()), family.name


def of(model_type: str, **changes: Any) -> dict[str, Any]:
    return {"model_type": model_type, **changes}


def scaled(kind: Any, **settings: Any) -> dict[str, Any]:
    return {"rope_scaling": {"type": kind, **settings}}


VIDEO = {"model_type": "video_llava", "text_config": {"model_type": "llama"}}
YARN_BESIDE_WINDOWS = {"sliding_attention": {"rope_type": "yarn", "factor": 2.0}}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (of("gpt2"), "'gpt2' is not supported; supported: Yi, baichuan, "),
        (VIDEO, "'video_llava' (its text part is 'llama') is not supported; supported: Yi, baichuan, "),
        (scaled("xpos", factor=4.0), "'xpos' is not supported; supported: default, linear"),
        (of("phi3", **scaled("yarn", factor=4.0)), "'yarn' is not supported for Phi-3"),
        (of("gpt_oss", hidden_act="gelu"), "hidden_act 'gelu' is not supported; supported: silu"),
        ({"rope_parameters": {"chunked_attention": {"rope_type": "default"}}}, "'chunked_attention'"),
        (of("gemma3_text", rope_parameters=YARN_BESIDE_WINDOWS), "'yarn' in layers with a window"),
        (of("gemma3_text", attn_logit_softcapping=50.0), "attn_logit_softcapping 50.0"),
        (of("gemma2", hidden_activation="gelu"), "hidden_activation 'gelu'"),
        (of("gemma2", use_bidirectional_attention=True), "use_bidirectional_attention True"),
        ({"position_embedding_type": "absolute"}, "position_embedding_type 'absolute'"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0"),
        ({"alibi": True}, "alibi True"),
        (of("qwen", scale_attn_weights=False), "scale_attn_weights False"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "per layer type"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"hidden_act": ["silu"]}, "hidden_act ['silu']"),
        (of("qwen2", layer_types=[["full_attention"], {}]), "layer_types has ['full_attention']"),
        (of("qwen2", layer_types=["full_attention", "linear_attention"]), "'linear_attention'"),
        (of("internlm", rotary={"type": "xpos"}), "'xpos'"),
        ({**GEMMA4, "use_bidirectional_attention": "all"}, "use_bidirectional_attention 'all'"),
        ({**GEMMA4, "attention_bias": True, "attention_k_eq_v": True}, "attention_bias true"),
        ({**GEMMA4, "partial_rotary_factor": 0.5}, "partial_rotary_factor is supported only within rope_parameters"),
        (
            of(
                "gemma3_text",
                rope_parameters={kind: {"rope_theta": 1e4, "partial_rotary_factor": 0.5} for kind in MIXED},
            ),
            "partial_rotary_factor",
        ),
        ({**GEMMA4, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling has no effect"),
        ({**GEMMA4, "per_layer_config": {"1": {"head_dim": 32}}}, "per_layer_config differs"),
        ({**GEMMA4, "per_layer_config": {"1": {"num_attention_heads": 2}}}, "num_attention_heads of per_layer_config"),
        (of("gemma4_unified_text", hidden_size_per_layer_input=256), "hidden_size_per_layer_input 256"),
    ],
)
def test_unsupported_features_are_rejected_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedError, match=re.escape(named)):
        describe({**LLAMA, **changes}, "m")


HEADS = {"num_attention_heads": 1024, "hidden_size": 1024, "num_hidden_layers": 1000}
HUGE = 10**400


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": None}, "no model_type"),
        (of("gemma3"), "text_config is missing"),
        ({**BAICHUAN, "model_max_length": None}, "neither max_position_embeddings"),
        (
            {**GLM4_MOE, "n_group": 3},
            "n_group is 3; it must be 1 to 32 and divide the 8 experts into groups of 2 or more",
        ),
        ({**GLM4_MOE, "n_group": 8}, "n_group is 8"),
        ({**GLM4_MOE, "n_group": 4, "topk_group": 1}, "topk_group is 1; it must be 1 to 4 (n_group), and these groups"),
        ({**ERNIE, "moe_k": 9}, "moe_k is 9; it must be 1 to 8"),
        ({**QWEN3_MOE, "num_experts_per_tok": 5}, "num_experts_per_tok is 5; it must be 1 to 4"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"vocab_size": "300"}, "vocab_size is '300'"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot be grouped over 3"),
        ({"hidden_size": 66}, "66 is not a multiple"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"eos_token_id": [2, 10**12]}, "generation_config.json: eos_token_id is [2, 1000000000000]"),
        ({"bos_token_id": 1 << 31}, "config.json: bos_token_id is 2147483648"),
        (scaled("llama3", factor=8.0), "requires low_freq_factor, high_freq_factor"),
        (scaled("linear"), "of type linear requires factor"),
        (scaled("longrope", short_factor=[1.0], long_factor=[1.0] * 8), "short_factor must be 8 positive numbers"),
        (scaled("longrope", short_factor=[HUGE] * 8, long_factor=[1.0] * 8), "8 positive numbers up to 1e+30"),
        (scaled(["linear"], factor=2.0), "the rope scaling's type is ['linear']"),
        (scaled({"a": 1}), "the rope scaling's type is {'a': 1}"),
        (scaled("yarn", factor=4.0, original_max_position_embeddings=0), "original_max_position_embeddings is 0"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps is -1.0"),
        (of("qwen", intermediate_size=161), "intermediate_size 161 is odd"),
        (of("qwen2", layer_types=["full_attention"]), "num_hidden_layers = 2 types"),
        (of("mistral", sliding_window=None, layer_types=["sliding_attention"] * 2), "there is no sliding_window"),
        ({"rope_theta": float("nan")}, "rope_theta is nan; it must be a finite number"),
        ({"rope_theta": float("inf")}, "rope_theta is inf; it must be a finite number"),
        ({"rope_theta": HUGE}, "rope_theta is an integer that is too large"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; it must be at most 1000"),
        (of("mistral", num_hidden_layers=10**9), "num_hidden_layers is 1000000000"),
        (of("mixtral", num_local_experts=10**9), "1000000000 experts in each of 2 layers"),
        ({"num_attention_heads": 2048, "hidden_size": 1 << 15}, "num_attention_heads is 2048; it must be at most 1024"),
        (HEADS, "1024 key/value heads in each of 1000 layers exceed the supported maximum of 100000"),
        (of("gemma2", hidden_size=None), "hidden_size is missing"),
        (of("qwen", rotary_pct=1e308), "rotary_pct is 1e+308; it must be from 0 to 1"),
        ({"head_dim": HUGE}, "head_dim is an integer of 1329 bits; it must be at most"),
        ({"max_position_embeddings": HUGE}, "max_position_embeddings is an integer of 1329 bits"),
        (of("gemma2", query_pre_attn_scalar=0), "query_pre_attn_scalar is 0"),
        (of("gemma3_text", head_dim=[16]), "head_dim is [16]"),
        (of("gemma3_text", sliding_window_pattern=0), "sliding_window_pattern is 0"),
        *(
            (of(one, mlp_layer_types=[wrong] * 2), "mlp_layer_types must list num_hidden_layers = 2")
            for one in ("mellum", "hy_v3")
            for wrong in ({}, "wide")
        ),
        ({**GEMMA4, "num_kv_shared_layers": 5}, "num_kv_shared_layers is 5"),
        (
            {**GEMMA4, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 9},
            "vocab_size_per_layer_input is 9",
        ),
        ({**GEMMA4, "rope_parameters": {"rope_type": "default"}}, "an object for each of sliding_attention"),
        *(
            ({**GEMMA4, "per_layer_config": wrong}, "per_layer_config must have objects, named by layers 0 to 5")
            for wrong in ({"1": 3}, {"6": {}}, {"x": {}}, [4])
        ),
        ({**GEMMA4, "per_layer_config": {"1": {"head_dim": [16]}}}, "head_dim is [16]"),
        (
            {**GEMMA4, "layer_types": [{}] * 6},
            "layer_types must list num_hidden_layers = 6 times one of full_attention",
        ),
        ({**GEMMA4, "global_head_dim": 0}, "layers with full_attention have 4 KV heads of 0; both must be positive"),
        ({**GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 0}, "have 0 KV heads of 32"),
        ({**GEMMA4, "rope_parameters": {key: {} for key in MIXED}}, "must have a rope_theta for each type of layer"),
        (
            of("lfm2", layer_types=["conv", {}]),
            "layer_types must list num_hidden_layers = 2 times one of conv, full_att",
        ),
        (of("qwen3_5_text", layer_types=["conv"] * 2), "times one of linear_attention, full_attention"),
        (of("qwen3_5_text", full_attention_interval=0), "full_attention_interval is 0"),
        (of("qwen3_5_text"), "layer_types has no full_attention"),
        (of("qwen3_next", linear_num_value_heads=24), "linear_num_value_heads 24 is not a multiple of"),
        (of("qwen3_next", linear_conv_kernel_dim=5), "linear_conv_kernel_dim is 5; it must be 2 to 4"),
        (of("qwen3_5_text", linear_key_head_dim=257), "linear_key_head_dim is 257; it must be 1 to 256"),
        (of("qwen3_5_text", linear_value_head_dim=0), "linear_value_head_dim is 0; it must be positive"),
        (of("lfm2", full_attn_idxs=[]), "layer_types has no full_attention"),
        (of("lfm2", full_attn_idxs=1), "full_attn_idxs 1 must list the layers"),
        (of("lfm2", conv_dim=32), "conv_dim is 32, but hidden_size is 64"),
        (of("lfm2", conv_L_cache=5), "conv_L_cache is 5; it must be 2 to 4"),
        (of("lfm2", block_multiple_of=0), "block_multiple_of is 0"),
        (of("minimax_m2", head_dim=0, rotary_dim=8), "head_dim is 0"),
        (of("gpt_oss", num_experts_per_tok=4, experts_per_token=2), "experts_per_token is 2, but num_experts_per_tok"),
        (of("hunyuan_v1_dense", **scaled("dynamic", alpha=1e308)), "has the alpha 1e+308"),
        (of("hunyuan_v1_moe", **scaled("dynamic", alpha=1e308)), "has the alpha 1e+308"),
        (of("hunyuan_v1_dense", head_dim=2, **scaled("dynamic", alpha=1000.0)), "a head has 2 elements"),
    ],
)
def test_a_wrong_value_is_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=re.escape(named)):
        describe({**LLAMA, **changes}, "m")
