"""Mistral and Ministral 8B: Llama's shape with a sliding window in all layers or in those that `layer_types` lists."""

from __future__ import annotations

from charonia.families.llama import llama_config, llama_spec
from charonia.families.spec import Family, HfConfig, ModelSpec
from charonia.families.windows import window_settings


def _describe(config: HfConfig, model_name: str) -> ModelSpec:
    # Where the key is missing there is the usual window; a null says that there is none.
    config = {"sliding_window": 4096, **config}
    return llama_spec(llama_config(config, model_name, "mistral", per_layer_rope=True, **window_settings(config)))


FAMILY = Family(
    "mistral",
    ("mistral", "ministral"),
    "Mistral and Ministral 8B",
    _describe,
    keys=frozenset({"sliding_window", "layer_types"}),
)
