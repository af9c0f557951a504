"""Keys in config.json of released models: each model is described, and no key gets a note.

tests/data/released_configs.json has the keys of each model in addition to the ordinary ones, with the relevant values.
The sizes are small. Models with images have their whole config.json, without vision_config.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from charonia.errors import UnsupportedError
from charonia.families import COMPOSITES, FAMILIES, describe

Keys = dict[str, Any]
DATA: dict[str, Any] = json.loads((Path(__file__).parents[1] / "data" / "released_configs.json").read_text())
ORDINARY: Keys = DATA["ordinary"]
# Everything that PretrainedConfig of transformers 4.30 to 4.57 can write for any model, with its defaults.
TRANSFORMERS_4: Keys = DATA["transformers_4"]
RELEASED: dict[str, Keys] = {name: {**ORDINARY, **keys} for name, keys in DATA["released"].items()}
OUTER: Keys = {
    **{key: ORDINARY[key] for key in ("architectures", "torch_dtype", "transformers_version")},
    "vision_config": {"hidden_size": 32, "model_type": "a_vision_model", "num_hidden_layers": 2},
}
COMPOSITE: dict[str, Keys] = {name: {**OUTER, **keys} for name, keys in DATA["with_images"].items()}
# Types without an entry: the text parts of models with images, and models without public files.
WITHOUT_DATA = set(DATA["without_data"])


@pytest.mark.parametrize("name", [*RELEASED, *COMPOSITE])
def test_a_released_model_is_described_without_notes(name: str) -> None:
    assert describe({**RELEASED, **COMPOSITE}[name], "m").notes == ()


def test_each_supported_type_has_data_or_is_listed_without() -> None:
    supported = {one for family in FAMILIES for one in family.model_types} | {one.model_type for one in COMPOSITES}
    types = {config["model_type"] for config in (*RELEASED.values(), *COMPOSITE.values())}
    assert supported - types == WITHOUT_DATA


def test_the_first_files_of_llama_have_the_context_of_the_class() -> None:
    config = {key: value for key, value in ORDINARY.items() if key != "max_position_embeddings"}
    found = describe({**config, "max_sequence_length": 2048, "model_type": "llama"}, "m").config
    assert found.max_position_embeddings == CONFIG_MAPPING["llama"]().max_position_embeddings == 2048


def test_missing_sizes_of_older_files_are_the_class_defaults() -> None:
    found = describe(COMPOSITE["BakLLaVA"], "m").config
    assert (found.hidden_units, found.num_layer, found.head_num, found.kv_head_num) == (4096, 32, 32, 8)
    assert (found.layers[0].window, found.max_position_embeddings) == (4096, 32768)


@pytest.mark.parametrize("text_type", ["mistral", "qwen2"])
def test_sizes_of_a_text_part_equal_transformers(text_type: str) -> None:
    """llava has no own defaults for these types."""
    found = describe({"model_type": "llava", "text_config": {"model_type": text_type}}, "m").config
    theirs = CONFIG_MAPPING[text_type]()
    assert found.max_position_embeddings == theirs.max_position_embeddings
    assert (found.vocab_size, found.hidden_units) == (theirs.vocab_size, theirs.hidden_size)
    assert (found.inter_size, found.num_layer) == (theirs.intermediate_size, theirs.num_hidden_layers)
    assert (found.head_num, found.kv_head_num) == (theirs.num_attention_heads, theirs.num_key_value_heads)


def test_keys_of_transformers_4_are_known_to_every_family() -> None:
    for config in RELEASED.values():
        assert describe({**TRANSFORMERS_4, **config}, "m").notes == ()


@pytest.mark.parametrize(
    ("model_type", "key", "value"),
    [
        ("qwen3_moe", "shared_expert_intermediate_size", 64),
        ("qwen3_moe", "use_qk_norm", False),
        ("qwen3", "use_qk_norm", False),
        ("llama", "use_qk_norm", True),
        ("llama", "use_sliding_window", True),
        ("llama", "sliding_window_size", 4096),
        ("llama", "sliding_window", 4096),
        ("qwen2", "qkv_bias", False),
        ("phi3", "full_attn_mod", 2),
        # Embedding models of Qwen2, such as gte-Qwen2, also attend to later tokens.
        ("qwen2", "is_causal", False),
    ],
)
def test_values_that_would_be_computed_wrongly_are_rejected(model_type: str, key: str, value: Any) -> None:
    config = next(config for config in RELEASED.values() if config["model_type"] == model_type)
    with pytest.raises(UnsupportedError, match=key):
        describe({**config, key: value}, "m")
