"""Families that transformers does not have, computed with numpy in double precision, in simple code.

Written from their published code: InternLM 1 and 2, Qwen 1, Baichuan 1 and 2 with 7 and with 13 billion parameters.
`logits` takes a whole sequence. The result equals a run token by token, because attention is causal, and every rule for
long contexts depends only on a token's position and the prompt's length.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
LAYERS, HEAD, INTER, VOCAB = 3, 16, 160, 320


@dataclass(frozen=True)
class NumpyFamily:
    """A config.json, and how its model differs from the others."""

    config: dict[str, Any]
    # Names of tensors: embedding, last norm and output layer, the layers; in a layer: the norm, q, k and v, the
    # projection after attention, the other norm, gate, up and down.
    names: str
    kv_heads: int
    eps: float
    bases: Callable[[int, int], Array]  # (tokens, tokens of the prompt) -> base of the rotation at each position
    interleaved: bool = False  # q, k and v of a group are next to each other
    alibi: bool = False  # slopes instead of a rotation
    trained: int = 0  # queries grow with the logarithm of the position beyond this length; 0: they do not
    unit_output: bool = False  # rows of the output layer are divided by their length
    biases: tuple[str, ...] = ()  # of modules in a layer

    @property
    def hidden(self) -> int:
        return int(self.config["hidden_size"])

    @property
    def layers(self) -> int:
        return int(self.config["num_hidden_layers"])

    @property
    def heads(self) -> int:
        return self.hidden // HEAD

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the tensors of a checkpoint."""
        embedding, last_norm, output, layers, norm1, qkv, wo, norm2, gate, up, down = self.names.split()
        width = (self.heads + 2 * self.kv_heads) * HEAD
        found: dict[str, tuple[int, ...]] = {embedding: (VOCAB, self.hidden), last_norm: (self.hidden,)}
        found[output] = (VOCAB, self.hidden)
        for i in range(self.layers):
            module = f"{layers}.{i}."
            found[module + norm1] = found[module + norm2] = (self.hidden,)
            found[module + qkv] = (width, self.hidden)
            found[module + wo] = (self.hidden, self.hidden)
            found[module + gate] = found[module + up] = (INTER, self.hidden)
            found[module + down] = (self.hidden, INTER)
        weights = {f"{name}.weight": shape for name, shape in found.items()}
        biases = {f"{name}.bias": shape[:1] for name, shape in found.items() if name.endswith(self.biases)}
        return weights | (biases if self.biases else {})

    def logits(self, w: dict[str, Array], ids: Array, prompt: int) -> Array:
        """ids [n]: the first `prompt` ids are the prompt. Returns [n, vocab]."""
        embedding, last_norm, output, layers, norm1, qkv, wo, norm2, gate, up, down = self.names.split()
        n, heads, kv_heads = len(ids), self.heads, self.kv_heads
        bases, slopes = self.bases(n, prompt), alibi_slopes(heads) if self.alibi else None
        scale = log_n(n, self.trained) if self.trained else 1

        def linear(h: Array, name: str) -> Array:
            return h @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0)

        x = w[f"{embedding}.weight"][ids]
        for i in range(self.layers):
            layer = f"{layers}.{i}."
            packed = linear(norm(x, w[f"{layer}{norm1}.weight"], self.eps), layer + qkv)
            if self.interleaved:
                groups = packed.reshape(n, kv_heads, heads // kv_heads + 2, HEAD)
                q, k, v = groups[:, :, :-2].reshape(n, heads, HEAD), groups[:, :, -2], groups[:, :, -1]
            else:
                q, k, v = np.split(packed.reshape(n, -1, HEAD), [heads, heads + kv_heads], axis=1)
            if not self.alibi:
                q, k = rotate(q, bases) * scale, rotate(k, bases)
            x = x + linear(attend(q, k, v, slopes), layer + wo)
            h = norm(x, w[f"{layer}{norm2}.weight"], self.eps)
            x = x + linear(silu(linear(h, layer + gate)) * linear(h, layer + up), layer + down)
        last = w[f"{output}.weight"]
        if self.unit_output:
            last = last / np.linalg.norm(last, axis=1, keepdims=True)
        return norm(x, w[f"{last_norm}.weight"], self.eps) @ last.T


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


def dynamic_bases(n: int, prompt: int, theta: float, factor: float, trained: int) -> Array:
    """Dynamic NTK: the length is the prompt's length for its tokens, and the position of a token after the prompt."""
    lengths = np.maximum(np.maximum(np.arange(1, n + 1), prompt), trained)
    return theta * (factor * lengths / trained - (factor - 1)) ** (HEAD / (HEAD - 2))


def alibi_slopes(heads: int) -> Array:
    """Press et al. 2021: powers of two; for other numbers of heads, every second slope of the next power is added."""
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    slopes += [2 ** (-8 * (2 * i + 1) / (2 * power)) for i in range(heads - power)]
    return np.array(slopes)


def log_n(n: int, trained: int) -> Array:
    """[n, 1, 1]: the factor of the query at each position: log_trained(position + 1), and 1 up to `trained`."""
    return (np.log(np.maximum(np.arange(1, n + 1), trained)) / np.log(trained))[:, None, None]


_ORDINARY: dict[str, Any] = {
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_size": 96,
    "intermediate_size": INTER,
    "max_position_embeddings": 512,
    "num_attention_heads": 6,
    "num_hidden_layers": LAYERS,
    "tie_word_embeddings": False,
    "vocab_size": VOCAB,
}


def internlm2(bias: bool, *, trained: int = 512, dynamic: bool = False, with_log_n: bool = False) -> NumpyFamily:
    """with_log_n: the engine's setting use_logn_attn, which InternLM 2 does not set itself."""
    theta, factor = 1e6, 2.0
    config = {
        **_ORDINARY,
        "model_type": "internlm2",
        "bias": bias,
        "max_position_embeddings": trained,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "rope_scaling": {"type": "dynamic", "factor": factor} if dynamic else None,
        "rope_theta": theta,
    }
    return NumpyFamily(
        config,
        "model.tok_embeddings model.norm output model.layers attention_norm attention.wqkv attention.wo ffn_norm "
        "feed_forward.w1 feed_forward.w3 feed_forward.w2",
        kv_heads=2,
        eps=1e-5,
        bases=lambda n, prompt: dynamic_bases(n, prompt, theta, factor, trained) if dynamic else np.full(n, theta),
        interleaved=True,
        trained=trained if with_log_n else 0,
        biases=("wqkv", "wo") if bias else (),
    )


def qwen(trained: int) -> NumpyFamily:
    config = {
        **{key: value for key, value in _ORDINARY.items() if key not in ("bos_token_id", "eos_token_id")},
        "model_type": "qwen",
        "intermediate_size": 2 * INTER,  # of gate and up together
        "kv_channels": HEAD,
        "layer_norm_epsilon": 1e-6,
        "no_bias": True,
        "rotary_emb_base": 10000,
        "rotary_pct": 1.0,
        "scale_attn_weights": True,
        "seq_length": trained,
        "use_dynamic_ntk": True,
        "use_logn_attn": True,
    }

    def bases(n: int, prompt: int) -> Array:
        alpha = max(2 ** math.ceil(math.log2(prompt / trained) + 1) - 1, 1)
        return np.full(n, 10000 * alpha ** (HEAD / (HEAD - 2)))

    return NumpyFamily(
        config,
        "transformer.wte transformer.ln_f lm_head transformer.h ln_1 attn.c_attn attn.c_proj ln_2 mlp.w2 mlp.w1 "
        "mlp.c_proj",
        kv_heads=6,
        eps=1e-6,
        bases=bases,
        trained=trained,
        biases=("c_attn",),
    )


def baichuan(billions: int, version: int, heads: int = 6, layers: int = LAYERS) -> NumpyFamily:
    """The models with 7 billion parameters have a rotation, those with 13 billion have ALiBi slopes."""
    config = {
        **_ORDINARY,
        "model_type": "baichuan",
        "hidden_size": HEAD * heads,
        "model_max_length": 512,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "rms_norm_eps": 1e-6,
    }
    if billions == 13:
        del config["max_position_embeddings"]
    if version == 2:
        config["z_loss_weight"] = 0
    return NumpyFamily(
        config,
        "model.embed_tokens model.norm lm_head model.layers input_layernorm self_attn.W_pack self_attn.o_proj "
        "post_attention_layernorm mlp.gate_proj mlp.up_proj mlp.down_proj",
        kv_heads=heads,
        eps=1e-6,
        bases=lambda n, prompt: np.full(n, 10000.0),
        alibi=billions == 13,
        unit_output=version == 2,
    )


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

        weights = {name: values(name, shape) for name, shape in family.shapes().items()}
        folder.mkdir(parents=True, exist_ok=True)
        save_file(weights, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(family.config))
        self._family = family
        self._weights = {name: weight.astype(np.float64) for name, weight in weights.items()}

    def logprobs(self, prompt: list[int], answer: list[int]) -> Array:
        """[answer, vocab]: its log probabilities at each token of the given answer."""
        ids = np.array(prompt + answer)
        logits = self._family.logits(self._weights, ids, len(prompt))[len(prompt) - 1 : -1]
        shifted = logits - logits.max(-1, keepdims=True)
        return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
