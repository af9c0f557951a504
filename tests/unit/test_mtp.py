"""A workspace has the MTP layer of a checkpoint only if the setting needs it. Unsuitable models are rejected."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_models import write_pair

from charonia import Engine, SamplingParams, _engine
from charonia.bench.random_model import write_random_model
from charonia.errors import UnsupportedError
from charonia.families import MTP, describe
from charonia.serve.model import prepare, prepare_all
from charonia.settings import ServeSettings
from charonia.weights import workspace
from charonia.weights.checkpoint import DTYPES, WEIGHT_TYPES, open_checkpoint
from charonia.weights.convert import convert, read_source
from charonia.weights.mtp import mtp_of
from charonia.weights.plan import make_plan
from charonia.weights.safetensors_writer import write_safetensors

DENSE: dict[str, Any] = {
    **{"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"num_hidden_layers": 2, "vocab_size": 320, "max_position_embeddings": 128, "eos_token_id": 2},
    "tie_word_embeddings": False,
}
CONFIG: dict[str, Any] = {
    **DENSE,
    **{"model_type": "glm4_moe", "head_dim": 16, "moe_intermediate_size": 32, "n_routed_experts": 4},
    **{"num_experts_per_tok": 2, "num_nextn_predict_layers": 1},
}
SETTING = {"speculative_method": "mtp"}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def write_mtp_model(folder: Path, config: Mapping[str, Any] = CONFIG, weight_type: str = "fp32") -> None:
    """Write a model with a random MTP layer, and with the copies that released files have."""
    write_random_model(folder, dict(config), weight_type=weight_type, scale=0.2)
    checkpoint, random = open_checkpoint(folder), np.random.default_rng(1)
    tensors: dict[str, Any] = {name: np.array(checkpoint.read(name)) for name in checkpoint.tensors}
    for parts in describe(config, "m").mtp.values():
        for part in parts:
            tensors[part.name] = 0.2 * random.standard_normal(part.file_shape)
    for name in ("embed_tokens", "shared_head.head"):
        tensors[f"model.layers.{config['num_hidden_layers']}.{name}.weight"] = tensors["lm_head.weight"]
    write_tensors(folder, tensors, WEIGHT_TYPES[weight_type])


def write_tensors(folder: Path, tensors: Mapping[str, Any], dtype: str = "F32") -> None:
    shapes = {name: values.shape for name, values in tensors.items()}
    write_safetensors(folder / "new", shapes, dtype, lambda name: [tensors[name].astype(DTYPES[dtype])])
    (folder / "new").rename(folder / "model.safetensors")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_mtp_model(tmp_path / "model")
    return tmp_path / "model"


def mtp_layers(root: Path) -> list[dict[str, Any]]:
    manifest = workspace.read_manifest(root / workspace.WEIGHTS)
    assert bool(manifest.mtp_layers) == any(name.startswith(MTP) for name in manifest.tensors)
    return manifest.mtp_layers


def test_workspace_has_the_layer_only_if_the_setting_needs_it(model: Path, tmp_path: Path) -> None:
    without, with_layer = convert(model, tmp_path / "a"), convert(model, tmp_path / "b", settings=SETTING)
    assert mtp_layers(without) == [] != mtp_layers(with_layer)
    spec = describe(CONFIG, "m")
    elements = sum(math.prod(part.taken) for parts in spec.mtp.values() for part in parts)
    sizes = [(root / workspace.WEIGHTS / "rank-0.safetensors").stat().st_size for root in (without, with_layer)]
    assert 0 <= sizes[1] - sizes[0] - 4 * elements < 10_000  # the header is longer
    assert mtp_layers(prepare(str(model), tmp_path / "run", {})) == []
    assert mtp_layers(prepare(str(model), tmp_path / "run", SETTING)) != []
    assert mtp_layers(prepare(str(model), tmp_path / "run", {"speculative_method": "ngram"})) == []


def test_plan_counts_the_layer(model: Path) -> None:
    settings = {"device": "cpu", "cache_max_entry_count": 0.5, "max_batch_size": 100_000}
    without, made = (make_plan(model, {**settings, **more}, memory="2GiB") for more in ({}, SETTING))
    assert without.speculative_bytes == 0 < made.speculative_bytes
    assert made.weight_bytes == without.weight_bytes
    assert made.fixed_bytes > without.fixed_bytes + made.speculative_bytes - 1
    assert made.num_blocks < without.num_blocks


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_layer_of_a_text_part_is_found(prefix: str, model: Path, tmp_path: Path) -> None:
    text = {**CONFIG, "model_type": "glm4v_moe_text", "attention_bias": False}
    (model / "config.json").write_text(json.dumps({"model_type": "glm4v_moe", "text_config": text}))
    checkpoint = open_checkpoint(model)
    tensors = {name.replace("model.", prefix, 1): np.array(checkpoint.read(name)) for name in checkpoint.tensors}
    write_tensors(model, tensors)
    assert mtp_layers(convert(model, tmp_path / "w", settings=SETTING)) != []


@pytest.mark.usefixtures("all_proposals")
@pytest.mark.parametrize(("scheme", "bits"), [("w8a16", 8), ("w4a16", 4)])
def test_layer_is_rounded_like_the_model(scheme: str, bits: int, tmp_path: Path) -> None:
    write_mtp_model(tmp_path / "m", weight_type="bf16")
    settings = {**SETTING, "device": "cpu", "max_batch_size": 2, "token_budget": 16}
    plans = [make_plan(tmp_path / "m", {**settings, "quantization": name}, memory="2GiB") for name in ("none", scheme)]
    rounded = [  # the other tensors are norms, and the router with its biases
        math.prod(part.taken)
        for name, parts in describe(CONFIG, "m").mtp.items()
        for part in parts
        if "norm" not in name and "gate" not in name and name.endswith(".weight")
    ]
    saved = plans[0].speculative_bytes - plans[1].speculative_bytes
    assert saved == pytest.approx(sum(rounded) * (16 - bits) / 8, rel=0.15), "scales take a part"
    texts = []
    for more in ({}, SETTING):
        with Engine.from_pretrained(tmp_path / "m", quantization=scheme, threads=1, device="cpu", **more) as engine:
            texts.append(engine.generate([[5, 6, 7, 8]], GREEDY)[0].token_ids)
            assert (engine.stats().proposed_tokens > 0) == bool(more)
    assert texts[0] == texts[1]


def test_checkpoint_without_the_layer_is_rejected_by_name(model: Path, tmp_path: Path) -> None:
    write_random_model(tmp_path / "m", CONFIG)
    for act in (
        lambda: convert(tmp_path / "m", tmp_path / "w", settings=SETTING),
        lambda: prepare(str(tmp_path / "m"), tmp_path / "run", SETTING),
        lambda: make_plan(tmp_path / "m", SETTING),
        lambda: Engine.from_pretrained(tmp_path / "m", **SETTING),
    ):
        with pytest.raises(UnsupportedError, match=r"no MTP layer .*\.2\.eh_proj\.weight is missing.*choose"):
            act()
    old = convert(model, tmp_path / "old")
    with pytest.raises(
        UnsupportedError, match=r"no MTP layer: convert .* charonia convert MODEL --speculative-method mtp"
    ):
        Engine.from_pretrained(old, **SETTING)
    settings = ServeSettings(_env_file=None, model=str(old))  # type: ignore[call-arg]
    with pytest.raises(UnsupportedError, match="no MTP layer: convert"), ExitStack() as held:
        prepare_all(settings, tmp_path / "run", {**SETTING, "device": "cpu"}, lambda _: None, held)


def test_unsupported_models_are_rejected_by_name(model: Path, tmp_path: Path) -> None:
    write_random_model(tmp_path / "llama", {**DENSE, "model_type": "llama"})
    with pytest.raises(UnsupportedError, match=r"family llama; supported, if .*: deepseek_v3, glm4_moe, .*another"):
        read_source(tmp_path / "llama", mtp=True)
    with pytest.raises(UnsupportedError, match="the task is embed"):
        read_source(model, task="embed", mtp=True)
    write_pair(tmp_path / "m.gguf", tmp_path / "folder", {"else": "F32"})
    with pytest.raises(UnsupportedError, match="not supported for GGUF files: use the Hugging Face checkpoint"):
        Engine.from_pretrained(tmp_path / "m.gguf", **SETTING)


def test_several_ranks_are_rejected_before_anything_is_written(model: Path, tmp_path: Path) -> None:
    ranks = {**SETTING, "tensor_para_size": "2"}
    for act in (lambda: mtp_of(ranks), lambda: convert(model, tmp_path / "w", tp=2, settings=SETTING)):
        with pytest.raises(UnsupportedError, match="needs tensor_para_size = 1, and it is 2: set tensor_para_size = 1"):
            act()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_settings_of_the_engine_name_the_method() -> None:
    field = next(entry for entry in _engine.config_fields() if entry.key == "speculative_method")
    assert "mtp" in field.range and field.default_value == "off"
