"""Qwen1.5, Qwen2 and Qwen2.5 (biases on q, k and v) and Qwen3 (norms on the heads of q and k): Llama's architecture.

If `use_sliding_window` is true, the layers from `max_window_layers` on have a window.
"""

from __future__ import annotations

from typing import Any

from charonia.errors import ModelError
from charonia.families.hf_config import optional, required
from charonia.families.llama import attention_bias, llama_spec
from charonia.families.spec import HfConfig, ModelSpec, family
from charonia.families.windows import switched_window, window_settings

WINDOW_KEYS = "use_sliding_window sliding_window max_window_layers layer_types"
_CHUNKS = "dual_chunk_attention_config"


def _windows(config: HfConfig) -> dict[str, Any]:
    first = optional(config, "max_window_layers", 28)
    return window_settings(switched_window(config, 4096), has_window=lambda layer: layer >= first)


def _without_chunks(config: HfConfig) -> tuple[HfConfig, tuple[str, ...]]:
    """Qwen2.5-1M: limit the context to the trained length, because dual chunk attention, which extends it, is not
    supported (nor in transformers)."""
    chunks = config.get(_CHUNKS)
    if chunks is None:
        return config, ()
    if not isinstance(chunks, dict):
        raise ModelError(f"config.json: {_CHUNKS} is {chunks!r}; it must be an object or null")
    longest = required(config, "max_position_embeddings")
    trained = min(longest, optional(chunks, "original_max_position_embeddings", longest))
    note = f"config.json: {_CHUNKS} is not supported, so the context is {trained} tokens long instead of {longest}"
    return {**config, "max_position_embeddings": trained}, (note,)


def _qwen2(config: HfConfig, **own: Any) -> ModelSpec:
    config, notes = _without_chunks(config)
    return llama_spec(config, notes=notes, attn_bias=True, **_windows(config), **own)


def _qwen3(config: HfConfig, **own: Any) -> ModelSpec:
    return llama_spec(config, head_dim=128, **attention_bias(config), qk_norm=True, **_windows(config), **own)


# q, k and v have biases, and o has none, whatever config.json says; same as in transformers.
_QWEN2_BIASES = {"attention_bias": (False, True), "qkv_bias": (True,)}
QWEN2 = family(
    "qwen2", "Qwen1.5, Qwen2 and Qwen2.5", _qwen2, f"{WINDOW_KEYS} dual_chunk_attention_config", only=_QWEN2_BIASES
)
# Defaults of the text parts of Qwen2-VL and Qwen3-VL in transformers that differ from Qwen2 and Qwen3.


def _qwen2_vl(config: HfConfig) -> ModelSpec:
    return _qwen2({"max_window_layers": 80, **config}, norm_eps=1e-5, theta=1e6)


def _qwen3_vl(config: HfConfig) -> ModelSpec:
    return _qwen3(config, theta=5e5)


QWEN2_VL_TEXT = family(
    "qwen2 qwen2_vl_text qwen2_5_vl_text",
    "the text part of Qwen2-VL",
    _qwen2_vl,
    WINDOW_KEYS,
    harmless="image_token_id video_token_id vision_end_token_id vision_start_token_id vision_token_id",
    only=_QWEN2_BIASES,
)
QWEN3_VL_TEXT = family("qwen3 qwen3_vl_text", "the text part of Qwen3-VL", _qwen3_vl, f"{WINDOW_KEYS} attention_bias")
QWEN3 = family("qwen3", "Qwen3", _qwen3, f"{WINDOW_KEYS} attention_bias", only={"use_qk_norm": (True,)})
