"""Writes Hugging Face folders with random weights, for measurements and tests without a download or PyTorch."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from charonia.bench.random_schemes import RANDOM, Scheme, Tensor
from charonia.errors import InvalidRequestError
from charonia.families import ModelSpec, describe
from charonia.progress import Progress
from charonia.weights.checkpoint import DTYPES, NUMPY_TYPES, WEIGHT_TYPES, Array
from charonia.weights.safetensors_writer import write_safetensors

# Canonical names of the weights that a scheme quantises. GPT-OSS' own files have only experts in MXFP4.
_EXPERTS = re.compile(r"layers\.\d+\.feed_forward\.experts\.\d+\.w[123]\.0\.weight")
_LINEAR = re.compile(
    r"per_layer_projection\.weight|layers\.\d+\.(?:per_layer\.(?:gate|projection)\.weight|"
    r"(?:attention\.(?:w_qkv|wo)|conv\.w_(?:in|out)|feed_forward\.(?:experts\.\d+\.|shared\.)?w[123])\.0\.weight)"
)
_SPECIAL = ("<unk>", "<s>", "</s>")
_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@dataclass(frozen=True)
class Shape:
    """The sizes of a Llama-shaped model."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int
    max_positions: int = 4096
    rope_theta: float = 10000.0

    def config(self) -> dict[str, Any]:
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "max_position_embeddings": self.max_positions,
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "rms_norm_eps": 1e-5,
            "rope_theta": self.rope_theta,
            "tie_word_embeddings": False,
            "vocab_size": self.vocab,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }


@dataclass(frozen=True)
class GptOssShape(Shape):
    """The sizes of a model with GPT-OSS' architecture."""

    rope_theta: float = 150000.0
    head_dim: int = 64
    experts: int = 32
    experts_per_token: int = 4

    def config(self) -> dict[str, Any]:
        return {
            **super().config(),
            "architectures": ["GptOssForCausalLM"],
            "model_type": "gpt_oss",
            "head_dim": self.head_dim,
            "num_local_experts": self.experts,
            "num_experts_per_tok": self.experts_per_token,
            "sliding_window": 128,
        }


@dataclass(frozen=True)
class QwenShape(Shape):
    """The sizes of a model with Qwen3.5's architecture. Its gated delta nets have the heads of the 0.8B."""

    rope_theta: float = 1e7
    head_dim: int = 256

    def config(self) -> dict[str, Any]:
        kinds = ["linear_attention"] * 3 + ["full_attention"]
        return {
            **super().config(),
            "architectures": ["Qwen3_5ForCausalLM"],
            "model_type": "qwen3_5_text",
            "head_dim": self.head_dim,
            "layer_types": [kinds[layer % 4] for layer in range(self.layers)],
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 16,
            "linear_value_head_dim": 128,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": self.rope_theta,
                "partial_rotary_factor": 0.25,
                "mrope_interleaved": True,
                "mrope_section": [11, 11, 10],
            },
            "tie_word_embeddings": True,
        }


@dataclass(frozen=True)
class QwenMoeShape(Shape):
    """The sizes of a model with the architecture of Qwen3-30B-A3B. `intermediate` is the size of one expert."""

    rope_theta: float = 1e6
    head_dim: int = 128
    experts: int = 128
    experts_per_token: int = 8

    def config(self) -> dict[str, Any]:
        return {
            **super().config(),
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "head_dim": self.head_dim,
            "moe_intermediate_size": self.intermediate,
            "norm_topk_prob": True,
            "num_experts": self.experts,
            "num_experts_per_tok": self.experts_per_token,
        }


@dataclass(frozen=True)
class GlmShape(Shape):
    """The sizes of a model with GLM-4.5's architecture, whose layers all have experts, and with its MTP layer."""

    rope_theta: float = 1e6
    experts: int = 16
    experts_per_token: int = 4

    def config(self) -> dict[str, Any]:
        return {
            **super().config(),
            "architectures": ["Glm4MoeForCausalLM"],
            "model_type": "glm4_moe",
            "head_dim": self.hidden // self.heads,
            "first_k_dense_replace": 0,
            "moe_intermediate_size": self.intermediate,
            "n_routed_experts": self.experts,
            "n_shared_experts": 1,
            "num_experts_per_tok": self.experts_per_token,
            "num_nextn_predict_layers": 1,
            "use_qk_norm": True,
        }


@dataclass(frozen=True)
class GemmaShape(Shape):
    """The sizes of a model with the architecture of Gemma 4 E2B: four layers of five have a window, and the last four
    of seven read the keys and values of earlier ones."""

    def config(self) -> dict[str, Any]:
        return {
            **super().config(),
            "architectures": ["Gemma4ForCausalLM"],
            "model_type": "gemma4_text",
            "hidden_activation": "gelu_pytorch_tanh",
            "head_dim": 256,
            "global_head_dim": 512,
            "hidden_size_per_layer_input": 256,
            "vocab_size_per_layer_input": self.vocab,
            "layer_types": [
                "full_attention" if layer % 5 == 4 else "sliding_attention" for layer in range(self.layers)
            ],
            "num_kv_shared_layers": self.layers * 4 // 7,
            "rms_norm_eps": 1e-6,
            "sliding_window": 512,
            "tie_word_embeddings": True,
            "use_double_wide_mlp": True,
            "final_logit_softcapping": 30.0,
        }


# Prefixes of the six numbers, by architecture.
_ARCHITECTURES: dict[str, type[Shape]] = {
    "gpt-oss-": GptOssShape,
    "qwen3.5-": QwenShape,
    "qwen3-moe-": QwenMoeShape,
    "gemma4-": GemmaShape,
    "glm4-moe-": GlmShape,
}
# The names in docs and reports.
SHAPES = {
    "tiny": Shape(2, 64, 4, 2, 160, 320, 2048),
    "m05": Shape(16, 1536, 12, 4, 4096, 32000),
    "m11": Shape(22, 2048, 32, 4, 5632, 32000),
    "llama2-7b": Shape(32, 4096, 32, 32, 11008, 32000),
    "llama3-8b": Shape(32, 4096, 32, 8, 14336, 128256, 8192, 500000.0),
}
# Values of the random block that a quick model repeats: 64 MB in 16 bits.
_BLOCK = 1 << 25
# The distance between the beginnings of two tensors in the block; odd, so that every place is used before one repeats.
_STRIDE = 7_654_321


def parse_shape(text: str) -> Shape:
    """Parse a name of SHAPES, or six sizes separated by commas, which may follow a prefix of _ARCHITECTURES."""
    if text in SHAPES:
        return SHAPES[text]
    prefix = next(filter(text.startswith, _ARCHITECTURES), "")
    sizes = text.removeprefix(prefix)
    try:
        layers, hidden, heads, kv_heads, intermediate, vocab = (int(part) for part in sizes.split(","))
    except ValueError as error:
        raise InvalidRequestError(
            f"shape {text!r} is not known; expected {', '.join(SHAPES)}, or six numbers separated by commas (layers, "
            "hidden, heads, KV heads, intermediate, vocabulary: 2,64,4,2,160,320), which may follow "
            f"{', '.join(_ARCHITECTURES)}"
        ) from error
    return _ARCHITECTURES.get(prefix, Shape)(layers, hidden, heads, kv_heads, intermediate, vocab)


def write_random_model(
    folder: Path,
    shape: Shape | Mapping[str, Any],
    *,
    weight_type: str = "bf16",
    scheme: str = "",
    seed: int = 0,
    scale: float = 0.02,
    quick: bool = False,
    show_progress: bool = False,
) -> None:
    """Write config.json, model.safetensors and a tokenizer that spells texts byte by byte.

    shape: the sizes of a Llama-shaped model, or the config.json of any supported family; its vocabulary must have at
    least 259 tokens. weight_type: bf16 | fp16 | fp32. scheme: one of random_schemes.SCHEMES, or empty for weights that
    are not quantised; codes are random, and all scales are equal. scale: standard deviation of the weights. quick: all
    tensors are parts of one random block, so that a large model is written as fast as the disk allows.
    """
    if weight_type not in WEIGHT_TYPES:
        raise InvalidRequestError(f"dtype {weight_type!r} is not known; expected {', '.join(WEIGHT_TYPES)}")
    config = dict(shape.config() if isinstance(shape, Shape) else shape)
    config["torch_dtype"] = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[weight_type]
    spec = describe(config, folder.name)
    extra = spec.mtp if isinstance(shape, GlmShape) else {}
    dtype_name = WEIGHT_TYPES[weight_type]
    tensors = {
        part.name: Tensor(dtype_name, part.file_shape, _norm_value(spec, canonical))
        for canonical, parts in {**spec.tensors, **extra}.items()
        for part in parts
    }
    if scheme:
        only_experts = scheme == "mxfp4" and spec.interleaved_experts
        quantised = _EXPERTS if only_experts else _LINEAR
        linear = {
            part.name: part.shape
            for canonical, parts in spec.tensors.items()
            for part in parts
            if quantised.fullmatch(canonical)
        }
        made = Scheme(scheme, (cols for _, cols in linear.values()), scale, dtype_name)
        config["quantization_config"] = made.config(["re:.*self_attn.*"] if only_experts else [])
        for name, (rows, cols) in linear.items():
            del tensors[name]
            tensors |= made.tensors(name.removesuffix(".weight"), rows, cols)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    write_byte_tokenizer(folder, spec.config.vocab_size)
    _write_tensors(folder / "model.safetensors", tensors, seed, scale, quick, show_progress)


def _norm_value(spec: ModelSpec, canonical: str) -> float | None:
    """Return the value of a norm's weights and of factors; RANDOM for other tensors."""
    if not canonical.endswith(("norm.weight", ".scalar.weight", ".expert_scales.weight")):
        return RANDOM
    return 0 if spec.config.norm_unit_offset else 1


def _write_tensors(
    file: Path, tensors: dict[str, Tensor], seed: int, scale: float, quick: bool, show_progress: bool
) -> None:
    generator = np.random.default_rng(seed)

    def random(dtype: str, *size: int) -> Array:
        """Draw normally distributed floats, or uniformly distributed integers."""
        kind = NUMPY_TYPES[dtype]
        if dtype in DTYPES or dtype == "F8_E4M3":
            deviation = np.float32(scale if dtype in DTYPES else 1)
            return (generator.standard_normal(size, dtype=np.float32) * deviation).astype(kind)
        return generator.integers(0, 256, (*size[:-1], size[-1] * kind.itemsize), np.uint8).view(kind)

    sizes = {name: math.prod(tensor.shape) for name, tensor in tensors.items()}
    types = {name: tensor.dtype for name, tensor in tensors.items()}
    longest: dict[str, int] = {}
    for name, dtype in types.items():
        longest[dtype] = max(sizes[name], longest.get(dtype, 0))
    drawn = {tensor.dtype for tensor in tensors.values() if tensor.value is RANDOM}
    blocks = {dtype: random(dtype, min(_BLOCK, longest[dtype])) for dtype in longest if quick and dtype in drawn}
    places = {name: index * _STRIDE for index, name in enumerate(tensors)}

    def values(name: str) -> Iterator[Array]:
        tensor = tensors[name]
        if tensor.value is not RANDOM:
            yield np.broadcast_to(np.array(tensor.value).astype(NUMPY_TYPES[tensor.dtype]), tensor.shape)
        elif quick:
            block = blocks[tensor.dtype]
            left, place = sizes[name], places[name] % len(block)
            while left:
                piece = block[place : place + left]
                yield piece
                left, place = left - len(piece), 0
        else:
            rows = tensor.shape[0]
            for first in range(0, rows, 4096):
                yield random(tensor.dtype, min(4096, rows - first), *tensor.shape[1:])

    total = sum(sizes[name] * NUMPY_TYPES[types[name]].itemsize for name in tensors)
    with Progress(show_progress).task("writing random weights", total) as advance:
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        write_safetensors(file, shapes, types, values, advance, checksum=False)


def write_byte_tokenizer(folder: Path, vocab: int) -> None:
    """Write a byte-level BPE without merges: three special tokens, 256 bytes, and words that no text is split into."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*_SPECIAL, *alphabet]
    if vocab < len(names):
        raise InvalidRequestError(f"a vocabulary of {vocab} is too small: it needs at least {len(names)}")
    names += [f"Ġw{index}" for index in range(vocab - len(names))]
    tokenizer = Tokenizer(models.BPE({name: index for index, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in _SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "chat_template": _CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
