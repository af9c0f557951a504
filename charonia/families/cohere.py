"""Command R7B and Command A (Cohere 2): attention and feed-forward read the same normalised input.

Norms subtract the mean. Three of four layers have a window and interleaved rotation; the other layers have neither.
"""

from __future__ import annotations

from charonia.errors import ModelError
from charonia.families.hf_config import number, optional
from charonia.families.llama import attention_bias, llama_spec
from charonia.families.spec import HfConfig, ModelSpec, family
from charonia.families.windows import window_settings


def _describe(config: HfConfig) -> ModelSpec:
    defaults = {"sliding_window": 4096, "tie_word_embeddings": True}
    config = {**defaults, **config, "rms_norm_eps": config.get("layer_norm_eps", 1e-5)}
    period = optional(config, "sliding_window_pattern", 4)
    scale = number(config, "logit_scale", 0.0625)
    if period <= 0 or scale == 0:
        raise ModelError(
            f"config.json: sliding_window_pattern is {period} and logit_scale {scale}; both must be positive"
        )
    windows = window_settings(config, has_window=lambda layer: (layer + 1) % period != 0)
    return llama_spec(
        config,
        **attention_bias(config),
        layer_norm=True,
        parallel_block=True,
        rotary_interleaved=True,
        rotated=[window > 0 for window in windows["windows"]],
        logits_scale=scale,
        **windows,
    )


_KEYS = "attention_bias layer_norm_eps layer_types logit_scale sliding_window sliding_window_pattern"

COHERE2 = family(
    "cohere2",
    "Command R7B and Command A",
    _describe,
    _KEYS,
    harmless="layer_switch use_parallel_embedding",
    only={
        "order_of_interleaved_layers": ("local_attn_first",),
        "position_embedding_type": ("rope_gptj",),
        "use_embedding_sharing": (True,),
        "use_gated_activation": (True,),
        "use_parallel_block": (True,),
        "use_qk_norm": (False,),
    },
)
