"""Model families: how a Hugging Face config and its tensors map to the engine's. One short file per family."""

from __future__ import annotations

from dataclasses import replace

from charonia.errors import ModelError, UnsupportedError
from charonia.families import (
    baichuan,
    cohere,
    deepseek,
    experts,
    gemma,
    gemma4,
    glm,
    gpt_oss,
    granite,
    hunyuan,
    internlm,
    lfm2,
    llama,
    minimax,
    mistral,
    olmo,
    phi3,
    qwen,
    qwen2,
    qwen3_5,
    smollm3,
)
from charonia.families.composite import COMPOSITES, outer_keys, text_config, text_part
from charonia.families.config_keys import READ_BY_ALL, check_keys
from charonia.families.names import MTP
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
    "COMPOSITES",
    "FAMILIES",
    "MTP",
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
    "text_part",
]

FAMILIES: tuple[Family, ...] = (
    llama.FAMILY,
    llama.IQUESTCODER,
    llama.SEED_OSS,
    llama.CWM,
    mistral.FAMILY,
    internlm.INTERNLM,
    internlm.INTERNLM2,
    internlm.INTERNLM3,
    qwen.FAMILY,
    qwen2.QWEN2,
    qwen2.QWEN3,
    qwen2.QWEN2_VL_TEXT,
    qwen2.QWEN3_VL_TEXT,
    baichuan.FAMILY,
    llama.YI,
    phi3.FAMILY,
    gemma.GEMMA,
    gemma.VAULTGEMMA,
    gemma.GEMMA2,
    gemma.GEMMA3_TEXT,
    gemma4.GEMMA4,
    gemma4.GEMMA4_UNIFIED,
    mistral.MINISTRAL3,
    glm.GLM,
    glm.GLM4,
    glm.GLM4V_TEXT,
    llama.ERNIE4_5,
    granite.FAMILY,
    granite.HYPERCLOVAX,
    llama.HELIUM,
    smollm3.FAMILY,
    olmo.OLMO2,
    olmo.OLMO3,
    olmo.EXAONE4,
    hunyuan.DENSE,
    cohere.COHERE2,
    experts.MIXTRAL,
    experts.QWEN2_MOE,
    experts.QWEN3_MOE,
    experts.QWEN3_VL_MOE_TEXT,
    experts.GLM4_MOE,
    experts.GLM4V_MOE_TEXT,
    experts.SOLAR_OPEN,
    experts.DOTS1,
    deepseek.DEEPSEEK_V2,
    deepseek.DEEPSEEK_V3,
    deepseek.GLM4_MOE_LITE,
    deepseek.MISTRAL4,
    experts.MELLUM,
    minimax.FAMILY,
    gpt_oss.FAMILY,
    hunyuan.MOE,
    hunyuan.HY_V3,
    experts.ERNIE4_5_MOE,
    qwen3_5.QWEN3_5,
    qwen3_5.QWEN3_5_MOE,
    qwen3_5.QWEN3_NEXT,
    lfm2.LFM2,
    lfm2.LFM2_MOE,
)


def describe(config: HfConfig, model_name: str) -> ModelSpec:
    """Map config.json to the engine's description. For a model that also reads images or sound, describe its text part.

    Raises UnsupportedError for an unsupported family, feature or key of config.json, and ModelError for missing or
    contradictory values. Error messages name the key and its value. The notes of the result name unknown keys.
    """
    model_type = config.get("model_type")
    if model_type is None:
        raise ModelError("config.json has no model_type: this is not the folder of a Hugging Face language model")
    for composite in COMPOSITES:
        if model_type == composite.model_type:
            spec = _with_note(describe(text_config(composite, config), model_name), outer_keys(composite, config))
            return replace(
                spec,
                prefixes=(*spec.prefixes, *composite.prefixes),
                ignored=(*spec.ignored, *composite.ignored),
            )
    for family in FAMILIES:
        if model_type in family.model_types:
            unknown = check_keys(config, READ_BY_ALL | family.keys, family.harmless, family.title, family.only)
            spec = family.describe(config)
            named = replace(spec.config, model_name=model_name, model_family=family.name)
            return _with_note(_with_context(replace(spec, config=named)), unknown)
    raise UnsupportedError(_refusal(config))


def _with_note(spec: ModelSpec, unknown: list[str]) -> ModelSpec:
    note = f"config.json has unknown keys, which are ignored: {', '.join(unknown)}"
    return replace(spec, notes=(*spec.notes, note)) if unknown else spec


def _with_context(spec: ModelSpec) -> ModelSpec:
    """Add a note if the model uses YaRN, but has the context of a model without YaRN."""
    model = spec.config
    reach = int(model.rope_factor * model.rope_original_max_position_embeddings)
    if model.rope_scaling_type != "yarn" or reach <= model.max_position_embeddings:
        return spec
    note = (
        f"config.json: the rope scaling supports {reach} tokens, but the context is max_position_embeddings = "
        f"{model.max_position_embeddings}. Set session_len = {reach} for a longer context"
    )
    return replace(spec, notes=(*spec.notes, note))


def _refusal(config: HfConfig) -> str:
    """Return the error for an unknown model_type: the type, the type of its text part, and all supported types."""
    types = {name for family in FAMILIES for name in family.model_types} | {one.model_type for one in COMPOSITES}
    inner = text_part(config).get("model_type")
    part = f" (its text part is {inner!r})" if inner else ""
    return f"model family {config.get('model_type')!r}{part} is not supported; supported: {', '.join(sorted(types))}"
