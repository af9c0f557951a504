"""make_gguf.py HF_FOLDER FILE: a random Llama-shaped bf16 model as GGUF, with a tokenizer of its number of tokens."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from common import FIRST_TOKEN, config_of

_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_TOP_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def _read(path: Path) -> dict[str, Any]:
    """Tensors of a safetensors file as the bits of bf16, mapped."""
    data = np.memmap(path, np.uint8, "r")
    length = int(data[:8].view(np.uint64)[0])
    header = json.loads(data[8 : 8 + length].tobytes())
    header.pop("__metadata__", None)
    out = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        assert entry["dtype"] == "BF16", f"{name} is {entry['dtype']}"
        out[name] = np.frombuffer(data, np.uint16, (end - begin) // 2, 8 + length + begin).reshape(entry["shape"])
    return out


def _gguf_name(name: str) -> str:
    stem = name.removesuffix(".weight")
    if stem in _TOP_NAMES:
        return f"{_TOP_NAMES[stem]}.weight"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{_NAMES[part]}.weight"


def _interleaved(weight: Any, heads: int) -> Any:
    """GGUF's Llama rotates neighbouring elements of a head, Hugging Face's an element and one half a head further."""
    rows, cols = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, cols).swapaxes(1, 2).reshape(rows, cols)


def main() -> None:
    source, target = Path(sys.argv[1]), sys.argv[2]
    config = config_of(source)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(target, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)

    special = ["<unk>", "<s>", "</s>"]
    bytes_ = [f"<0x{i:02X}>" for i in range(256)]
    words = [f"w{i}" for i in range(config["vocab_size"] - FIRST_TOKEN)]
    types = gguf.TokenType
    writer.add_tokenizer_model("llama")
    writer.add_token_list([*special, *bytes_, *words])
    writer.add_token_scores([0.0] * config["vocab_size"])
    kinds = [types.UNKNOWN, types.CONTROL, types.CONTROL, *[types.BYTE] * 256, *[types.NORMAL] * len(words)]
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)

    for name, weight in _read(source / "model.safetensors").items():
        if "norm" in name:
            writer.add_tensor(_gguf_name(name), (weight.astype(np.uint32) << 16).view(np.float32))
            continue
        if ".q_proj." in name or ".k_proj." in name:
            weight = _interleaved(weight, heads if ".q_proj." in name else kv_heads)
        bits = np.ascontiguousarray(weight).view(np.uint8)
        writer.add_tensor(_gguf_name(name), bits, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


main()
