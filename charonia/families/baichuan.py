"""Baichuan 1 and 2: Llama's architecture with one tensor for q, k and v.

Models with 7 billion parameters use rotary embeddings, models with 13 billion use ALiBi. All have the model_type
`baichuan`, but only the first have `max_position_embeddings` in config.json. Baichuan 2 scales the rows of its output
layer to length 1. It has another vocabulary size, or `z_loss_weight`, which Baichuan 1 does not have.
"""

from __future__ import annotations

from charonia.errors import ModelError
from charonia.families.hf_config import required
from charonia.families.llama import llama_spec
from charonia.families.names import Names
from charonia.families.rope import refuse_scaling
from charonia.families.spec import HfConfig, ModelSpec, family

NAMES = Names(qkv=("self_attn.W_pack",))
_BAICHUAN2_VOCABULARY = 125696


def _describe(config: HfConfig) -> ModelSpec:
    alibi = config.get("max_position_embeddings") is None
    if alibi and config.get("model_max_length") is None:
        raise ModelError(
            "config.json has neither max_position_embeddings (Baichuan with 7 billion parameters) nor model_max_length "
            "(with 13 billion)"
        )
    if alibi:
        refuse_scaling(config, "this model has ALiBi instead of a rotation")
        config = {**config, "max_position_embeddings": required(config, "model_max_length")}
    second = "z_loss_weight" in config or config.get("vocab_size") == _BAICHUAN2_VOCABULARY
    return llama_spec(config, NAMES, alibi=alibi, normalize_output=second)


FAMILY = family("baichuan", "Baichuan 1 and 2", _describe, "model_max_length z_loss_weight")
