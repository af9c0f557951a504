"""Writes GGUF files with random weights, and Hugging Face folders with the same weights in fp32."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import dequantize
from safetensors.numpy import save_file

from charonia.bench.peer_worker import add_vocabulary
from charonia.weights.workspace import locate

Array = np.ndarray[Any, Any]
HIDDEN, INTER, LAYERS, HEADS, KV_HEADS, VOCAB = 256, 512, 2, 4, 2, 320
HEAD = HIDDEN // HEADS
# Byte offsets of the 16-bit scales in a block.
_SCALES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,)}
# Sizes of the scales for weights of about 0.05: K types multiply a scale by a number, and some numbers are up to 127.
_FACTORS = {"Q2_K": 3e-3, "Q3_K": 1e-3, "Q4_K": 2e-4, "Q5_K": 1e-4, "Q6_K": 3e-5, "Q8_0": 7e-4, "IQ4_NL": 7e-4}
_WITH_MINIMUM = ("Q4_1", "Q5_1", "Q4_K", "Q5_K")
_SHAPES = {
    "token_embd": (VOCAB, HIDDEN),
    **{
        f"blk.{layer}.{name}": shape
        for layer in range(LAYERS)
        for name, shape in {
            "attn_q": (HIDDEN, HIDDEN),
            "attn_k": (KV_HEADS * HEAD, HIDDEN),
            "attn_v": (KV_HEADS * HEAD, HIDDEN),
            "attn_output": (HIDDEN, HIDDEN),
            "ffn_gate": (INTER, HIDDEN),
            "ffn_up": (INTER, HIDDEN),
            "ffn_down": (HIDDEN, INTER),
        }.items()
    },
}
_HF = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def random_blocks(random: np.random.Generator, kind: str, rows: int, cols: int) -> Array:
    """[rows, bytes]: blocks of a quantised type, or the bytes of F32, F16 or BF16."""
    dense = {"F32": np.float32, "F16": np.float16}
    if kind in dense:
        return (0.05 * random.standard_normal((rows, cols))).astype(dense[kind])
    if kind == "BF16":
        return gguf.quants.quantize(0.05 * random.standard_normal((rows, cols)).astype(np.float32), gguf_type(kind))
    columns, size = gguf.GGML_QUANT_SIZES[gguf_type(kind)]
    blocks = random.integers(0, 256, (rows, cols // columns, size), dtype=np.uint8)
    if kind == "MXFP4":
        blocks[..., 0] = random.integers(119, 123, blocks.shape[:2])
    else:
        for offset in _SCALES.get(kind, (0, 2) if kind in _WITH_MINIMUM else (0,)):
            scales = (_FACTORS.get(kind, 0.01) * random.uniform(0.5, 1.5, blocks.shape[:2])).astype(np.float16)
            if kind in ("Q4_1", "Q5_1") and offset == 2:
                scales = (-8 * scales).astype(np.float16)
            blocks[..., offset : offset + 2] = scales[..., None].view(np.uint8)
    return blocks.reshape(rows, -1)


def gguf_type(kind: str) -> Any:
    return gguf.GGMLQuantizationType[kind]


def write_pair(
    file: Path,
    folder: Path,
    kinds: Mapping[str, str],
    seed: int = 1,
    split: int = 0,
    output: str = "",
    pooling: Any = None,
) -> None:
    """Write a Llama as a GGUF file, and as a folder with the dequantised weights. kinds: the type of each tensor by its
    name without the layer; `else` is the type of the others. split: tensors in each part. output: the type of an
    output layer that is not tied. pooling: the pooling of an embedding model."""
    random = np.random.default_rng(seed)
    shapes = {**_SHAPES, **({"output": (VOCAB, HIDDEN)} if output else {})}
    kinds = {**kinds, **({"output": output} if output else {})}
    writer = gguf.GGUFWriter(str(file), "llama", split_max_tensors=split)
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    if pooling is not None:
        writer.add_pooling_type(pooling)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HEAD)
    add_vocabulary(writer, VOCAB)
    dense: dict[str, Array] = {}
    for name, (rows, cols) in shapes.items():
        kind = kinds.get(name.rpartition(".")[2], kinds["else"])
        data = random_blocks(random, kind, rows, cols)
        writer.add_tensor(f"{name}.weight", data, raw_dtype=gguf_type(kind))
        dense[name] = dequantize(data, gguf_type(kind)).astype(np.float32).reshape(rows, cols)
    norms = [f"blk.{layer}.{name}" for layer in range(LAYERS) for name in ("attn_norm", "ffn_norm")]
    for name in (*norms, "output_norm"):
        dense[name] = (1 + 0.2 * random.standard_normal(HIDDEN)).astype(np.float32)
        writer.add_tensor(f"{name}.weight", dense[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if split:
        return
    _write_folder(file, folder, dense)


def _write_folder(file: Path, folder: Path, dense: Mapping[str, Array]) -> None:
    unpacked = locate(file).path
    shutil.copytree(unpacked, folder, ignore=shutil.ignore_patterns("*.gguf"))
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "float32"}))
    tensors = {}
    for name, values in dense.items():
        _, _, kind = name.rpartition(".")
        if kind in ("attn_q", "attn_k"):  # llama.cpp's order: the two halves of a head alternate
            values = values.reshape(-1, HEAD // 2, 2, HIDDEN).swapaxes(1, 2).reshape(values.shape)
        layer = name.split(".")[1] if name.startswith("blk.") else ""
        whole = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
        hf = f"model.layers.{layer}.{_HF[kind]}" if layer else whole[name]
        tensors[f"{hf}.weight"] = np.ascontiguousarray(values)
    save_file(tensors, folder / "model.safetensors")
