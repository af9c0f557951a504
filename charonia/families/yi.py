"""Yi: Llama's architecture without biases. Newer releases have the model_type `llama`, the first ones `Yi`."""

from __future__ import annotations

from charonia.families.llama import llama_config, llama_spec
from charonia.families.spec import Family, HfConfig, ModelSpec


def _describe(config: HfConfig, model_name: str) -> ModelSpec:
    return llama_spec(llama_config(config, model_name, "yi", norm_eps=1e-5))


FAMILY = Family("yi", ("yi", "Yi"), "Yi", _describe)
