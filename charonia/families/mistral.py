"""Mistral: Llama's shape. Its sliding window is not computed; up to the window's length it changes nothing."""

from __future__ import annotations

from charonia.families.hf_config import optional
from charonia.families.llama import llama_config, llama_tensors
from charonia.families.spec import Family, HfConfig, ModelSpec


def _describe(config: HfConfig, model_name: str) -> ModelSpec:
    model = llama_config(config, model_name, "mistral")
    window = optional(config, "sliding_window", 0)
    if not 0 < window < model.max_position_embeddings:
        return ModelSpec(model, llama_tensors(model))
    warning = (
        f"the model attends over a sliding window of {window} tokens, which is not supported yet: sequences are "
        f"limited to session_len {window} instead of {model.max_position_embeddings}"
    )
    return ModelSpec(model, llama_tensors(model), session_len=window, warnings=(warning,))


FAMILY = Family("mistral", ("mistral",), "Mistral", _describe)
