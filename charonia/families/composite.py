"""Models that read images, video or sound in addition to text. Their text part is a model of another family.

config.json has the text part's config in `text_config`. The other parts of the files are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from charonia.errors import ModelError
from charonia.families.config_keys import HARMLESS, READ_BY_ALL, check_keys, words
from charonia.families.spec import HfConfig

# Name prefixes of the text part: in files of transformers 5, and in older ones.
_PREFIXES = (
    ("language_model.model.", "model."),
    ("language_model.", ""),
    ("model.language_model.", "model."),
    ("model.text_model.", "model."),
)
_TOWERS = (
    *("connector.", "image_newline", "mlp1.", "multi_modal_projector.", "projector.", "vision_model."),
    "vision_embedder.",
    *("vision_projector.", "vision_tower.", "visual.", "audio_tower.", "embed_audio.", "embed_vision."),
)
# Keys outside text_config that also apply to the text part.
_TIED = "tie_word_embeddings"
_SHARED = ("bos_token_id", "eos_token_id", _TIED, "quantization_config", "dtype", "torch_dtype")

_LLM = "llm_config"  # the name of text_config in InternVL's own files
_OUTER = frozenset({"model_type", "text_config", _LLM, *_SHARED})

# Older files omit keys of text_config that have the default of the class in transformers: LLaVA-NeXT with Mistral omits
# most sizes, and LLaVA-OneVision the context of Qwen2.
_CLASS_DEFAULTS: dict[str, dict[str, Any]] = {
    "mistral": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
    },
    "qwen2": {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 32768,
    },
}


@dataclass(frozen=True)
class Composite:
    """A model with a text part.

    text_type: the text part's model_type if text_config does not name it. defaults: values of a text part of that type
    if text_config does not name them.
    """

    model_type: str
    title: str
    text_type: str
    tied: bool | None = None  # default of tie_word_embeddings; None: the text part's default
    harmless: frozenset[str] = frozenset()  # keys of the other parts without a word such as "image"
    defaults: Mapping[str, Any] = field(default_factory=dict)
    flat: bool = False  # older files have the text part's keys next to vision_config, and no text_config
    prefixes: tuple[tuple[str, str], ...] = _PREFIXES
    ignored: tuple[str, ...] = tuple(f"{place}{tower}" for place in ("", "model.") for tower in _TOWERS)


def text_part(config: HfConfig) -> Mapping[str, Any]:
    """Return the object in config.json that describes the text part, or an empty one."""
    text = config.get("text_config") or config.get(_LLM)
    return text if isinstance(text, dict) else {}


def text_config(composite: Composite, config: HfConfig) -> dict[str, Any]:
    """Return the config of the text part, with the shared keys. Raises ModelError if there is none."""
    text = config.get("text_config") or config.get(_LLM)
    if text is None and composite.flat and "hidden_size" in config:
        text = {key: value for key, value in config.items() if not _is_other(key)}
        text["model_type"] = composite.text_type
    if not isinstance(text, dict):
        raise ModelError(
            f"config.json: text_config is missing, the part of a {composite.model_type} model that writes text"
        )
    default: dict[str, Any] = {"model_type": composite.text_type}
    kind = text.get("model_type", composite.text_type)
    default |= _CLASS_DEFAULTS.get(kind, {}) if isinstance(kind, str) else {}
    if kind == composite.text_type:
        default |= composite.defaults
    if composite.tied is not None:
        default[_TIED] = composite.tied
    shared = {key: config[key] for key in _SHARED if config.get(key) is not None}
    # Older files have this key in the text part only. If it is wrong, the files have an output layer, which is used.
    if text.get(_TIED) is True:
        shared[_TIED] = True
    return {
        **default,
        **{key: value for key, value in text.items() if value is not None or key not in default},
        **shared,
    }


def outer_keys(composite: Composite, config: HfConfig) -> list[str]:
    """Return the unknown keys next to `text_config` that can hardly change results. Raises the errors of check_keys."""
    text = config.get("text_config") or config.get(_LLM)
    if not isinstance(text, dict):
        return []
    # Some files repeat keys of the text part. The values in the text part count.
    outer = {key: value for key, value in config.items() if not _is_other(key) and text.get(key) != value}
    # Fine-tunes of Qwen2.5-VL repeat a window, and disable it with use_sliding_window next to it.
    if "use_sliding_window" in config:
        outer["use_sliding_window"] = config["use_sliding_window"]
    return check_keys(outer, _OUTER, composite.harmless, composite.title, of_text=READ_BY_ALL | text.keys())


def _is_other(key: str) -> bool:
    """Whether a key concerns images, video or sound."""
    return key not in HARMLESS and any(word in key for word in ("audio", "image", "multimodal", "video", "vision"))


# LLaVA 1.5 omits keys with the default of the class for Llama in transformers.
_LLAMA_7B = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
}

_LLAVA = words("ignore_index projector_hidden_act use_image_newline_parameter")
_GEMMA4 = words("boa_token_id boi_token_id eoa_token_id eoa_token_index eoi_token_id")
_IDEFICS = words("scale_factor")  # of the image encoder
_INTERNVL_CHAT = words(
    """
    downsample_ratio max_dynamic_patch min_dynamic_patch pad2square ps_version select_layer system_message template
    use_backbone_lora use_llm_lora use_thumbnail
    """
)

COMPOSITES = (
    Composite("gemma3", "Gemma 3", "gemma3_text", tied=True, harmless=words("boi_token_index eoi_token_index")),
    Composite("gemma4", "Gemma 4", "gemma4_text", tied=True, harmless=_GEMMA4),
    Composite("gemma4_unified", "Gemma 4 12B", "gemma4_unified_text", tied=True, harmless=_GEMMA4),
    Composite(
        "mistral3",
        "Mistral Small 3.1 and 3.2, Magistral, Devstral 2 and Ministral 3",
        "mistral",
        tied=True,
        harmless=words("projector_hidden_act spatial_merge_size"),
    ),
    Composite("llava", "LLaVA", "llama", defaults=_LLAMA_7B, harmless=_LLAVA),
    Composite("internvl", "InternVL", "qwen2", tied=True, harmless=words("downsample_ratio projector_hidden_act")),
    Composite("llava_next", "LLaVA-NeXT", "llama", defaults=_LLAMA_7B, harmless=_LLAVA),
    Composite("llava_onevision", "LLaVA-OneVision", "qwen2", harmless=_LLAVA),
    Composite("idefics3", "Idefics 3", "llama", harmless=_IDEFICS),
    Composite("smolvlm", "SmolVLM", "llama", harmless=_IDEFICS),
    Composite("glm4v", "GLM-4.1V", "glm4v_text"),
    Composite("glm46v", "GLM-4.6V-Flash", "glm4v_text"),
    Composite("glm4v_moe", "GLM-4.5V and GLM-4.6V", "glm4v_moe_text"),
    # InternVL's own files. Released models have these and files for transformers.
    Composite("internvl_chat", "InternVL", "qwen2", harmless=_INTERNVL_CHAT),
    # The model_type in the released files is `vlm`, which is not specific.
    Composite("hyperclovax_vision_v2", "HyperCLOVA X", "hyperclovax", tied=True),
    Composite("qwen2_vl", "Qwen2-VL", "qwen2_vl_text", flat=True),
    Composite("qwen2_5_vl", "Qwen2.5-VL", "qwen2_5_vl_text", flat=True),
    Composite("qwen3_vl", "Qwen3-VL", "qwen3_vl_text"),
    Composite("qwen3_vl_moe", "Qwen3-VL-MoE", "qwen3_vl_moe_text"),
    Composite("qwen3_5", "Qwen3.5, 3.6 and 3.8", "qwen3_5_text"),
    Composite("qwen3_5_moe", "Qwen3.5, 3.6 and 3.8 with experts", "qwen3_5_moe_text"),
)
