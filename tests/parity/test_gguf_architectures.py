"""GGUF files that llama.cpp's converter writes give the tokens of the Hugging Face folder, for each architecture."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from missing_tools import needed_module
from safetensors.numpy import load_file, save_file

needed_module("torch")

from llama_cpp_converter import convert  # noqa: E402
from numpy_models import NumpyFamily, NumpyModel, baichuan, internlm2, qwen  # noqa: E402
from parity_models import VOCAB, changed_variant, prompts_of, ranks, write_model  # noqa: E402

from charonia import Engine, Output, SamplingParams, UnsupportedError  # noqa: E402
from charonia.bench.random_model import write_byte_tokenizer  # noqa: E402
from charonia.gguf.config import ARCHITECTURES  # noqa: E402
from charonia.gguf.reader import read_gguf  # noqa: E402
from charonia.weights.plan import make_plan  # noqa: E402

GREEDY = SamplingParams(max_tokens=64, temperature=0, ignore_eos=True, logprobs=1)
_SLIDING, _FULL = "sliding_attention", "full_attention"
_GEMMA4_ROPE = {
    _FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 10000.0},
    _SLIDING: {"rope_type": "default", "rope_theta": 1000.0},
}
# Variants, with the changes that they need: llama.cpp has constants for some keys of config.json.
NAMES: dict[str, dict[str, Any]] = {
    "llama2-grouped": {},
    "llama3": {},
    "llama-tied": {},
    "llama-biases": {},
    "llama-head-dim": {},
    "llama-linear": {},
    "llama-yarn": {},
    "mixtral": {},
    "qwen2": {},
    "qwen2-yarn": {},
    "qwen3": {},
    "qwen2-moe": {"mlp_only_layers": [], "norm_topk_prob": False},
    "qwen3-moe": {},
    "gemma": {},
    "gemma2": {"query_pre_attn_scalar": 32},
    "gemma3": {"query_pre_attn_scalar": 32, "num_hidden_layers": 6, "layer_types": [*[_SLIDING] * 5, _FULL]},
    "gemma4": {},
    "gemma4-31b": {},
    "gemma4-moe": {"rope_parameters": _GEMMA4_ROPE},
    "phi3": {},
    "phi3-longrope": {},
    "smollm3": {"no_rope_layer_interval": 4, "num_hidden_layers": 4},
    "granite": {},
    "olmo2": {},
    "olmo3": {},
    "cohere2": {"num_hidden_layers": 4, "layer_types": [*[_SLIDING] * 3, _FULL]},
    "glm4": {},
    "glm4-moe": {},
    "exaone4": {},
    "exaone4-window": {},
    "gpt-oss": {"swiglu_limit": 7.0},
    "seed-oss": {},
    "ernie4.5": {},
    "minimax-m2": {},
    "lfm2": {},
    "lfm2-moe": {"tie_word_embeddings": True},
    "dots1": {},
    "hunyuan": {"max_position_embeddings": 32768},
    "hunyuan-moe": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "ernie4.5-moe": {"moe_norm_min": 1e-12},
    "qwen3.5": {},
    "qwen3.5-moe": {},
    "mistral3": {},
    "ministral3": {},
    "qwen2.5-vl": {},
    "qwen3-vl": {},
    "qwen3-vl-moe": {},
    "qwen3-next": {"mlp_only_layers": []},
    "mellum": {"mlp_layer_types": ["sparse"] * 3},
    "deepseek-v2": {"n_group": 1, "topk_group": 1},
    "deepseek-v2-other": {"n_group": 1, "topk_group": 1},
    "deepseek-v3": {},
    "glm4-moe-lite": {},
    "mistral4": {},
    "glm": {},
    "hy-v3": {},
}
# Models of numpy_models, with changes to their config.json.
NUMPY: dict[str, tuple[NumpyFamily, dict[str, Any]]] = {
    "internlm2": (internlm2(bias=False), {}),
    "qwen1": (qwen(trained=512), {"use_dynamic_ntk": False, "use_logn_attn": False}),
    "baichuan-7b": (baichuan(7, 1), {}),
    "baichuan-13b": (baichuan(13, 1, layers=40), {}),
}
# Models with a layer for multi-token prediction: a copy of the first layer named here, which gets the second name.
# Then a prefix, and the names of its further tensors after this prefix. The first one is a projection.
MTP = {
    "qwen3.5": ("model.layers.3.", "mtp.layers.0.", "mtp.", "fc pre_fc_norm_embedding pre_fc_norm_hidden norm"),
    "glm4-moe": ("model.layers.2.", "model.layers.3.", "model.layers.3.", "eh_proj enorm hnorm shared_head.norm"),
}
# Keys that the converter reads and transformers does not write.
KEYS: dict[str, dict[str, Any]] = {
    "cohere2": {"rotary_pct": 1.0},
    "internlm2": {"architectures": ["InternLM2ForCausalLM"]},
    "qwen1": {"architectures": ["QWenLMHeadModel"]},
    "baichuan-7b": {"architectures": ["BaichuanForCausalLM"]},
    "baichuan-13b": {"architectures": ["BaichuanForCausalLM"]},
    "deepseek-v3": {"scoring_func": "sigmoid"},
    "glm": {"seq_length": 512, "rope_ratio": 1},
    "glm4-moe-lite": {"first_k_dense_replace": 1},
    "hunyuan-moe": {"moe_intermediate_size": [160] * 3, "moe_topk": [2] * 3, "num_shared_expert": [1] * 3},
}


# A model whose weights of latent attention are quantised without loss, and one that has them in one tensor.
QUANTISED, UNDIVIDED = "deepseek-v2-other_q8", "deepseek-v2_kvb"


def changed_file(folder: Path, pattern: str, change: Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]) -> None:
    """Change the tensors whose names match."""
    tensors = load_file(folder / "model.safetensors")
    found = [name for name in tensors if re.search(pattern, name)]
    assert found
    tensors |= {name: np.ascontiguousarray(change(tensors[name])) for name in found}
    save_file(tensors, folder / "model.safetensors")


def add_predicting_layer(folder: Path, layer: str, its_name: str, more: str, names: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    copied = {name.replace(layer, its_name): tensor.copy() for name, tensor in tensors.items() if layer in name}
    norm = tensors["model.norm.weight"]
    projection, *norms = (f"{more}{name}.weight" for name in names.split())
    tensors |= copied | {name: norm for name in norms} | {projection: np.stack([norm] * 2 * len(norm), axis=1)}
    save_file(tensors, folder / "model.safetensors")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the Hugging Face folder of each variant, and its GGUF file next to it."""
    root = tmp_path_factory.mktemp("models")
    names = [*NAMES, *NUMPY, *(f"{name}_mtp" for name in MTP), QUANTISED, UNDIVIDED]
    folders = [root / name.replace(".", "_") for name in names]
    for name, folder in zip(names, folders, strict=True):
        if name in NUMPY:
            family, changes = NUMPY[name]
            NumpyModel(dataclasses.replace(family, config={**family.config, **changes}), folder, 1)
            write_byte_tokenizer(folder, VOCAB)
        else:
            one, _, kind = name.partition("_")
            changes = NAMES[one] | ({"qk_nope_head_dim": 32} if kind == "q8" else {})  # columns of a block
            write_model(folder, changed_variant(one, **changes), 1)
            if kind == "mtp":
                add_predicting_layer(folder, *MTP[one])
            elif kind == "q8":
                changed_file(folder, "kv_b_proj", lambda weight: np.sign(weight) * np.float32(127 / 512))
            elif name == "qwen3-vl-moe":  # as in the released files
                changed_file(folder, "experts", lambda weight: weight.transpose(0, 2, 1))
        config = json.loads((folder / "config.json").read_text())
        if name in KEYS:
            shutil.copytree(folder, root / f"{folder.name}-keys")
            (root / f"{folder.name}-keys" / "config.json").write_text(json.dumps({**config, **KEYS[name]}))
    convert(root / (f"{one.name}-keys" if name in KEYS else one.name) for name, one in zip(names, folders, strict=True))
    return root


@pytest.fixture(autouse=True)
def own_run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHARONIA_RUN_DIR", str(tmp_path / "run"))


def converted(folder: Path) -> Path:
    """The GGUF file of a folder."""
    file = folder.with_name(f"{folder.name}.gguf")
    assert file.is_file(), file.with_suffix(".error").read_text()
    return file


def generate(model: Path, **settings: int | str) -> list[Output]:
    with Engine.from_pretrained(model, **{"threads": 2, "dtype": "fp32", **settings}) as engine:
        return engine.generate(prompts_of(7, (1, 5, 65, 150)), GREEDY)


@pytest.mark.parametrize("name", [*NAMES, *NUMPY, UNDIVIDED])
def test_gguf_of_each_architecture_equals_its_hugging_face_folder(name: str, models: Path) -> None:
    folder = models / name.replace(".", "_")
    file = converted(models / f"{folder.name}{'-keys' if name in KEYS else ''}")
    assert read_gguf(file).architecture in ARCHITECTURES
    if name in ("deepseek-v2", UNDIVIDED):
        kind = "attn_kv_b" if name == UNDIVIDED else "attn_k_b"
        assert f"blk.0.{kind}.weight" in read_gguf(file).tensors
    check_equal(generate(file), generate(folder))


def check_equal(found: list[Output], expected: list[Output]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)


def test_quantised_weights_of_latent_attention_are_dequantised(models: Path) -> None:
    file = converted(models / QUANTISED)
    types = {name.split(".")[2]: tensor.type for name, tensor in read_gguf(file).tensors.items() if ".attn_" in name}
    assert (types["attn_k_b"], types["attn_v_b"], types["attn_q_b"]) == ("Q8_0", "Q8_0", "F32")
    expected = generate(models / QUANTISED)
    check_equal(generate(file), expected)
    check_equal(generate(file, **ranks(2)), expected)


def test_a_quantised_output_layer_of_baichuan_2_has_rows_of_length_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("charonia.families.baichuan._BAICHUAN2_VOCABULARY", VOCAB)  # only the vocabulary says so
    folder = tmp_path / "baichuan2_output_q8"
    NumpyModel(baichuan(7, 2), folder, 1)
    write_byte_tokenizer(folder, VOCAB)
    lengths = np.float32([[2.0 ** (row % 3)] for row in range(VOCAB)])
    changed_file(folder, "lm_head", lambda weight: np.sign(weight) * lengths * np.float32(127 / 512))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **KEYS["baichuan-7b"]}))
    convert([folder])
    file = converted(folder)
    assert read_gguf(file).tensors["output.weight"].type == "Q8_0"
    expected = generate(folder)
    for settings in ({}, ranks(2)):
        check_equal(generate(file, **settings), expected)


@pytest.mark.parametrize("name", ["baichuan-7b", "deepseek-v3", "qwen3-next"])
def test_a_gguf_file_gives_the_same_on_two_ranks(name: str, models: Path) -> None:
    file = converted(models / f"{name}{'-keys' if name in KEYS else ''}")
    check_equal(generate(file, **ranks(2)), generate(models / name))


def test_a_file_of_chatglms_own_code_has_q_k_and_v_in_one_tensor(models: Path, tmp_path: Path) -> None:
    tensors = load_file(models / "glm" / "model.safetensors")
    for layer in range(3):
        for kind in ("weight", "bias"):
            parts = [tensors.pop(f"model.layers.{layer}.self_attn.{one}_proj.{kind}", None) for one in "qkv"]
            if parts[0] is not None:
                tensors[f"model.layers.{layer}.self_attn.query_key_value.{kind}"] = np.concatenate(parts)
    renamed = {_chatglm(name): tensor for name, tensor in tensors.items()}
    shutil.copytree(models / "glm", tmp_path / "chatglm")
    save_file(renamed, tmp_path / "chatglm" / "model.safetensors")
    config = json.loads((models / "glm" / "config.json").read_text())
    own = {"architectures": ["ChatGLMModel"], "model_type": "chatglm", **KEYS["glm"]}
    (tmp_path / "chatglm" / "config.json").write_text(json.dumps({**config, **own}))
    convert([tmp_path / "chatglm"])
    file = converted(tmp_path / "chatglm")
    assert "blk.0.attn_qkv.weight" in read_gguf(file).tensors
    for settings in ({}, ranks(2)):
        check_equal(generate(file, **settings), generate(models / "glm"))


def _chatglm(name: str) -> str:
    """The name of a tensor in ChatGLM's own code."""
    names = {
        "model.embed_tokens": "transformer.embedding.word_embeddings",
        "model.norm": "transformer.encoder.final_layernorm",
        "lm_head": "transformer.output_layer",
        "model.layers": "transformer.encoder.layers",
        "self_attn.o_proj": "self_attention.dense",
        "self_attn": "self_attention",
        "mlp.gate_up_proj": "mlp.dense_h_to_4h",
        "mlp.down_proj": "mlp.dense_4h_to_h",
    }
    for theirs, ours in names.items():
        name = name.replace(theirs, ours)
    return name


@pytest.mark.parametrize("name", MTP)
def test_layers_for_multi_token_prediction_are_left_out(name: str, models: Path) -> None:
    folder = models / name.replace(".", "_")
    file = converted(models / f"{folder.name}_mtp")
    layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    assert f"blk.{layers}.nextn.eh_proj.weight" in read_gguf(file).tensors
    expected = generate(folder)
    for with_mtp in (file, models / f"{folder.name}_mtp"):
        check_equal(generate(with_mtp), expected)


def test_delta_nets_of_a_gguf_file_need_one_rank(models: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"needs one rank\. Use --tp 1$"):
        make_plan(models / "qwen3_5.gguf", {"tensor_para_size": 2})
