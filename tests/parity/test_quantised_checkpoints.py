"""Quantised checkpoints: their entries in the manifest, copies of ranges, and errors with names."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from missing_tools import needed_module

torch = needed_module("torch")

from quantised_models import FORMATS, GPT_OSS, GROUP, Tensors, quantise  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from charonia import Engine, InvalidRequestError, ModelError, UnsupportedError, _engine  # noqa: E402
from charonia.bench.random_model import Shape, write_random_model  # noqa: E402
from charonia.bench.random_schemes import SCHEMES  # noqa: E402
from charonia.families import TensorMap  # noqa: E402
from charonia.quantize.command import check_source  # noqa: E402
from charonia.weights import workspace  # noqa: E402
from charonia.weights.cache_warnings import cache_warnings  # noqa: E402
from charonia.weights.checkpoint import SafetensorsCheckpoint  # noqa: E402
from charonia.weights.convert import convert, link_workspace, read_source  # noqa: E402
from charonia.weights.module_patterns import module_pattern  # noqa: E402
from charonia.weights.plan import make_plan  # noqa: E402
from charonia.weights.quantization_methods import compressed_tensors  # noqa: E402
from charonia.weights.quantization_settings import Settings  # noqa: E402
from charonia.weights.tensor_parallel import split_by, units_of  # noqa: E402

Array = np.ndarray[Any, Any]
SHAPE = Shape(1, 128, 4, 2, 192, 320)
SMALL = {**SHAPE.config(), "torch_dtype": "bfloat16"}
# One config for each way in which a family's quantised tensors differ from Llama's.
FAMILIES: dict[str, dict[str, Any]] = {
    "packed with a bias": {
        **{**SMALL, "model_type": "qwen", "kv_channels": 32, "num_key_value_heads": None, "intermediate_size": 256}
    },
    "packed also gate and up": {**SMALL, "model_type": "phi3"},
    "interleaved": {**SMALL, "model_type": "internlm2", "bias": True},
    "tied": {**SMALL, "model_type": "gemma2", "head_dim": 32, "tie_word_embeddings": True},
    "experts": {**SMALL, "model_type": "mixtral", "num_local_experts": 2},
    "experts and dense layers": {
        **{**SMALL, "model_type": "qwen3_moe", "head_dim": 32, "moe_intermediate_size": 64, "num_hidden_layers": 2},
        **{"num_experts": 2, "num_experts_per_tok": 2, "mlp_only_layers": [0]},
    },
}


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dense") / "m"
    write_random_model(folder, SHAPE, weight_type="fp32", scale=0.2)
    return folder


def manifest_of(root: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((root / workspace.WEIGHTS / "manifest.json").read_text())
    return content


def unpacked(values: Array, bits: int) -> Array:
    """Unpack 32-bit numbers along dimension 0, the lowest bits first."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32).reshape(1, -1, *[1] * (values.ndim - 1))
    fields = (values.view(np.uint32)[:, None] >> shifts) & (2**bits - 1)
    return fields.reshape(-1, *values.shape[1:]).astype(np.int64)


FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def weight_of(folder: Path, entry: dict[str, Any]) -> Array:
    """Return a tensor of a manifest in fp32, read as described in docs/contracts.md."""

    def tensor(place: dict[str, Any]) -> Array:
        return np.asarray(SafetensorsCheckpoint([folder / place["file"]]).read(place["name"]))

    how, bits = entry.get("quantization"), 4 if entry["dtype"] in ("U4", "F4_E2M1") else 8
    pieces = []
    for part in entry["parts"]:
        if how is None:
            values = tensor(part).astype(np.float32)
        else:
            values = np.asarray(decoded(tensor, part, how, bits), np.float32)
        rows = slice(*(part.get("rows") or (0, len(values))), part.get("row_step", 1))
        cols = slice(*(part.get("cols") or (0, values.shape[-1])))
        pieces.append(values[rows] if values.ndim == 1 else values[rows, cols])
    assert list(np.concatenate(pieces).shape) == entry["shape"]
    return np.concatenate(pieces)


def decoded(tensor: Callable[[dict[str, Any]], Array], part: dict[str, Any], how: dict[str, Any], bits: int) -> Array:
    layout, stored, scales = how["layout"], tensor(part), tensor(part["scales"])
    middle = 2 ** (bits - 1)
    zeros: Array | int = 0 if layout in ("rows", "mxfp4") else middle
    if layout == "rows":
        codes = stored.astype(np.float32)
        scales = np.atleast_1d(scales.astype(np.float32))
        scales = np.repeat(scales.reshape(len(scales), -1), how.get("group_rows", 1), axis=0)[: len(codes)]
    elif layout == "packed-rows":
        codes = unpacked(stored.T, bits).T
        if "zeros" in part:
            zeros = unpacked(tensor(part["zeros"]), bits)[: len(codes)]
    elif layout == "mxfp4":
        height = math.prod(stored.shape[: 2 if stored.ndim == 4 else 1])
        stored, scales = stored.reshape(height, -1), scales.reshape(height, -1)
        fields = np.stack([stored & 15, stored >> 4], axis=-1).reshape(height, -1)
        codes, scales = FP4[fields & 7] * np.where(fields & 8, -1, 1), 2.0 ** (scales.astype(np.int64) - 127)
    elif layout == "gptq":
        codes, scales = unpacked(stored, bits).T, scales.T
        if "zeros" in part:
            zeros = unpacked(tensor(part["zeros"]).T, bits) + how.get("zero_offset", 1)
    else:
        order = np.argsort([0, 2, 4, 6, 1, 3, 5, 7])

        def outputs(values: Array) -> Array:
            return unpacked(values.T, 4).reshape(-1, 8, len(values))[:, order].reshape(-1, len(values))

        codes, scales, zeros = outputs(stored), scales.T, outputs(tensor(part["zeros"]))
    cols = codes.shape[1]
    groups = tensor(part["order"]) if "order" in part else np.arange(cols) // how.get("group_size", cols)
    if not isinstance(zeros, int):
        zeros = zeros[:, groups]
    return (codes - zeros).astype(np.float32) * scales.astype(np.float32)[:, groups]


def expected_of(tensors: TensorMap, meant: Tensors) -> dict[str, Array]:
    """Return the canonical tensors of weights with dense names."""
    stacked = {}
    for name, parts in tensors.items():
        pieces = [meant[part.name].numpy() for part in parts]
        for index, part in enumerate(parts):
            rows, cols = part.rows or (0, None), part.cols or (0, None)
            piece = pieces[index]
            pieces[index] = piece[slice(*rows)] if piece.ndim == 1 else piece[slice(*rows), slice(*cols)]
        stacked[name] = np.concatenate(pieces)
    return stacked


def holds(
    source: Path, folder: Path, meant: Tensors, tmp_path: Path, ranks: int, quantised: str = "attention.wo"
) -> None:
    """Check that linked and converted workspaces contain the checkpoint's weights. quantised: a part of the names of
    some quantised tensors."""
    spec = read_source(source).spec
    units = units_of(read_source(folder).spec.tensors)
    expected = expected_of(split_by(units, spec.tensors, spec.config, ranks), meant)
    for root in (
        link_workspace(folder, tmp_path / f"l{ranks}", settings={"tensor_para_size": str(ranks)}),
        convert(folder, tmp_path / f"c{ranks}", tp=ranks, dtype="fp32"),
    ):
        tensors = manifest_of(root)["tensors"]
        assert tensors.keys() == expected.keys()
        layers = [name for name in tensors if "quantization" in tensors[name]]
        assert any(quantised in name for name in layers)
        for name, values in expected.items():
            found = weight_of(root / workspace.WEIGHTS, tensors[name])
            assert np.abs(found - values).max() <= 1e-6 * np.abs(values).max(), name


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_copied_in_the_form_of_its_own_tools(name: str, dense: Path, tmp_path: Path) -> None:
    folder = tmp_path / "q"
    meant = quantise(dense, folder, name)
    holds(dense, folder, meant, tmp_path, 1)
    if not name.endswith(" order"):
        holds(dense, folder, meant, tmp_path, 2)
    settings = _engine.read_config_ini(tmp_path / "l1" / workspace.WEIGHTS / "config.ini")
    kinds = {"mx": "mxfp4", "fp": "fp8", "w8": "int8"}
    expected = "int8" if name.startswith(("gptq 8 bits", "w4 in rows")) else kinds.get(name[:2], "int4")
    assert (settings["weight_type"], settings["data_type"]) == (expected, "fp32")
    # Most rows have 128 columns.
    grouped = not any(word in name for word in ("channels", "tensor", "w8a8", "AutoFP8", "ModelOpt", "of 128"))
    assert settings["group_size"] == str(GROUP if grouped else 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "name"),
    [
        *((family, name) for family in FAMILIES for name in ("w4a16 zeros", "gptq zeros", "fp8 of DeepSeek")),
        *((family, GPT_OSS) for family in FAMILIES if "experts" in family),
    ],
)
def test_every_family_is_described_and_copied(family: str, name: str, tmp_path: Path) -> None:
    source, folder = tmp_path / "m", tmp_path / "q"
    write_random_model(source, FAMILIES[family], weight_type="bf16", scale=0.2)
    meant = quantise(source, folder, name)
    for ranks in (1, 2):
        holds(source, folder, meant, tmp_path, ranks, "experts" if name == GPT_OSS else "attention.wo")
    assert read_source(folder).spec.config.data_type == "bf16"
    assert read_source(folder, "fp16").spec.config.data_type == "fp16"


@pytest.mark.parametrize("name", ["w4a16", "gptq zeros", "fp8 blocks"])
def test_a_group_of_the_whole_row_is_no_obstacle_to_several_ranks(name: str, tmp_path: Path) -> None:
    source, folder = tmp_path / "m", tmp_path / "q"
    write_random_model(source, Shape(1, 128, 4, 2, GROUP, 320), weight_type="fp32", scale=0.2)
    meant = quantise(source, folder, name)
    holds(source, folder, meant, tmp_path, 2)


def test_rows_within_a_block_get_scales_of_their_own(tmp_path: Path) -> None:
    source, folder = tmp_path / "m", tmp_path / "q"
    # Without groups in w2, a rank of two has 48 rows of w1, one and a half blocks.
    config = {**FAMILIES["packed also gate and up"], "intermediate_size": 96}
    write_random_model(source, config, weight_type="fp32", scale=0.2)
    meant = quantise(source, folder, "fp8 of DeepSeek")
    edit_tensors(folder, lambda tensors: unquantise(tensors, DOWN, meant[f"{DOWN}.weight"]))
    holds(source, folder, meant, tmp_path, 2)


def test_columns_are_cut_at_blocks_where_the_last_one_of_others_is_short(tmp_path: Path) -> None:
    source, folder = tmp_path / "m", tmp_path / "q"
    # Rows of 192 columns, which are not split, and of 256. A rank has half a block of the keys' 128 rows.
    config = {**SMALL, "model_type": "qwen3", "hidden_size": 192, "head_dim": 64, "intermediate_size": 256}
    write_random_model(source, config, weight_type="fp32", scale=0.2)
    holds(source, folder, quantise(source, folder, "fp8 in blocks of 128"), tmp_path, 2)


def unquantise(tensors: Tensors, module: str, weight: torch.Tensor) -> None:
    for name in [name for name in tensors if name.startswith(module + ".")]:
        del tensors[name]
    tensors[f"{module}.weight"] = weight


def edit_tensors(folder: Path, change: Callable[[Tensors], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / "model.safetensors")


def edit_config(folder: Path, change: Callable[[dict[str, Any]], Any]) -> Any:
    """Change config.json. Returns what `change` returns."""
    config = json.loads((folder / "config.json").read_text())
    result = change(config)
    (folder / "config.json").write_text(json.dumps(config))
    return result


def merge(config: dict[str, Any], change: dict[str, Any]) -> None:
    """Update a configuration. Objects that are not empty are merged."""
    for key, value in change.items():
        if isinstance(value, dict) and value and isinstance(config.get(key), dict):
            merge(config[key], value)
        else:
            config[key] = value


def requantise(folder: Path, **change: Any) -> None:
    """Change quantization_config."""
    edit_config(folder, lambda config: merge(config["quantization_config"], change))


def group(**change: Any) -> dict[str, Any]:
    return {"config_groups": {"group_0": change}}


def weights(**change: Any) -> dict[str, Any]:
    return group(weights=change)


@pytest.fixture(scope="module")
def quantised(dense: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a folder with a format, created once. Tests change copies."""
    root = tmp_path_factory.mktemp("quantised")

    def made(name: str) -> Path:
        folder, source = root / name.replace(" ", "-"), dense
        if name == GPT_OSS and not folder.exists():
            source = root / "experts"
            write_random_model(source, FAMILIES["experts"], weight_type="bf16", scale=0.2)
        if not folder.exists():
            quantise(source, folder, name)
        return folder

    return made


@pytest.fixture
def copied(quantised: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    def made(name: str) -> Path:
        return Path(shutil.copytree(quantised(name), tmp_path / "q"))

    return made


LAYER = "model.layers.0"
UP, DOWN, OUT = f"{LAYER}.mlp.up_proj", f"{LAYER}.mlp.down_proj", f"{LAYER}.self_attn.o_proj"
KEYS, VALUES = f"{LAYER}.self_attn.k_proj", f"{LAYER}.self_attn.v_proj"
EXPERTS = f"{LAYER}.block_sparse_moe.experts"
PAIRS, DOWNS = f"{EXPERTS}.gate_up_proj", f"{EXPERTS}.down_proj"
I32, OWN_ORDER = torch.int32, torch.arange(128, dtype=torch.int32) // GROUP


def drop_experts(tensors: Tensors) -> None:
    for name in [name for name in tensors if name.startswith(EXPERTS)]:
        del tensors[name]


def move_experts(tensors: Tensors) -> None:
    for name in [name for name in tensors if name.startswith(EXPERTS)]:
        tensors[name.replace("block_sparse_moe", "mlp")] = tensors.pop(name)


def repeat_experts(tensors: Tensors) -> None:
    tensors.update({f"{EXPERTS}.{at}.w2.weight": torch.ones(128, 192, dtype=torch.bfloat16) for at in range(2)})


def rename_output(tensors: Tensors) -> None:
    tensors["lm_head.weight_packed"] = tensors.pop("lm_head.weight").int()


# A format, a tensor (of UP if it has no prefix), its new value (None: it is missing; a function: of the old value, or
# of all tensors if no tensor is named), and the error.
DAMAGE: list[tuple[str, str, Any, str]] = [
    *(
        (name, tensor, None, rf"1 tensors are missing: .*{tensor}: download")
        for name, tensor in (
            ("w4a16", "weight_scale"),
            ("w4a16", f"{KEYS}.weight_scale"),
            ("w4a16", "weight_packed"),
            ("w4a16 zeros", "weight_zero_point"),
            ("w8a8 static", "input_scale"),
            ("gptq order", "g_idx"),
            ("awq", "qzeros"),
            ("fp8 of DeepSeek", "weight_scale_inv"),
            (GPT_OSS, f"{DOWNS}_scales"),
            (GPT_OSS, f"{PAIRS}_blocks"),
        )
    ),
    ("w4a16", "weight_scale", torch.ones(192, 2), r"\[192, 2\], but .* says \[192, 4\].*is 32 .* group_size = 64: "),
    ("w4a16", "weight_packed", torch.ones(192, 15, dtype=I32), r"shape \[192, 15\], but config\.json says \[192, 16\]"),
    ("w4a16", "weight_shape", lambda x: x.fill_(5), r"weight_shape says \[5, 5\], but config\.json says \[192, "),
    ("gptq", "qweight", torch.ones(16, 192), r"up_proj\.qweight is of type F32; supported: I32"),
    ("awq", "scales", torch.ones(4, 192).char(), r"up_proj\.scales is of type I8; supported: F32, F16, BF16"),
    ("gptq", "qzeros", lambda x: x + 1, r"qzeros does not have the zeros of a symmetric quantisation.*set it to false"),
    ("gptq", "g_idx", lambda x: x.flip(0), r"g_idx orders the columns, but config\.json says that they are not"),
    ("gptq order", "g_idx", lambda x: x * 0, r"up_proj\.g_idx has groups of other sizes than 32"),
    ("gptq order", "g_idx", lambda x: x.masked_fill(x == 0, -1), r"g_idx has groups of other sizes than 32"),
    # With layouts without an order, the engine would read the columns in file order.
    *(
        (name, kind, OWN_ORDER.flip(0), rf"up_proj\.{kind} orders the columns\. .* only for weight_g_idx of pack-quant")
        for name, kind in (
            *((name, "weight_g_idx") for name in ("w8 in rows", "fp8 blocks", "mxfp4", "gptq order")),
            ("awq", "g_idx"),
        )
    ),
    ("w8 in rows", "weight_g_idx", OWN_ORDER.long(), r"up_proj\.weight_g_idx is of type I64; supported: I32"),
    ("w8a8 static", "weight_zero_point", torch.ones(192, 1).short(), "point is of type I16; supported: F32"),
    ("w8a8 static", "weight_zero_point", torch.ones(192, 1).to(torch.float8_e4m3fn), "is not zero.*symmetric true"),
    ("w8a8 static", "input_zero_point", torch.ones(1).char(), "input_zero_point is not zero.*symmetric true"),
    ("w8a8 static", "weight_shape", torch.ones(2).double(), "weight_shape is of type F64; supported: F32"),
    ("gptq", "bias", torch.ones(192), r"unknown to family llama.*up_proj\.bias"),
    ("gptq", f"{LAYER}.mystery.qweight", torch.ones(1), r"unknown .*mystery\.qweight"),
    ("w8a8 dynamic", "weight", lambda x: x.view(torch.float8_e4m3fn), r"weight is of type F8_E4M3, but .* says I8"),
    ("w4a16", "", rename_output, r"lm_head\.weight_packed is quantised, but config\.json says that lm_head is not"),
    *(
        (name, "", lambda t, module=module, rows=rows: unquantise(t, module, torch.ones(rows, 128)), said)
        for name, module, rows, said in (
            ("awq", VALUES, 64, r"v_proj\.weight are computed together but quantised differently"),
            ("w8a8 dynamic", UP, 192, r"gate_proj\.weight, .*up_proj\.weight are computed together but quantised diff"),
        )
    ),
    (GPT_OSS, "", drop_experts, r"4 tensors are missing: .*gate_up_proj_blocks, .*gate_up_proj_scales, .*down_proj_bl"),
    (GPT_OSS, f"{PAIRS}_blocks", lambda x: x[:, ::2], r"shape \[2, 192, 4, 16\], but .* says \[2, 384, 4, 16\]"),
    (GPT_OSS, f"{DOWNS}_scales", lambda x: x[..., 1:], r"shape \[2, 128, 5\], but config\.json says \[2, 128, 6\]"),
    (GPT_OSS, f"{DOWNS}_scales", lambda x: x.int(), r"down_proj_scales is of type I32; supported: U8"),
    (GPT_OSS, f"{PAIRS}_bias", torch.zeros(2, 384), r"gate_up_proj_bias: experts of family mixtral have no biases"),
    (GPT_OSS, "", move_experts, r"mlp\.experts\..*belongs to no layer with experts; expected in .*block_sparse"),
    (GPT_OSS, "", repeat_experts, r"down_proj_(blocks|scales) has experts that also exist as separate tensors"),
    (GPT_OSS, f"{OUT}.weight_blocks", torch.zeros(128, 4, 16).byte(), r"weight_blocks: this MXFP4 format is sup"),
]


def change_tensor(tensors: Tensors, name: str, change: Any) -> None:
    if not name:
        change(tensors)
        return
    name = name if "." in name else f"{UP}.{name}"
    if change is None:
        del tensors[name]
    else:
        tensors[name] = change(tensors[name]) if callable(change) else change


@pytest.mark.parametrize(
    ("name", "tensor", "change", "said"), DAMAGE, ids=[f"{name}: {said}" for name, _, _, said in DAMAGE]
)
def test_an_inconsistent_checkpoint_is_refused_by_the_name_of_the_tensor(
    name: str, tensor: str, change: Any, said: str, copied: Callable[[str], Path]
) -> None:
    folder = copied(name)
    edit_tensors(folder, lambda tensors: change_tensor(tensors, tensor, change))
    with pytest.raises((ModelError, UnsupportedError), match=said) as error:
        read_source(folder)
    assert tensor.rpartition(".")[2] in str(error.value)


DEEPSEEK, MODELOPT = "fp8 of DeepSeek", "fp8 of ModelOpt"
EXPERT_IS_DENSE = r"gate_up_proj_blocks is quantised, but config\.json says that .*\.experts is not"
# A format, a change of quantization_config, and the error.
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    *(
        ("gptq", {"quant_method": method}, rf"has method '{method}', which is not supp")
        for method in ("bitsandbytes", "gguf", "hqq", "aqlm", "torchao", "quark", "modelopt_fp4")
    ),
    # The tensors of compressed-tensors' MXFP4, and experts that config.json keeps in 16 bits.
    ("mxfp4", {"quant_method": "mxfp4"}, r"q_proj\.weight_packed is quantised, but .* says that .*q_proj is not"),
    (GPT_OSS, {"modules_to_not_convert": ["model.layers.*.block_sparse_moe"]}, EXPERT_IS_DENSE),
    (GPT_OSS, {"modules_to_not_convert": [EXPERTS]}, EXPERT_IS_DENSE),
    (GPT_OSS, {"modules_to_not_convert": ["experts"]}, EXPERT_IS_DENSE),
    (GPT_OSS, {"modules_to_not_convert": ["^(?!.*router)model.layers.*.experts"]}, EXPERT_IS_DENSE),
    (GPT_OSS, {"modules_to_not_convert": ["a("]}, r"a pattern of modules is 'a\('; it must be a regular"),
    ("awq", {"version": "gemv"}, r"version 'gemv' is not supported; supported: gemm"),
    ("awq", {"bits": 3}, r"bits 3 is not supported; supported: 4\. Use the model's 16-bit original"),
    ("gptq", {"bits": 2}, r"bits 2 is not supported; supported: 4, 8\."),
    ("gptq", {"checkpoint_format": "marlin"}, r"checkpoint_format 'marlin' is not supported"),
    ("gptq", {"is_marlin_format": True}, r"is_marlin_format True is not supported"),
    ("gptq", {"group_size": 64}, r"\[4, 128\], but config\.json says \[2, 128\].*is 64 there, but .* = 32: correct it"),
    ("gptq", {"group_size": 48}, r"columns, which is not divisible into groups of 48"),
    ("gptq", {"group_size": "32"}, r"group_size is '32'; it must be an integer"),
    *(
        (MODELOPT, {"quant_algo": name}, rf"quant_algo {name!r} is not supported; supported: FP8\.")
        for name in ("NVFP4", "MIXED_PRECISION", "FP8_PB_WO", None)
    ),
    (DEEPSEEK, {"weight_block_size": [1, 44]}, r"128 columns\. With blocks of 44, the last block has 40, but"),
    (DEEPSEEK, {"weight_block_size": [32]}, r"weight_block_size is \[32\]; it must be two"),
    (DEEPSEEK, {"fmt": "e5m2"}, r"fmt 'e5m2' is not supported; supported: e4m3"),
    ("w4a16", {"format": "marlin-24"}, r"format 'marlin-24' is not supported; supported: pack-quant"),
    ("w4a16", {"format": "nvfp4-pack-quantized"}, r"format 'nvfp4-pack-quantized' is not supported"),
    ("w4a16", {"sparsity_config": {"format": "sparse-24-bitmask"}}, r"format 'sparse-24-bitmask' is not"),
    ("w4a16", {"transform_config": {"config_groups": {}}}, r"transform_config '\.\.\.' is not supported"),
    ("w4a16", {"config_groups": {}}, r"config_groups is \{\}; it must be an object that names a scheme"),
    ("w4a16", {"ignore": ["re:("]}, r"a pattern of modules is '\('; it must be a regular expression"),
    ("w4a16", {"ignore": ["re:a{99999}"]}, r"'a\{99999\}'; it must be a regular expression .*repetition"),
    ("w4a16", {"ignore": [r"re:(a)\1"]}, r"that RE2 supports \(invalid escape"),
    ("w4a16", {"ignore": ["re:a(?!b)c"]}, r"look-ahead is supported at its start only"),
    ("w4a16", {"ignore": ["re:^(?!a)b|c"]}, r"alternatives: put the alternatives into parentheses"),
    ("w4a16", {"ignore": ["re:^(?!ab"]}, r"the look-ahead \(\?! has no end"),
    ("w4a16", {"ignore": ["re:(?!a)(" + "|" * 100_000 + ")"]}, "100007 characters; with look-ahead the maximum"),
    ("w4a16", {"ignore": ["re:layers\ud800"]}, "it is not valid Unicode"),
    ("w4a16", {"ignore": ["re:(?!layers\ud800)x"]}, "RE2 does not support its expression"),
    ("w4a16", weights(num_bits=8), r"weight_packed.*it says 8 bits, but the tensor has 4: correct"),
    ("w4a16", weights(num_bits=2), r"num_bits '2 \(int\)' is not supported"),
    ("w4a16", weights(symmetric=False), r"weight_zero_point.*\(symmetric is false there\)"),
    ("w4a16 zeros", weights(symmetric=True), r"zero_point is not zero.*set it to false"),
    ("w4a16", weights(strategy="tensor_group"), r"strategy 'tensor_group' is not supp"),
    ("w4a16", group(targets=["re:.*q_proj"]), r"k_proj\.weight_packed is quantised, but config\.js"),
    ("w8a8 dynamic", weights(symmetric=False), r"weights: symmetric False is not supp"),
    ("w8a8 dynamic", group(input_activations={"symmetric": False}), r"activations: symmetric False is not supp"),
    ("w8a8 dynamic", weights(dynamic=True), r"weights: dynamic True .*supported: false, with the scales of weights in"),
    ("w8a8 dynamic", group(input_activations={"dynamic": "local"}), r"dynamic 'local' .*supported: true, false"),
    ("w8a8 dynamic", group(input_activations={"dynamic": False}), r"'token with dynamic = false' .*: token and group"),
    ("gptq", {"dynamic": {"+:.*up_proj": {"bits": 3}}}, r"dynamic\['\+:\.\*up_proj'\]: bits 3 .*supported: 4, 8"),
    ("gptq", {"dynamic": {"+:\x1b": {"bits": 3}}}, r"dynamic\['\+:\\x1b'\]: bits 3"),  # nothing for a terminal
    ("w8a8 dynamic", group(output_activations={"num_bits": 8}), r"output_activations"),
    ("fp8 channels", group(input_activations={"type": "int"}), r"supported: 8, of type float"),
    ("fp8 channels", weights(strategy="block", block_structure="32x\u00b2"), r"block_structure is \[32, 0\]"),
]


@pytest.mark.parametrize(("name", "change", "said"), REFUSED, ids=[said for _, _, said in REFUSED])
def test_unsupported_value_is_rejected_with_the_supported_ones(
    name: str, change: dict[str, Any], said: str, copied: Callable[[str], Path]
) -> None:
    folder = copied(name)
    requantise(folder, **change)
    with pytest.raises((ModelError, UnsupportedError), match=said):
        read_source(folder)


BACKTRACKS = "(?:[a-z0-9._]|[a-z0-9._][a-z0-9._])*$!"  # Python's re would take 2^letters steps for it
SCALES = [f"{LAYER}.self_attn.{name}" for name in ("k_scale", "v_scale")]
CANONICAL_SCALES = ["layers.0.attention.k_scale.weight", "layers.0.attention.v_scale.weight"]


@pytest.mark.parametrize(
    ("name", "tensors", "change"),
    [
        ("awq", {f"{UP}.g_idx": OWN_ORDER}, {}),
        # compressed-tensors needs an order, and here there is none, as without calibration.
        *(
            (name, {f"{UP}.weight_g_idx": order} if order is not None else {}, change)
            for name in ("w8 in rows", "mxfp4", "w4a16")
            for order, change in (
                (OWN_ORDER, {}),
                (OWN_ORDER, weights(actorder="group")),
                (OWN_ORDER * 0 - 1, weights(actorder="group")),
                (None, weights(actorder="group")),
            )
        ),
        ("w4a16 channels", {}, weights(strategy="group", group_size=256)),
        ("w4a16", {}, {"ignore": ["lm_head", f"re:{BACKTRACKS}"]}),
        ("gptq", {}, {"dynamic": {BACKTRACKS: {}}}),
        ("gptq", {f"{UP}.bias": torch.zeros(192).half()}, {}),
        # Scales of an FP8 cache that cannot be used, and scales of queries.
        ("gptq", {SCALES[0]: torch.ones(1), f"{LAYER}.self_attn.q_scale": torch.ones(1)}, {}),
        ("gptq", {SCALES[0]: torch.ones(1), SCALES[1]: torch.zeros(1)}, {}),
        ("gptq", {SCALES[0]: torch.ones(1), SCALES[1]: torch.ones(3)}, {}),
        (GPT_OSS, {}, {"modules_to_not_convert": ["^(?!.*experts)model.layers", "(?=model).*\\.exp"]}),
    ],
)
def test_changes_without_a_meaning_change_nothing(
    name: str, tensors: Tensors, change: dict[str, Any], copied: Callable[[str], Path]
) -> None:
    folder = copied(name)
    before = read_source(folder).spec.tensors
    edit_tensors(folder, lambda found: found.update(tensors))
    requantise(folder, **change)
    assert read_source(folder).spec.tensors == before


@pytest.mark.parametrize(
    ("pattern", "matched"),
    [
        (r"^(?!mtp\.).*layers\.\d+\.mlp", ["a.layers.1.mlp", "layers.2.mlp"]),
        (r"^(?!.*(?:layers\.1|[)]|\)|x)).*layers", ["layers.2.mlp", "mtp.layers.2.mlp", "mtp.layers.3.mlp"]),
        (r"(?=mtp)(?!.*\.3).*(?:2|3)\.mlp", ["mtp.layers.2.mlp"]),
        (r"layers", ["layers.2.mlp"]),
    ],
)
def test_patterns_match_from_the_beginning_as_with_re(pattern: str, matched: list[str]) -> None:
    names = ["a.layers.1.mlp", "layers.2.mlp", "mtp.layers.2.mlp", "mtp.layers.3.mlp", "lm_head"]
    assert [name for name in names if module_pattern(pattern).match(name)] == matched
    assert [name for name in names if re.match(pattern, name)] == matched


def test_a_model_without_quantised_tensors_is_not_a_quantised_one(dense: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(dense, tmp_path / "q"))
    edit_config(folder, lambda config: config.update(quantization_config=FORMATS["awq"][0]))
    with pytest.raises(ModelError, match=r"says that the model is quantised \(awq\), but no tensor is"):
        read_source(folder)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("w8a8 dynamic", r"q_proj\.weight is of type I8; .*if config\.json has a quantizat"),
        *(
            (name, r"(weight_packed|qweight|_blocks) is quantised.*no quantization_config.*Down")
            for name in ("w4a16", "gptq", GPT_OSS)
        ),
    ],
)
def test_quantised_tensors_that_config_json_does_not_explain_are_refused(
    name: str, said: str, copied: Callable[[str], Path]
) -> None:
    folder = copied(name)
    edit_config(folder, lambda config: config.pop("quantization_config"))
    with pytest.raises((ModelError, UnsupportedError), match=said):
        read_source(folder)


def old_gptq(folder: Path, stem: str = "gptq_model-4bit-32g", **said: Any) -> None:
    """Change a folder to the format of AutoGPTQ before 0.5."""
    how = edit_config(folder, lambda config: config.pop("quantization_config"))
    del how["quant_method"]
    (folder / "quantize_config.json").write_text(json.dumps({**how, **said}))
    (folder / "model.safetensors").rename(folder / f"{stem}.safetensors")


@pytest.mark.parametrize("stem", ["gptq_model-4bit-32g", "a.model-GPTQ"])
def test_old_names_of_autogptq_are_found(stem: str, copied: Callable[[str], Path], tmp_path: Path) -> None:
    folder = copied("gptq")
    before = read_source(folder).spec.tensors
    old_gptq(folder, stem, **({} if stem.startswith("gptq") else {"model_file_base_name": stem}))
    assert read_source(folder).spec.tensors == before
    assert (link_workspace(folder, tmp_path / "w") / workspace.WEIGHTS / "manifest.json").is_file()
    tensors = load_file(folder / f"{stem}.safetensors")
    (folder / f"{stem}.safetensors").unlink()
    halves = [dict(list(tensors.items())[half::2]) for half in range(2)]
    names = [f"{stem}-{half + 1:05}-of-00002.safetensors" for half in range(2)]
    for name, half in zip(names, halves, strict=True):
        save_file(half, folder / name)
    index = {tensor: name for name, half in zip(names, halves, strict=True) for tensor in half}
    (folder / f"{stem}.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert read_source(folder).spec.tensors == before


def test_old_folders_of_autogptq_that_cannot_be_read_say_why(copied: Callable[[str], Path]) -> None:
    folder = copied("gptq")
    old_gptq(folder)
    shutil.copyfile(folder / "gptq_model-4bit-32g.safetensors", folder / "gptq_model-8bit-128g.safetensors")
    with pytest.raises(ModelError, match=r"several quantisations, gptq_model-4bit-32g, gptq_model-8bit-128g: keep"):
        read_source(folder)
    (folder / "gptq_model-8bit-128g.safetensors").unlink()
    (folder / "quantize_config.json").write_text(json.dumps({"bits": 4, "group_size": 64}))
    with pytest.raises(ModelError, match=r"but quantize_config\.json says.*group_size is 64 there.*group_size = 32"):
        read_source(folder)
    (folder / "gptq_model-4bit-32g.safetensors").rename(folder / "gptq_model-4bit-32g.bin")
    with pytest.raises(UnsupportedError, match=r"gptq_model-4bit-32g\.bin: quantised weights in \.bin files"):
        read_source(folder)


def test_leftovers_of_autogptq_beside_the_usual_file_do_not_count(copied: Callable[[str], Path]) -> None:
    folder = copied("gptq")
    before = read_source(folder).spec.tensors
    (folder / "quantize_config.json").write_text(json.dumps({"bits": 4, "group_size": 32}))
    for stem in ("gptq_model-4bit-32g", "gptq_model-8bit-128g"):
        shutil.copyfile(folder / "model.safetensors", folder / f"{stem}.safetensors")
    assert read_source(folder).spec.tensors == before


def test_bin_files_of_quantised_weights_are_refused(copied: Callable[[str], Path]) -> None:
    folder = copied("gptq")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(UnsupportedError, match=r"quantised weights \(gptq\) in \.bin files.*safetensors"):
        read_source(folder)


@pytest.mark.parametrize(
    "groups", [{}, {"group_0": {"targets": ["LlamaAttention"], "weights": None}}], ids=["none", "attention"]
)
def test_a_model_whose_cache_alone_is_quantised_has_dense_weights(
    groups: dict[str, Any], dense: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = Path(shutil.copytree(dense, tmp_path / "q"))
    scheme = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
    said = {"quant_method": "compressed-tensors", "format": "dense", "config_groups": groups, "ignore": []}
    edit_config(folder, lambda config: config.update(quantization_config={**said, "kv_cache_scheme": scheme}))
    edit_tensors(folder, lambda tensors: tensors.update({name: torch.ones(1) for name in SCALES}))
    found, expected = read_source(folder).spec, read_source(dense).spec
    assert [found.tensors[name][0].name for name in CANONICAL_SCALES] == SCALES
    assert {**expected.tensors, **{name: found.tensors[name] for name in CANONICAL_SCALES}} == found.tensors
    assert (found.config.weight_type, found.config.kv_scales) == ("fp32", "layer")
    weights = link_workspace(folder, tmp_path / "w") / workspace.WEIGHTS
    assert not caplog.text, "charonia serve prints these warnings at each start, with its settings"
    assert "quant_policy = 16" in cache_warnings(weights, {})[0]
    assert cache_warnings(weights, {"quant_policy": "16"}) == cache_warnings(weights, {"quant_policy": "0"}) == []
    convert(folder, tmp_path / "v", model_format="hf", settings={"quant_policy": "8"})
    assert not caplog.text
    convert(folder, tmp_path / "u")
    assert "quant_policy = 16" in caplog.text and "kv_cache_scheme" in caplog.text
    chosen = link_workspace(folder, tmp_path / "t", settings={"quant_policy": "0"}) / workspace.WEIGHTS
    assert cache_warnings(chosen, {}) == [], "charonia convert --quant-policy 0 is a choice"
    assert "quant_policy = 16" in make_plan(folder).warnings[0]
    assert not any("kv_cache_scheme" in line for line in make_plan(folder, {"quant_policy": 4}).warnings)
    assert make_plan(folder, {"quant_policy": 16}).warnings == make_plan(dense, {"quant_policy": 8}).warnings
    [missing] = [one for one in make_plan(dense, {"quant_policy": 16}).warnings if "FP8 with scale 1" in one]
    assert missing not in caplog.text
    convert(dense, tmp_path / "s", settings={"quant_policy": "16"})
    assert missing in caplog.text, "the warning of plan"
    said["kv_cache_scheme"] = {**scheme, "type": "int"}
    edit_config(folder, lambda config: config.update(quantization_config=said))
    assert read_source(folder).spec.config.kv_scales == "none", "scales of integers are not used"
    first, second = make_plan(folder, {"quant_policy": 16}).warnings[:2]
    assert first.endswith("values: they are for another type than FP8") and second.endswith("become 448")
    del said["kv_cache_scheme"]
    edit_config(folder, lambda config: config.update(quantization_config=said))
    with pytest.raises(ModelError, match=r"config_groups is .*; it must be an object|quantised .*, but no tensor is"):
        read_source(folder)


STATIC = {"kv_cache_scheme": "static"}
FLOATS = {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}
INTEGERS = {"kv_cache_scheme": {"num_bits": 8, "type": "int"}}


@pytest.mark.parametrize(
    ("names", "scheme", "kind"),
    [
        (("kv_scale", "kv_scale"), STATIC, "layer"),
        (("kv_scale", "kv_scale"), FLOATS, "layer"),
        (("kv_scale", "kv_scale"), {}, "layer"),
        (("kv_scale", "kv_scale"), INTEGERS, "none"),
        (("k_scale", "v_scale", "q_scale"), STATIC, "layer"),
        (("attn.kv_scale", "attn.kv_scale"), STATIC, "layer"),
        (("attn.k_scale", "attn.v_scale", "attn.q_scale"), STATIC, "layer"),
        (("k_proj.k_scale", "v_proj.v_scale"), STATIC, "layer"),
        (("qkv_proj.k_scale", "qkv_proj.v_scale"), STATIC, "layer"),
        (("k_cache.scale", "v_cache.scale"), STATIC, "layer"),
        (("k_proj.output_scale", "v_proj.output_scale", "q_proj.output_scale"), STATIC, "layer"),
    ],
)
def test_scales_of_an_fp8_cache_are_found_in_models_with_fp8_weights(
    names: tuple[str, ...], scheme: dict[str, Any], kind: str, copied: Callable[[str], Path]
) -> None:
    folder = copied("fp8 of DeepSeek")
    files = [f"{LAYER}.self_attn.{name}" for name in names]
    edit_tensors(folder, lambda tensors: tensors.update({name: torch.tensor([0.5]) for name in files}))
    requantise(folder, **scheme)
    found = read_source(folder).spec
    parts = [found.tensors[name][0].name for name in CANONICAL_SCALES if name in found.tensors]
    assert (found.config.kv_scales, parts) == (kind, files[:2] if kind == "layer" else [])
    assert found.notes == ()


@pytest.mark.parametrize(
    ("scheme", "algorithm", "kind"),
    [
        (FLOATS["kv_cache_scheme"], "FP8", "layer"),
        ("FP8", "FP8", "layer"),
        ("NVFP4", "NVFP4", "none"),
        ("NVFP4_AFFINE", "NVFP4_AFFINE", "none"),
        (None, None, "layer"),
    ],
    ids=str,
)
def test_both_configurations_of_modelopt_are_read(
    scheme: dict[str, Any] | str | None, algorithm: str | None, kind: str, copied: Callable[[str], Path]
) -> None:
    folder = copied(MODELOPT)
    scales = [f"{KEYS}.k_scale", f"{VALUES}.v_scale"]
    edit_tensors(folder, lambda tensors: tensors.update({name: torch.tensor(0.5) for name in scales}))
    requantise(folder, kv_cache_scheme=scheme)
    new = read_source(folder).spec
    edit_config(folder, lambda config: config.pop("quantization_config"))
    said = {"quant_algo": "FP8", "kv_cache_quant_algo": algorithm, "exclude_modules": ["lm_head"]}
    (folder / "hf_quant_config.json").write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": said}))
    old = read_source(folder).spec
    for spec in (new, old):
        assert spec.quantization is not None and spec.quantization.method == "modelopt"
        assert (spec.config.kv_scales, spec.config.weight_type) == (kind, "fp8")
        assert spec.quantised_cache == ("" if scheme is None else "fp8" if kind == "layer" else "other")
    assert (old.tensors, old.config) == (new.tensors, new.config)
    how = new.tensors["layers.0.attention.wo.0.weight"][0].quantised
    assert how is not None and (how.how.activations, how.input_scale) == ("fp8-tensor", f"{OUT}.input_scale")


@pytest.mark.parametrize("scheme", ["FP8", None])
@pytest.mark.parametrize("names", [{"producer": {"name": "modelopt"}}, {"quant_library": "modelopt"}], ids=str)
def test_modelopt_is_recognised_without_quant_method(
    names: dict[str, Any], scheme: str | None, copied: Callable[[str], Path]
) -> None:
    folder = copied(MODELOPT)
    expected = read_source(folder).spec
    how = {"num_bits": 8, "type": "float", "dynamic": False}
    groups = {"group_0": {"weights": how, "input_activations": how, "targets": ["Linear"]}}
    said = {"config_groups": groups, "ignore": ["lm_head"], "quant_algo": "FP8", **names}
    if scheme:
        said["kv_cache_scheme"] = scheme
    edit_config(folder, lambda config: config.update(quantization_config=said))
    found = read_source(folder).spec
    assert (found.tensors, found.config) == (expected.tensors, expected.config)
    assert found.quantised_cache == ("fp8" if scheme else "")


@pytest.mark.parametrize("file", ["config.json", "hf_quant_config.json"])
def test_modelopt_with_a_quantised_cache_alone_has_dense_weights(file: str, dense: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(dense, tmp_path / "q"))
    edit_tensors(folder, lambda tensors: tensors.update({name: torch.ones(1) for name in SCALES}))
    said: dict[str, Any] = {"quant_algo": None, "exclude_modules": []}
    if file == "config.json":
        said |= {"quant_method": "modelopt", **FLOATS}
        edit_config(folder, lambda config: config.update(quantization_config=said))
    else:
        (folder / file).write_text(json.dumps({"quantization": {**said, "kv_cache_quant_algo": "FP8"}}))
    found = read_source(folder).spec
    assert found.quantization is None and found.quantised_cache == "fp8"
    assert (found.config.weight_type, found.config.kv_scales) == ("fp32", "layer")


def test_fp8_of_modelopt_without_input_scales_has_dynamic_activations(copied: Callable[[str], Path]) -> None:
    folder = copied(MODELOPT)
    edit_tensors(folder, lambda tensors: [tensors.pop(name) for name in list(tensors) if name.endswith("input_scale")])
    parts = [part.quantised for parts in read_source(folder).spec.tensors.values() for part in parts]
    assert {(how.how.activations, how.input_scale) for how in parts if how} == {("fp8-token", "")}


def test_input_scales_of_a_part_of_q_k_and_v_are_refused(copied: Callable[[str], Path]) -> None:
    folder = copied(MODELOPT)
    edit_tensors(folder, lambda tensors: tensors.pop(f"{KEYS}.input_scale"))
    with pytest.raises(UnsupportedError, match=r"k_proj.* are computed together but quantised differently"):
        read_source(folder)


@pytest.mark.parametrize(
    ("k", "v", "said"),
    [
        (torch.ones(1), None, "v_scale is missing"),
        (torch.ones(1), torch.zeros(1), r"v_scale has the scale 0\.0; expected: a positive, finite number"),
        (torch.tensor([1, torch.nan]), torch.ones(2), "k_scale has the scale nan"),
        (torch.ones(1), torch.ones(1).double(), "v_scale is of type F64; supported: F32"),
        (torch.ones(1), torch.ones(3), "v_scale has size 3; expected: 2, the KV heads; or 1 in all layers"),
        (torch.ones(2), torch.ones(1), "v_scale has size 1; expected: 2, the KV heads; or 1 in all layers"),
        (torch.ones(1, 2, 1, 1), torch.ones(2), r"k_scale has shape \[1, 2, 1, 1\]; supported: up to 3 dimensions"),
    ],
)
def test_unusable_scales_of_keys_and_values_are_named(
    k: torch.Tensor, v: torch.Tensor | None, said: str, dense: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(dense, tmp_path / "q"))
    made = {name: scale for name, scale in zip(SCALES, (k, v), strict=True) if scale is not None}
    edit_tensors(folder, lambda tensors: tensors.update(made))
    found = read_source(folder).spec
    assert (found.config.kv_scales, found.tensors) == ("none", read_source(dense).spec.tensors)
    weights = link_workspace(folder, tmp_path / "w") / workspace.WEIGHTS
    (warning,) = cache_warnings(weights, {"quant_policy": "16"})
    assert re.search(rf"quant_policy = 16 cannot use .*: tensor {LAYER}\.self_attn\.{said}", warning)
    assert cache_warnings(weights, {}) == []
    assert warning in make_plan(folder, {"quant_policy": 16}).warnings and make_plan(folder).warnings == []


@pytest.mark.parametrize(
    "value", [torch.tensor([1e-8]).bfloat16(), torch.tensor([70000.0]), torch.tensor([0.1]).half()], ids=str
)
def test_conversion_keeps_the_values_of_scales_of_keys_and_values(
    value: torch.Tensor, dense: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(dense, tmp_path / "q"))
    edit_tensors(folder, lambda tensors: tensors.update({name: value.clone() for name in SCALES}))
    root = convert(folder, tmp_path / "w", dtype="fp16")
    tensors = manifest_of(root)["tensors"]
    for name in CANONICAL_SCALES:
        (part,) = tensors[name]["parts"]
        stored = load_file(root / workspace.WEIGHTS / part["file"])[part["name"]]
        assert stored.dtype == torch.float32 and torch.equal(stored, value.float())


@pytest.mark.parametrize("name", ["gptq", "awq"])
def test_settings_of_old_folders_next_to_config_json_count(name: str, copied: Callable[[str], Path]) -> None:
    folder = copied(name)
    before = read_source(folder).spec.tensors
    said = edit_config(folder, lambda config: config.pop("quantization_config"))
    del said["quant_method"]
    if name == "awq":
        said = {"zero_point": True, "q_group_size": said["group_size"], "w_bit": 4, "version": "GEMM"}
    (folder / {"gptq": "quantize_config.json", "awq": "quant_config.json"}[name]).write_text(json.dumps(said))
    assert read_source(folder).spec.tensors == before
    with pytest.raises(UnsupportedError, match="is already quantised"):
        check_source(folder)


def test_layers_differ_and_are_left_out_as_config_json_says(dense: Path, tmp_path: Path) -> None:
    four, eight = (dict(FORMATS[name][0]["config_groups"]["group_0"]) for name in ("w4a16", "w8a8 dynamic"))
    both, kept = tmp_path / "q", quantise(dense, tmp_path / "eight", "w8a8 dynamic")
    quantise(dense, both, "w4a16")
    others = load_file(tmp_path / "eight" / "model.safetensors")

    def mix(tensors: Tensors) -> None:
        unquantise(tensors, DOWN, kept[f"{DOWN}.weight"])
        tensors.update({name: value for name, value in others.items() if name.startswith(DOWN)})
        unquantise(tensors, OUT, kept[f"{OUT}.weight"])

    edit_tensors(both, mix)
    groups = {
        "group_0": {**four, "format": "pack-quantized"},
        "group_1": {**eight, "format": "int-quantized", "targets": ["re:.*down_proj$"]},
    }
    requantise(both, format="mixed-precision", config_groups=groups, ignore=["lm_head", OUT])
    tensors = manifest_of(link_workspace(both, tmp_path / "w"))["tensors"]
    found = {
        name: entry["dtype"] for name, entry in tensors.items() if name.startswith("layers.0") and "norm" not in name
    }
    assert found == {
        "layers.0.attention.w_qkv.0.weight": "U4",
        "layers.0.attention.wo.0.weight": "F32",
        "layers.0.feed_forward.w1.0.weight": "U4",
        "layers.0.feed_forward.w3.0.weight": "U4",
        "layers.0.feed_forward.w2.0.weight": "I8",
    }
    requantise(both, config_groups={"group_1": {"targets": ["re:.*layers.0.mlp.down_proj"]}})
    assert manifest_of(link_workspace(both, tmp_path / "v"))["tensors"] == tensors


def _targets(*groups: list[str], ignore: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return a configuration whose groups have different values of group_size: 16, 32, 48 ..."""
    weights = {"num_bits": 4, "type": "int", "strategy": "group"}
    return {
        "format": "pack-quantized",
        "config_groups": {
            f"group_{at}": {"targets": targets, "weights": {**weights, "group_size": 16 * (at + 1)}}
            for at, targets in enumerate(groups)
        },
        "ignore": list(ignore),
    }


@pytest.mark.parametrize(
    "config",
    [
        _targets(["Linear"]),
        _targets(["Module"]),
        _targets(["Embedding"]),
        _targets(["re:.*"]),
        _targets(["Linear"], ignore=("re:^(?!.*experts).*",)),
        _targets(["Linear"], ignore=("re:Lin.*",)),
        _targets(["Linear"], ignore=("Linear",)),
        _targets(["Linear"], ignore=(OUT, "re:.*down_proj")),
        _targets(["re:^(?!.*down_proj).*"]),
        _targets(["re:L"], ["re:.*down_proj"]),
        _targets(["Linear"], ["re:.*down_proj"], [OUT, "re:.*self_attn.*"]),
        _targets(["re:.*mlp.*"], ["re:.*down_proj"], ["Module", "Linear"]),
        _targets(["Linear"], ["Linear", UP]),
        _targets(["re:model.*"], ["re:.*"]),
    ],
    ids=json.dumps,
)
def test_groups_are_of_the_modules_that_compressed_tensors_finds(config: dict[str, Any]) -> None:
    from compressed_tensors.utils.match import is_match, match_targets

    layer, groups = torch.nn.Linear(1, 1), config["config_groups"].values()
    sizes = {target: group["weights"]["group_size"] for group in groups for target in group["targets"]}
    ours = compressed_tensors(Settings("config.json: quantization_config", config))
    for name in (UP, OUT, DOWN, "model.layers.0.mlp.experts.1.up_proj", "lm_head"):
        matched = match_targets(name, layer, sizes)
        expected = sizes[matched[0]] if matched and not is_match(name, layer, config["ignore"]) else None
        scheme = ours.scheme_of((name,))
        assert (scheme.how.group_size if scheme else None) == expected, name


def test_modules_of_gptqs_dynamic_rules_differ(dense: Path, copied: Callable[[str], Path], tmp_path: Path) -> None:
    folder = copied("gptq")
    quantise(dense, tmp_path / "eight", "gptq 8 bits")
    others = load_file(tmp_path / "eight" / "model.safetensors")
    edit_tensors(folder, lambda t: t.update({name: value for name, value in others.items() if "down_proj" in name}))
    with pytest.raises(ModelError, match=r"down_proj\.qweight has shape"):
        read_source(folder)
    requantise(folder, dynamic={r"+:.*\.down_proj": {"bits": 8}, r"-:.*\.lm_head": {}})
    tensors = manifest_of(link_workspace(folder, tmp_path / "w"))["tensors"]
    assert tensors["layers.0.feed_forward.w2.0.weight"]["dtype"] == "I8"


def test_the_output_layer_may_be_quantised_and_the_embedding_may_not(
    copied: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = copied("w8a8 dynamic")

    def quantise_module(tensors: Tensors, module: str) -> None:
        tensors[f"{module}.weight"] = torch.ones(320, 128, dtype=torch.int8)
        tensors[f"{module}.weight_scale"] = torch.ones(320, 1)

    edit_tensors(folder, lambda tensors: quantise_module(tensors, "lm_head"))
    requantise(folder, ignore=[])
    tensors = manifest_of(convert(folder, tmp_path / "w", tp=2))["tensors"]
    assert (tensors["output.1.weight"]["dtype"], tensors["output.1.weight"]["shape"]) == ("I8", [160, 128])
    edit_tensors(folder, lambda tensors: quantise_module(tensors, "model.embed_tokens"))
    with pytest.raises(
        UnsupportedError, match=r"embed_tokens\.weight: a quantised tok_embeddings\.weight is not supported"
    ):
        read_source(folder)


@pytest.mark.parametrize(
    ("name", "ranks", "said"),
    [
        (
            "gptq order",
            2,
            r"columns of .*o_proj\.qweight are quantised in their own order \(desc_act\)\. Use --tp 1$",
        ),
        (
            "fp8 in blocks of 128",
            4,
            r"column 48 of .*down_proj\.weight is within a group of 128 columns\. Use --tp 1 or 2$",
        ),
    ],
)
def test_ranks_that_would_cut_a_group_are_rejected_with_the_possible_ones(
    name: str, ranks: int, said: str, copied: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = copied(name)
    for make in (
        lambda: convert(folder, tmp_path / "w", tp=ranks),
        lambda: make_plan(folder, {"tensor_para_size": ranks}),
    ):
        with pytest.raises(UnsupportedError, match=said):
            make()


@pytest.mark.parametrize(
    ("name", "tensor", "change", "problem"),
    [
        ("fp8 channels", "weight", lambda x: x.view(torch.uint8)[3, 5:].fill_(0x7F), r"values .* not finite \(NaN\)"),
        ("w4a16", "weight_scale", lambda x: x[3, 1:].fill_(float("inf")), "values that are not finite"),
        ("mxfp4", "weight_scale", lambda x: x[3, 1:].fill_(255), r"scales that are not finite \(NaN\)"),
        ("w8a8 static", "input_scale", torch.Tensor.zero_, "is 0.0, expected more than 0"),
        ("w8a8 static", "input_scale", lambda x: x.fill_(-1), "is -1.0, expected more than 0"),
        ("gptq 8 bits, zeros", "qzeros", lambda x: x[1, 3:].fill_(-1), "zeros of 256, expected 0 to 255"),
        (GPT_OSS, f"{PAIRS}_scales", lambda x: x[1, 7, 2].fill_(255), r"scales that are not finite \(NaN\)"),
        (GPT_OSS, f"{PAIRS}_scales", lambda x: x[1, 7, 2].fill_(254), r"scales of 2\^126 or more"),
        (GPT_OSS, f"{PAIRS}_scales", lambda x: x[1, 7, 2].fill_(253), r"scales of 2\^126 or more"),
        (GPT_OSS, f"{PAIRS}_scales", lambda x: x[1, 7, 2].fill_(252), ""),
    ],
)
def test_values_that_no_weight_can_have_are_refused_at_conversion(
    name: str,
    tensor: str,
    change: Callable[[Any], object],
    problem: str,
    copied: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    folder = copied(name)
    edit_tensors(folder, lambda tensors: change(tensors[tensor if "." in tensor else f"{UP}.{tensor}"]))
    if not problem:
        convert(folder, tmp_path / "w")
        return
    with pytest.raises(ModelError, match=rf"tensor .*{tensor} .*{problem}"):
        convert(folder, tmp_path / "w")


def test_scales_of_experts_that_are_not_finite_are_refused_by_the_engine(
    copied: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = copied(GPT_OSS)
    edit_tensors(folder, lambda tensors: tensors[f"{PAIRS}_scales"][1, 7, 2].fill_(255))
    root = link_workspace(folder, tmp_path / "l")
    with pytest.raises(InvalidRequestError, match=r"gate_up_proj_scales, that are not finite .* in row 391"):
        Engine.from_pretrained(root)


@pytest.mark.parametrize("name", ["mxfp4", GPT_OSS])
def test_scales_of_mxfp4_may_be_of_their_own_type(
    name: str, copied: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = copied(name)
    before = manifest_of(convert(folder, tmp_path / "b"))["tensors"]
    assert ("the rows of gate and up alternate" in caplog.text) is (name == GPT_OSS)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    scales = [key for key in tensors if key.endswith(("_scales", "weight_scale"))]
    save_file(tensors | {key: tensors[key].view(torch.float8_e8m0fnu) for key in scales}, file)
    for root in (convert(folder, tmp_path / "w"), link_workspace(folder, tmp_path / "l")):
        found = manifest_of(root)["tensors"]
        types = {part["scales"]["dtype"] for one in found.values() for part in one["parts"] if "scales" in part}
        assert types == {"F8_E8M0"}
        for key, entry in before.items():
            expected = weight_of(tmp_path / "b" / workspace.WEIGHTS, entry)
            assert np.array_equal(weight_of(root / workspace.WEIGHTS, found[key]), expected), key
        with Engine.from_pretrained(root):
            pass


@pytest.mark.parametrize("name", ["w4a16", "awq", "gptq", "fp8 of DeepSeek", GPT_OSS])
def test_a_format_that_is_named_must_be_the_one_that_is_found(
    name: str, copied: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = copied(name)
    found = {"w4a16": "compressed-tensors"}.get(name) or name.split()[0]
    for wrong in {"hf", "awq", "gptq", "compressed-tensors", "fp8", "mxfp4"} - {found}:
        with pytest.raises(
            ModelError, match=rf"--model-format {wrong}: the weights of .* are {found}: omit this option"
        ):
            convert(folder, tmp_path / "w", model_format=wrong)
    convert(folder, tmp_path / "w", model_format=found)
    link_workspace(folder, tmp_path / "v", model_format=found)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("quick", [True, False])
def test_random_quantised_models_have_weights_of_the_given_scale(scheme: str, quick: bool, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    write_random_model(folder, SHAPE, scheme=scheme, quick=quick, scale=0.05)
    config = read_source(folder).spec.config
    kinds = {"w4": ("int4", 64), "w8": ("int8", 64), "fp": ("fp8", 0), "mx": ("mxfp4", 32)}
    expected = ("int8", 0) if scheme == "w8a8" else kinds[scheme[:2]]
    assert (config.weight_type, config.group_size, config.data_type) == (*expected, "bf16")
    root = link_workspace(folder, tmp_path / "w")
    tensors = manifest_of(root)["tensors"]
    assert sum("quantization" in entry for entry in tensors.values()) == 5
    values = weight_of(root / workspace.WEIGHTS, tensors["layers.0.feed_forward.w2.0.weight"])
    # mxfp4's scales are powers of two.
    assert 0.05 / 1.5 < values.std() < 0.05 * 1.5 if scheme == "mxfp4" else values.std() == pytest.approx(0.05, rel=0.1)
    with pytest.raises(InvalidRequestError, match=r"scheme 'w3a16' is not known; expected w4a16, "):
        write_random_model(folder, SHAPE, scheme="w3a16")


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_text_part_of_a_model_with_images_is_found_quantised_too(prefix: str, tmp_path: Path) -> None:
    text = {**SMALL, "model_type": "gemma3_text", "head_dim": 32, "tie_word_embeddings": True}
    source, folder = tmp_path / "m", tmp_path / "q"
    write_random_model(source, text, weight_type="fp32", scale=0.2)
    meant = quantise(source, folder, "w4a16")
    quantization = {**FORMATS["w4a16"][0], "ignore": ["re:.*vision_tower.*", OUT]}
    config = {"model_type": "gemma3", "text_config": text, "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))

    def rename(tensors: Tensors) -> None:
        unquantise(tensors, OUT, meant[f"{OUT}.weight"])
        for name in list(tensors):
            tensors[prefix + name.removeprefix("model.")] = tensors.pop(name)

    edit_tensors(folder, rename)
    tensors = manifest_of(link_workspace(folder, tmp_path / "w"))["tensors"]
    gate = tensors["layers.0.feed_forward.w1.0.weight"]
    assert gate["parts"][0]["name"] == f"{prefix}layers.0.mlp.gate_proj.weight_packed"
    assert "quantization" not in tensors["layers.0.attention.wo.0.weight"]
