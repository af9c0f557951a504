"""Families that transformers does not have, computed with numpy in double precision, in simple code.

Written from their published code: InternLM 1 and 2, Qwen 1, Baichuan 1 and 2 with 7 and with 13 billion parameters.
`logits` takes a whole sequence. The result equals a run token by token, because attention is causal, and every rule for
long contexts depends only on a token's position and the prompt's length.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class NumpyFamily:
    """A config.json, the tensors of its checkpoints (name to shape) and the function that they compute."""

    config: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    # (config, tensors, token ids [n], tokens of the prompt) -> logits [n, vocab]
    logits: Callable[[dict[str, Any], dict[str, Array], Array, int], Array]


def norm(x: Array, weight: Array, eps: float) -> Array:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


def rotate(x: Array, bases: Array) -> Array:
    """x [n, heads, d]: rotates the token at position p with the base bases[p]; pairs are (i, i + d / 2)."""
    n, _, d = x.shape
    frequencies = bases[:, None] ** (-np.arange(0, d, 2) / d)  # [n, d / 2]
    angles = (np.arange(n)[:, None] * frequencies)[:, None, :]
    first, second = x[..., : d // 2], x[..., d // 2 :]
    return np.concatenate(
        [first * np.cos(angles) - second * np.sin(angles), second * np.cos(angles) + first * np.sin(angles)], axis=-1
    )


def attend(q: Array, k: Array, v: Array, slopes: Array | None = None) -> Array:
    """q [n, heads, d], k and v [n, kv heads, d]; slopes [heads]: ALiBi. Returns [n, heads * d]."""
    n, heads, d = q.shape
    k, v = (np.repeat(x, heads // x.shape[1], axis=1) for x in (k, v))
    scores = np.einsum("qhd,khd->hqk", q, k) / math.sqrt(d)
    distance = np.arange(n)[None, :] - np.arange(n)[:, None]  # from the query to the key
    if slopes is not None:
        scores = scores + slopes[:, None, None] * distance
    scores = np.where(distance > 0, -np.inf, scores)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), v).reshape(n, heads * d)


def dynamic_bases(n: int, prompt: int, theta: float, factor: float, trained: int, d: int) -> Array:
    """Dynamic NTK: the length is the prompt's length for its tokens, and the position of a token after the prompt."""
    lengths = np.maximum(np.maximum(np.arange(1, n + 1), prompt), trained)
    return theta * (factor * lengths / trained - (factor - 1)) ** (d / (d - 2))


def alibi_slopes(heads: int) -> Array:
    """Press et al. 2021: powers of two; for other numbers of heads, every second slope of the next power is added."""
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    slopes += [2 ** (-8 * (2 * i + 1) / (2 * power)) for i in range(heads - power)]
    return np.array(slopes)


def log_n(n: int, trained: int) -> Array:
    """[n, 1, 1]: the factor of the query at each position: log_trained(position + 1), and 1 up to `trained`."""
    return (np.log(np.maximum(np.arange(1, n + 1), trained)) / np.log(trained))[:, None, None]


# --- InternLM 2: q, k and v interleaved by groups


def _internlm2(
    config: dict[str, Any], w: dict[str, Array], ids: Array, prompt: int, *, with_log_n: bool = False
) -> Array:
    heads, kv_heads, hidden = config["num_attention_heads"], config["num_key_value_heads"], config["hidden_size"]
    d, group, eps, n = hidden // heads, heads // kv_heads, config["rms_norm_eps"], len(ids)
    scaling = config["rope_scaling"]
    bases = np.full(n, config["rope_theta"])
    if scaling:
        trained = config["max_position_embeddings"]
        bases = dynamic_bases(n, prompt, config["rope_theta"], scaling["factor"], trained, d)
    x = w["model.tok_embeddings.weight"][ids]
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        h = norm(x, w[layer + "attention_norm.weight"], eps)
        qkv = h @ w[layer + "attention.wqkv.weight"].T + w.get(layer + "attention.wqkv.bias", 0)
        qkv = qkv.reshape(n, kv_heads, group + 2, d)
        q, k, v = qkv[:, :, :group].reshape(n, heads, d), qkv[:, :, group], qkv[:, :, group + 1]
        scale = log_n(n, config["max_position_embeddings"]) if with_log_n else 1
        attended = attend(rotate(q, bases) * scale, rotate(k, bases), v)
        x = x + attended @ w[layer + "attention.wo.weight"].T + w.get(layer + "attention.wo.bias", 0)
        h = norm(x, w[layer + "ffn_norm.weight"], eps)
        gated = silu(h @ w[layer + "feed_forward.w1.weight"].T) * (h @ w[layer + "feed_forward.w3.weight"].T)
        x = x + gated @ w[layer + "feed_forward.w2.weight"].T
    return norm(x, w["model.norm.weight"], eps) @ w["output.weight"].T


def internlm2(bias: bool, *, trained: int = 512, dynamic: bool = False, with_log_n: bool = False) -> NumpyFamily:
    """with_log_n: the engine's setting use_logn_attn, which InternLM 2 does not set itself."""
    hidden, inter, heads, kv_heads, d, layers, vocab = 96, 160, 6, 2, 16, 3, 320
    config = {
        "architectures": ["InternLM2ForCausalLM"],
        "model_type": "internlm2",
        "auto_map": {"AutoModelForCausalLM": "modeling_internlm2.InternLM2ForCausalLM"},
        "bias": bias,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": inter,
        "max_position_embeddings": trained,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-5,
        "rope_scaling": {"type": "dynamic", "factor": 2.0} if dynamic else None,
        "rope_theta": 1000000,
        "tie_word_embeddings": False,
        "vocab_size": vocab,
    }
    shapes: dict[str, tuple[int, ...]] = {
        "model.tok_embeddings.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
        "output.weight": (vocab, hidden),
    }
    for i in range(layers):
        layer = f"model.layers.{i}."
        shapes[layer + "attention_norm.weight"] = shapes[layer + "ffn_norm.weight"] = (hidden,)
        shapes[layer + "attention.wqkv.weight"] = ((heads + 2 * kv_heads) * d, hidden)
        shapes[layer + "attention.wo.weight"] = (hidden, heads * d)
        if bias:
            shapes[layer + "attention.wqkv.bias"] = ((heads + 2 * kv_heads) * d,)
            shapes[layer + "attention.wo.bias"] = (hidden,)
        shapes[layer + "feed_forward.w1.weight"] = shapes[layer + "feed_forward.w3.weight"] = (inter, hidden)
        shapes[layer + "feed_forward.w2.weight"] = (hidden, inter)
    return NumpyFamily(config, shapes, functools.partial(_internlm2, with_log_n=with_log_n))


# --- Qwen 1


def _qwen(config: dict[str, Any], w: dict[str, Array], ids: Array, prompt: int) -> Array:
    heads, d, eps, n = config["num_attention_heads"], config["kv_channels"], config["layer_norm_epsilon"], len(ids)
    trained, base = config["seq_length"], config["rotary_emb_base"]
    if config["use_dynamic_ntk"]:
        alpha = max(2 ** math.ceil(math.log2(prompt / trained) + 1) - 1, 1)
        base = base * alpha ** (d / (d - 2))
    bases = np.full(n, float(base))
    scale = log_n(n, trained) if config["use_logn_attn"] else 1
    x = w["transformer.wte.weight"][ids]
    for i in range(config["num_hidden_layers"]):
        layer = f"transformer.h.{i}."
        h = norm(x, w[layer + "ln_1.weight"], eps)
        qkv = h @ w[layer + "attn.c_attn.weight"].T + w[layer + "attn.c_attn.bias"]
        q, k, v = (part.reshape(n, heads, d) for part in np.split(qkv, 3, axis=1))
        attended = attend(rotate(q, bases) * scale, rotate(k, bases), v)
        x = x + attended @ w[layer + "attn.c_proj.weight"].T
        h = norm(x, w[layer + "ln_2.weight"], eps)
        gated = (h @ w[layer + "mlp.w1.weight"].T) * silu(h @ w[layer + "mlp.w2.weight"].T)
        x = x + gated @ w[layer + "mlp.c_proj.weight"].T
    return norm(x, w["transformer.ln_f.weight"], eps) @ w["lm_head.weight"].T


def qwen(trained: int) -> NumpyFamily:
    hidden, inter, heads, d, layers, vocab = 96, 320, 6, 16, 3, 320
    config = {
        "architectures": ["QWenLMHeadModel"],
        "model_type": "qwen",
        "auto_map": {"AutoModelForCausalLM": "modeling_qwen.QWenLMHeadModel"},
        "hidden_size": hidden,
        "intermediate_size": inter,
        "kv_channels": d,
        "layer_norm_epsilon": 1e-6,
        "max_position_embeddings": 512,
        "no_bias": True,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "rotary_emb_base": 10000,
        "rotary_pct": 1.0,
        "scale_attn_weights": True,
        "seq_length": trained,
        "tie_word_embeddings": False,
        "use_dynamic_ntk": True,
        "use_logn_attn": True,
        "vocab_size": vocab,
    }
    shapes: dict[str, tuple[int, ...]] = {
        "transformer.wte.weight": (vocab, hidden),
        "transformer.ln_f.weight": (hidden,),
        "lm_head.weight": (vocab, hidden),
    }
    for i in range(layers):
        layer = f"transformer.h.{i}."
        shapes[layer + "ln_1.weight"] = shapes[layer + "ln_2.weight"] = (hidden,)
        shapes[layer + "attn.c_attn.weight"] = (3 * heads * d, hidden)
        shapes[layer + "attn.c_attn.bias"] = (3 * heads * d,)
        shapes[layer + "attn.c_proj.weight"] = (hidden, heads * d)
        shapes[layer + "mlp.w1.weight"] = shapes[layer + "mlp.w2.weight"] = (inter // 2, hidden)
        shapes[layer + "mlp.c_proj.weight"] = (hidden, inter // 2)
    return NumpyFamily(config, shapes, _qwen)


# --- Baichuan: the models with 7 billion parameters have a rotation, those with 13 billion have ALiBi slopes


def _baichuan(config: dict[str, Any], w: dict[str, Array], ids: Array, prompt: int) -> Array:
    heads, eps, n = config["num_attention_heads"], config["rms_norm_eps"], len(ids)
    d = config["hidden_size"] // heads
    small = "max_position_embeddings" in config
    bases = np.full(n, 10000.0)
    x = w["model.embed_tokens.weight"][ids]
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        h = norm(x, w[layer + "input_layernorm.weight"], eps)
        qkv = (h @ w[layer + "self_attn.W_pack.weight"].T).reshape(n, 3, heads, d)
        q, k, v = qkv[:, 0], qkv[:, 1], qkv[:, 2]
        attended = attend(rotate(q, bases), rotate(k, bases), v) if small else attend(q, k, v, alibi_slopes(heads))
        x = x + attended @ w[layer + "self_attn.o_proj.weight"].T
        h = norm(x, w[layer + "post_attention_layernorm.weight"], eps)
        gated = silu(h @ w[layer + "mlp.gate_proj.weight"].T) * (h @ w[layer + "mlp.up_proj.weight"].T)
        x = x + gated @ w[layer + "mlp.down_proj.weight"].T
    output = w["lm_head.weight"]
    if "z_loss_weight" in config:  # Baichuan 2
        output = output / np.linalg.norm(output, axis=1, keepdims=True)
    return norm(x, w["model.norm.weight"], eps) @ output.T


def baichuan(billions: int, version: int, heads: int = 6) -> NumpyFamily:
    hidden, inter, layers, vocab = 16 * heads, 160, 3, 320
    config: dict[str, Any] = {
        "architectures": ["BaichuanForCausalLM"],
        "model_type": "baichuan",
        "auto_map": {"AutoModelForCausalLM": "modeling_baichuan.BaichuanForCausalLM"},
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": inter,
        "model_max_length": 512,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "vocab_size": vocab,
    }
    config |= {"max_position_embeddings": 512} if billions == 7 else {}
    config |= {"z_loss_weight": 0} if version == 2 else {}
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocab, hidden),
    }
    for i in range(layers):
        layer = f"model.layers.{i}."
        shapes[layer + "input_layernorm.weight"] = shapes[layer + "post_attention_layernorm.weight"] = (hidden,)
        shapes[layer + "self_attn.W_pack.weight"] = (3 * hidden, hidden)
        shapes[layer + "self_attn.o_proj.weight"] = (hidden, hidden)
        shapes[layer + "mlp.gate_proj.weight"] = shapes[layer + "mlp.up_proj.weight"] = (inter, hidden)
        shapes[layer + "mlp.down_proj.weight"] = (hidden, inter)
    return NumpyFamily(config, shapes, _baichuan)


class NumpyModel:
    """A family with random weights, written to a folder like its checkpoints."""

    def __init__(self, family: NumpyFamily, folder: Path, seed: int) -> None:
        from safetensors.numpy import save_file

        generator = np.random.default_rng(seed)

        def values(name: str, shape: tuple[int, ...]) -> Array:
            noise = generator.standard_normal(shape)
            is_norm = len(shape) == 1 and not name.endswith(".bias")
            # As with the models of transformers: logits spread over several units.
            scaled = 1 + 0.2 * noise if is_norm else (0.3 if name.endswith(".bias") else 0.2) * noise
            return scaled.astype(np.float32)

        weights = {name: values(name, shape) for name, shape in family.shapes.items()}
        folder.mkdir(parents=True, exist_ok=True)
        save_file(weights, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(family.config))
        self._family = family
        self._weights = {name: weight.astype(np.float64) for name, weight in weights.items()}

    def logprobs(self, prompt: list[int], answer: list[int]) -> Array:
        """[answer, vocab]: its log probabilities at each token of the given answer."""
        ids = np.array(prompt + answer)
        logits = self._family.logits(self._family.config, self._weights, ids, len(prompt))[len(prompt) - 1 : -1]
        shifted = logits - logits.max(-1, keepdims=True)
        return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
