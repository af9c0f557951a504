"""Model families: how a Hugging Face config and its tensors map to the engine's. One short file per family."""

from __future__ import annotations

from charonia.errors import ModelError, UnsupportedError
from charonia.families import baichuan, experts, gemma, internlm, llama, mistral, phi3, qwen, qwen2, yi
from charonia.families.spec import (
    Family,
    HfConfig,
    ModelConfig,
    ModelSpec,
    Quantised,
    Quantization,
    QuantizationConfig,
    Scheme,
    TensorMap,
    TensorPart,
    stacked_shape,
)

__all__ = [
    "FAMILIES",
    "Family",
    "HfConfig",
    "ModelConfig",
    "ModelSpec",
    "Quantised",
    "Quantization",
    "QuantizationConfig",
    "Scheme",
    "TensorMap",
    "TensorPart",
    "describe",
    "stacked_shape",
]

FAMILIES: tuple[Family, ...] = (
    llama.FAMILY,
    mistral.FAMILY,
    internlm.INTERNLM,
    internlm.INTERNLM2,
    internlm.INTERNLM3,
    qwen.FAMILY,
    qwen2.QWEN2,
    qwen2.QWEN3,
    baichuan.FAMILY,
    yi.FAMILY,
    phi3.FAMILY,
    gemma.GEMMA2,
    gemma.GEMMA3_TEXT,
    gemma.GEMMA3,
    experts.MIXTRAL,
    experts.QWEN2_MOE,
    experts.QWEN3_MOE,
    experts.GLM4_MOE,
)


def describe(config: HfConfig, model_name: str) -> ModelSpec:
    """Maps config.json to what the engine runs.

    Raises UnsupportedError for a family or a feature that is not supported and ModelError for values that are missing
    or contradict each other; each text names the key and its value.
    """
    model_type = config.get("model_type")
    if model_type is None:
        raise ModelError("config.json has no model_type: this is not the folder of a Hugging Face language model")
    for family in FAMILIES:
        if model_type in family.model_types:
            return family.describe(config, model_name)
    supported = ", ".join(f"{family.title} ({'/'.join(family.model_types)})" for family in FAMILIES)
    raise UnsupportedError(f"model family {model_type!r} is not supported; supported: {supported}")
