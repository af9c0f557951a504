"""Mistral: Llama's shape with a sliding window in all layers."""

from __future__ import annotations

from charonia.families.llama import llama_config, llama_spec
from charonia.families.spec import Family, HfConfig, ModelSpec
from charonia.families.windows import window_settings


def _describe(config: HfConfig, model_name: str) -> ModelSpec:
    return llama_spec(llama_config(config, model_name, "mistral", **window_settings(config, layer_types=False)))


FAMILY = Family("mistral", ("mistral",), "Mistral", _describe)
