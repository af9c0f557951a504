"""Random EAGLE-3 heads, in the formats of the hub."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

LAYERS = [0, 1, 2]


@dataclass(frozen=True)
class Head:
    """A head for a model. `own`: other keys of its layer; `outer`: keys outside of transformer_layer_config."""

    vocab: int = 320
    drafts: int = 200  # draft_vocab_size
    hidden: int = 64
    target: int = 64  # hidden size of the model
    layers: list[int] = field(default_factory=lambda: list(LAYERS))
    embeds: bool = True  # has an embedding of its own
    speculators: bool = False  # the format
    verifier: str | None = "m"  # speculators: the name of the model
    before_residual: bool = False
    own: dict[str, Any] = field(default_factory=dict)
    outer: dict[str, Any] = field(default_factory=dict)

    @property
    def layer(self) -> dict[str, Any]:
        """Return the keys of the layer."""
        return {
            **{"model_type": "llama", "hidden_size": self.hidden, "intermediate_size": 96, "head_dim": 16},
            **{"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1, "rms_norm_eps": 1e-5},
            **{"vocab_size": self.vocab, "max_position_embeddings": 256, "rope_theta": 5000.0, "hidden_act": "silu"},
            **self.own,
        }

    def config(self) -> dict[str, Any]:
        """Return config.json."""
        outer = {
            **{"draft_vocab_size": self.drafts, "eagle_aux_hidden_state_layer_ids": self.layers},
            **{"norm_before_residual": self.before_residual, "target_hidden_size": self.target, **self.outer},
        }
        if not self.speculators:
            return {"architectures": ["LlamaForCausalLMEagle3"], **self.layer, **outer}
        verifier = {"name_or_path": self.verifier, "architectures": ["LlamaForCausalLM"]}
        return {
            **{"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "speculators_version": "0.1"},
            **outer,
            "speculators_config": {"algorithm": "eagle3", "verifier": verifier},
            "transformer_layer_config": self.layer,
        }

    def tensors(self) -> dict[str, Any]:
        """Return random tensors, by their names in the files."""
        random, hidden, keys = np.random.default_rng(11), self.hidden, self.layer
        heads, kv_heads = keys["num_attention_heads"] * 16, keys["num_key_value_heads"] * 16
        place = "layers.0." if self.speculators else "midlayer."
        shapes: dict[str, tuple[int, ...]] = {
            "fc": (hidden, 3 * self.target),
            f"{place}self_attn.q_proj": (heads, 2 * hidden),
            f"{place}self_attn.k_proj": (kv_heads, 2 * hidden),
            f"{place}self_attn.v_proj": (kv_heads, 2 * hidden),
            f"{place}self_attn.o_proj": (hidden, heads),
            f"{place}mlp.gate_proj": (96, hidden),
            f"{place}mlp.up_proj": (96, hidden),
            f"{place}mlp.down_proj": (hidden, 96),
            "lm_head": (self.drafts, hidden),
            **({"embed_tokens": (self.vocab, hidden)} if self.embeds else {}),
            **{f"{place}{name}": (hidden,) for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")},
            "norm": (hidden,),
            **({"input_norm": (3 * self.target,)} if self.outer.get("norm_before_fc") else {}),
            **({f"fc_norm.{part}": (self.target,) for part in range(3)} if self.outer.get("fc_norm") else {}),
        }
        if keys["model_type"] == "qwen3":
            shapes |= {f"{place}self_attn.{name}": (16,) for name in ("q_norm", "k_norm")}
        out: dict[str, Any] = {}
        for name, shape in shapes.items():
            values = (1 if len(shape) == 1 else 0) + 0.2 * random.standard_normal(shape)
            out[f"{name}.weight"] = values.astype(np.float32)
        tokens = np.sort(random.permutation(self.vocab)[: self.drafts])
        out["d2t"] = tokens - np.arange(self.drafts)
        out["t2d"] = np.isin(np.arange(self.vocab), tokens)
        return out

    def write(self, folder: Path, changes: Mapping[str, Any] | None = None, *, binary: bool = False) -> dict[str, Any]:
        """Write the head, and return its tensors. changes: of tensors; None removes one."""
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(self.config()))
        tensors = {key: value for key, value in (self.tensors() | dict(changes or {})).items() if value is not None}
        if binary:
            import torch

            torch.save({key: torch.from_numpy(value) for key, value in tensors.items()}, folder / "pytorch_model.bin")
        else:
            save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return tensors
