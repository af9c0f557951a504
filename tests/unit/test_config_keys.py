"""Keys of config.json: each one is read, is known to have no effect, or is named in a note or an error."""

from __future__ import annotations

import copy
import dataclasses
import re
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from charonia.errors import ModelError, UnsupportedError
from charonia.families import COMPOSITES, FAMILIES, Family, HfConfig, describe
from charonia.families.config_keys import HARMLESS, ONLY, READ_BY_ALL

BASE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "vocab_size": 300,
    "max_position_embeddings": 128,
}
# transformers has no class for these types. The models' own code is the reference.
NO_CLASS = {"internlm", "internlm2", "internvl_chat", "kimi_k2", "qwen", "baichuan", "yi", "Yi"}
TYPES = [(family, model_type) for family in FAMILIES for model_type in family.model_types]
# Configs for keys that have no effect in BASE.
CONTEXTS: tuple[dict[str, Any], ...] = (
    {},
    {"use_sliding_window": True, "sliding_window": 32},
    {"layer_types": ["full_attention"] * 4, "sliding_window": 32},
    {
        "layer_types": ["full_attention"] * 4,
        "attention_k_eq_v": True,
        "enable_moe_block": True,
        "moe_intermediate_size": 32,
        "num_experts": 8,
        "num_kv_shared_layers": 1,
        "top_k_experts": 2,
    },
    {"max_position_embeddings": None, "model_max_length": 128},
    {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0] * 8}},
)
# Values by type. A key that is read rejects them, or gives another model.
VALUES: tuple[Any, ...] = (
    3,
    8,
    1,
    0.5,
    True,
    False,
    "gelu",
    "chatml",
    {"type": "dynamic"},
    [1],
    ["sliding_attention"] * 4,
)


@pytest.mark.parametrize(
    "model_type",
    [one for _, one in TYPES if one not in NO_CLASS]
    + [c.model_type for c in COMPOSITES if c.model_type not in NO_CLASS],
)
def test_every_field_of_transformers_class_is_known(model_type: str) -> None:
    fields = {field.name for field in dataclasses.fields(CONFIG_MAPPING[model_type])}
    family = next((family for family, one in TYPES if one == model_type), None)
    if family is not None:
        known = READ_BY_ALL | family.keys | family.harmless | family.only.keys() | HARMLESS | ONLY.keys()
        assert fields - known == set()
        return
    text = {**BASE, "model_type": next(c.text_type for c in COMPOSITES if c.model_type == model_type)}
    outer = {
        field: "a value" for field in fields - {"dtype", "is_encoder_decoder", "text_config", "tie_word_embeddings"}
    }
    ids = {"bos_token_id": 1, "eos_token_id": 2}
    spec = describe({**outer, **ids, "model_type": model_type, "text_config": text}, "m")
    assert spec.notes == ()


# Attributes whose default differs from transformers' class if config.json lacks them. Released files have these keys.
OTHER_DEFAULTS = {
    "dots1": {"shared_expert_inter_size"},
    "qwen3_vl_moe_text": {"tie_word_embeddings"},  # a key of the whole model, whose default differs
}


@pytest.mark.parametrize("model_type", [one for _, one in TYPES if one not in NO_CLASS])
def test_missing_values_are_the_defaults_of_transformers_class(model_type: str) -> None:
    """Except for token ids, which a file without them does not have."""
    config = {**BASE, "bos_token_id": 1, "eos_token_id": 2, "model_type": model_type}
    whole = CONFIG_MAPPING[model_type](**config).to_dict()
    ours, theirs = (vars(describe(one, "m").config) for one in (config, whole))
    # Some classes write the scale as 0.
    plain = {"attention_scale": ours["size_per_head"] ** -0.5}
    differ = {key for key in ours if (ours[key] or plain.get(key)) != (theirs[key] or plain.get(key))}
    assert differ == OTHER_DEFAULTS.get(model_type, set())


def described(config: HfConfig) -> Any:
    try:
        spec = describe(config, "m")
    except (ModelError, UnsupportedError) as error:
        return str(error)
    return spec.config, spec.tensors


@pytest.mark.slow
@pytest.mark.parametrize(("family", "model_type"), TYPES, ids=lambda one: one if isinstance(one, str) else "")
def test_every_key_that_a_family_lists_is_read(family: Family, model_type: str) -> None:
    """With another value the model differs, or the value is rejected."""
    for key in sorted(family.keys):
        for context in CONTEXTS:
            # Some families do not know a key of the context.
            known = {one: value for one, value in context.items() if one in READ_BY_ALL | family.keys}
            config = {**BASE, "model_type": model_type, **known}
            if any(described({**config, key: value}) != described(config) for value in VALUES):
                break
        else:
            pytest.fail(f"{key} has no effect")


def test_the_keys_of_all_families_are_read_by_llama() -> None:
    config = {**BASE, "model_type": "llama", "rope_parameters": {"rope_type": "yarn", "factor": 4.0}}
    elsewhere = {"compression_config", "dtype", "quantization_config", "torch_dtype"}
    for key in sorted(READ_BY_ALL - elsewhere):
        assert any(described({**config, key: value}) != described(config) for value in VALUES), key


@pytest.mark.parametrize(("family", "model_type"), TYPES, ids=lambda one: one if isinstance(one, str) else "")
def test_unknown_keys_are_named_and_rejected_if_they_may_change_results(family: Family, model_type: str) -> None:
    config = {**BASE, "model_type": model_type}
    before = describe(config, "m")
    spec = describe({**config, "favourite_colour": "red", "unsloth_version": "1", "attn_sink_size": None}, "m")
    assert spec.notes == (*before.notes, "config.json has unknown keys, which are ignored: favourite_colour")
    may_compute = "attn_sink_size mystery_norm expert_bias rope_boost Sliding logit_cap chunk_length rotary_boost"
    may_compute += " moe_boost scoring_boost topk_boost interleaved_parts local_window n_groups use_parallel_residual"
    may_compute += " swiglu_boost ntk_alpha"
    for key in may_compute.split():
        with pytest.raises(UnsupportedError, match=re.escape(f"the key {key} (4) is unknown for {family.title}")):
            describe({**config, key: 4}, "m")


@pytest.mark.parametrize(
    ("key", "harmless", "computed"),
    [
        ("is_causal", True, False),
        ("layer_types", ["full_attention"] * 4, ["full_attention", "sliding_attention"]),
        ("sliding_window", 0, 32),
        ("residual_multiplier", 1.0, 0.22),
        ("add_cross_attention", False, True),
        ("pruned_heads", {}, {"0": [1]}),
        # Python's True equals 1.
        ("logits_scaling", 1, True),
    ],
)
def test_a_known_key_is_accepted_only_with_a_value_that_changes_nothing(key: str, harmless: Any, computed: Any) -> None:
    config = {**BASE, "model_type": "llama"}
    assert described({**config, key: harmless}) == described(config)
    assert described({**config, key: None}) == described(config)
    with pytest.raises(UnsupportedError, match=re.escape(f"{key} {computed!r} is not supported for Llama 1 to 3.x")):
        describe({**config, key: computed}, "m")


def test_keys_beside_text_config_are_checked_too() -> None:
    text = {**BASE, "model_type": "qwen3_vl_text"}
    config = {"model_type": "qwen3_vl", "text_config": text, "vision_config": {"hidden_size": 1}, "image_token_id": 7}
    assert describe(config, "m").notes == ()
    # Some files repeat keys of the text part.
    assert describe({**config, "hidden_size": 64, "num_attention_heads": 4}, "m").notes == ()
    spec = describe({**config, "favourite_colour": "red"}, "m")
    assert spec.notes == ("config.json has unknown keys, which are ignored: favourite_colour",)
    with pytest.raises(UnsupportedError, match=r"the key attn_boost \(4\) is unknown for Qwen3-VL"):
        describe({**config, "attn_boost": 4}, "m")


@pytest.mark.parametrize(
    ("key", "value"),
    [("rope_scaling", {"type": "yarn", "factor": 4.0}), ("rope_theta", 5.0), ("sliding_window", 32)],
)
def test_keys_of_the_text_part_belong_into_text_config(key: str, value: Any) -> None:
    text = {**BASE, "model_type": "qwen3_vl_text", "sliding_window": None}
    config = {"model_type": "qwen3_vl", "text_config": text, key: value}
    with pytest.raises(UnsupportedError, match=rf"{key} .* has no effect outside text_config: move it"):
        describe(config, "m")


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
PLAIN = {"rope_type": "default", "rope_theta": 5e5}


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "seed_oss", "ministral"])
@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_parameters": PLAIN, "rope_scaling": {**YARN, "rope_theta": 2e5}},
        {"rope_parameters": PLAIN, "rope_scaling": YARN, "rope_theta": 2e5},
        {"rope_parameters": {**PLAIN, **YARN}, "rope_scaling": None},
        {"rope_parameters": {**PLAIN, **YARN}, "rope_scaling": {"rope_type": "default", "rope_theta": 2e5}},
        {"rope_parameters": {**PLAIN, **YARN}, "rope_scaling": {**YARN, "factor": 2.0, "rope_theta": 2e5}},
    ],
)
def test_rotary_settings_are_those_that_transformers_reads(model_type: str, spelling: dict[str, Any]) -> None:
    theirs = CONFIG_MAPPING[model_type].from_dict(copy.deepcopy({**BASE, **spelling})).rope_parameters
    ours = describe({**BASE, "model_type": model_type, **spelling}, "m").config
    assert (ours.rope_scaling_type, ours.rope_theta) == (theirs["rope_type"], theirs["rope_theta"])
    assert ours.rope_factor == theirs.get("factor", 1.0)


def test_scaling_added_to_a_file_of_transformers_5_keeps_its_base() -> None:
    """READMEs recommend rope_scaling without a base. transformers then uses 10000, which no author means."""
    config = describe({**BASE, "model_type": "qwen2", "rope_parameters": PLAIN, "rope_scaling": YARN}, "m").config
    assert (config.rope_scaling_type, config.rope_theta) == ("yarn", 5e5)


@pytest.mark.parametrize("model_type", ["qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text"])
def test_the_base_of_a_file_wins_over_the_default_of_its_class(model_type: str) -> None:
    scaled = {"rope_parameters": {**PLAIN, "rope_theta": 3e6}, "rope_scaling": YARN}
    config = describe({**BASE, "model_type": model_type, **scaled}, "m").config
    assert (config.rope_scaling_type, config.rope_theta) == ("yarn", 3e6)


@pytest.mark.parametrize("model_type", ["minimax_m2", "glm4v_text", "glm4v_moe_text", "glm4"])
def test_added_scaling_leaves_the_rotated_part_of_a_head_as_it_is(model_type: str) -> None:
    """transformers then rotates whole heads, or the part that is the default of the class."""
    settings = {**BASE, "model_type": model_type, "head_dim": 16}
    plain = {**PLAIN, "partial_rotary_factor": 0.25}
    config = describe({**settings, "rope_parameters": plain, "rope_scaling": YARN}, "m").config
    assert (config.rope_scaling_type, config.rotary_embedding) == ("yarn", 4)


def test_added_scaling_leaves_the_factor_of_ministral_3s_queries_as_it_is() -> None:
    new = {**PLAIN, **YARN, "llama_4_scaling_beta": 0.1}
    config = describe({**BASE, "model_type": "ministral3", "rope_parameters": new, "rope_scaling": YARN}, "m").config
    assert config.q_scale_beta == 0.1


@pytest.mark.parametrize(
    ("model_type", "own"),
    [
        ("hunyuan_v1_dense", {"rope_parameters": {"rope_type": "dynamic", "factor": 1.0, "alpha": 50.0}}),
        ("hunyuan_v1_moe", {"rope_parameters": {"rope_type": "dynamic", "factor": 1.0, "alpha": 50.0}}),
        ("internlm", {"rotary": {"base": 10000, "type": "dynamic", "scaling_factor": 2.0}}),
    ],
)
def test_scaling_is_not_added_to_a_familys_own(model_type: str, own: dict[str, Any]) -> None:
    match = "rope_parameters is of type 'dynamic' but rope_scaling of type 'yarn'"
    with pytest.raises(UnsupportedError, match=match):
        describe({**BASE, "model_type": model_type, **own, "rope_scaling": YARN}, "m")


@pytest.mark.parametrize(
    ("model_type", "own", "reason"),
    [
        ("qwen", {}, "Qwen 1 has its own scaling"),
        ("baichuan", {"max_position_embeddings": None, "model_max_length": 128}, "ALiBi instead of a rotation"),
    ],
)
def test_scaling_that_would_have_no_effect_is_rejected(model_type: str, own: dict[str, Any], reason: str) -> None:
    config = {**BASE, "model_type": model_type, **own}
    assert describe({**config, "rope_scaling": {"rope_type": "default"}}, "m").config == describe(config, "m").config
    for key in ("rope_scaling", "rope_parameters"):
        with pytest.raises(UnsupportedError, match=f"{key} has no effect: .*{reason}"):
            describe({**config, key: YARN}, "m")


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_scaling_without_a_kind_is_rejected(key: str) -> None:
    config = {**BASE, "model_type": "llama"}
    for same in ({"factor": 1.0}, {"factor": None}, {}):
        assert described({**config, key: same}) == described(config)
    match = f"{key} has factor but no rope_type, so it would have no effect: add rope_type .* or remove factor"
    with pytest.raises(ModelError, match=match):
        describe({**config, "rope_parameters": PLAIN, key: {"factor": 4.0}}, "m")


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_a_factor_of_zero_is_rejected_by_its_name_in_config_json(kind: str) -> None:
    scaling = {"rope_type": kind, "factor": 0}
    with pytest.raises(ModelError, match=r"config.json: the rope scaling's factor is 0.0; it must be positive"):
        describe({**BASE, "model_type": "llama", "rope_scaling": scaling}, "m")


def test_a_context_shorter_than_the_scaling_allows_is_named() -> None:
    longest = BASE["max_position_embeddings"]
    config = {**BASE, "model_type": "llama", "rope_scaling": YARN}
    assert describe(config, "m").notes == ()
    far = {**YARN, "original_max_position_embeddings": longest}
    assert describe({**config, "rope_scaling": far}, "m").notes == (
        f"config.json: the rope scaling supports {4 * longest} tokens, but the context is max_position_embeddings = "
        f"{longest}. Set session_len = {4 * longest} for a longer context",
    )


def test_rotary_settings_that_are_no_object_are_rejected() -> None:
    nested = {"full_attention": PLAIN, "sliding_attention": 5}
    with pytest.raises(ModelError, match="sliding_attention of rope_parameters is 5; it must be an object or null"):
        describe({**BASE, "model_type": "mistral", "rope_parameters": nested}, "m")


def test_the_experts_of_qwen3_vl_moe_are_counted_by_either_name() -> None:
    """transformers 5 saves num_local_experts. Released files have num_experts."""

    def count(**named: int) -> int:
        return describe({**BASE, "model_type": "qwen3_vl_moe_text", **named}, "m").config.num_experts

    assert (count(), count(num_local_experts=5), count(num_experts=6)) == (60, 5, 6)


def test_two_kinds_of_rotary_scaling_are_rejected() -> None:
    scaled = {"rope_parameters": {"rope_type": "linear", "factor": 2.0}, "rope_scaling": YARN}
    with pytest.raises(UnsupportedError, match="rope_parameters is of type 'linear' but rope_scaling of type 'yarn'"):
        describe({**BASE, "model_type": "llama", **scaled}, "m")


def test_dual_chunk_attention_bounds_the_context_and_is_named() -> None:
    chunks = {"chunk_size": 64, "original_max_position_embeddings": 96}
    spec = describe({**BASE, "model_type": "qwen2", "dual_chunk_attention_config": chunks}, "m")
    assert spec.config.max_position_embeddings == 96
    assert spec.notes == (
        "config.json: dual_chunk_attention_config is not supported, so the context is 96 tokens long instead of 128",
    )
