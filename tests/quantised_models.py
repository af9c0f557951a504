"""Small quantised checkpoints, and their dequantised weights.

The package compressed-tensors writes and reads its formats. AWQ, GPTQ, FP8 and GPT-OSS' MXFP4 are written with numpy
from the descriptions of the formats; transformers reads the last one. Nothing here uses the engine's code for them.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

Array = np.ndarray[Any, Any]
Tensors = dict[str, torch.Tensor]
# (weight [out, in] in fp32, generator) -> (the module's tensors by suffix, the dequantised weight)
Quantiser = Callable[[torch.Tensor, np.random.Generator], tuple[Tensors, torch.Tensor]]
GROUP = 32


def _compressed(form: str, weights: dict[str, Any], inputs: dict[str, Any] | None) -> Quantiser:
    """A format of compressed-tensors. Scales come from the smallest and largest value, as in its observers."""
    scheme = QuantizationScheme.model_validate(
        {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "format": form}
    )
    compressor = BaseCompressor.get_value_from_registry(form)

    def quantise(weight: torch.Tensor, generator: np.random.Generator) -> tuple[Tensors, torch.Tensor]:
        rows, cols = weight.shape
        group = weights.get("group_size") or 1
        groups = {
            "tensor": lambda: weight.reshape(1, -1),
            "channel": lambda: weight.reshape(rows, 1, cols),
            "group": lambda: weight.reshape(rows, -1, group),
            "block": lambda: weight.reshape(rows // GROUP, GROUP, cols // GROUP, GROUP).transpose(1, 2).flatten(2),
        }[weights["strategy"]]()
        scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), scheme.weights)
        if form == "mxfp4-pack-quantized":
            scale = torch.exp2(torch.floor(torch.log2(groups.abs().amax(-1))) - 2)
        else:
            scale = scale.to(torch.bfloat16).to(torch.float32)
        state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero.to(torch.int8)}
        made = compressor.compress(dict(state), scheme)
        meant = compressor.decompress({**made, "weight_scale": made["weight_scale"]}, scheme)["weight"]
        if made["weight_scale"].dtype == torch.float32:
            made["weight_scale"] = made["weight_scale"].to(torch.bfloat16)
        if inputs is not None and not inputs["dynamic"]:
            made["input_scale"] = torch.tensor([0.03], dtype=torch.bfloat16)
        return made, meant.float()

    return quantise


def _pack(values: Array, bits: int) -> Array:
    """Pack values into 32-bit numbers along dimension 0, the first value in the lowest bits."""
    per_number = 32 // bits
    wide = values.astype(np.uint32).reshape(-1, per_number, *values.shape[1:])
    shifts = (np.arange(per_number, dtype=np.uint32) * bits).reshape(1, per_number, *[1] * (values.ndim - 1))
    return np.bitwise_or.reduce(wide << shifts, axis=1).view(np.int32)


def _affine(weight: Array, group: int, bits: int, *, symmetric: bool) -> tuple[Array, Array, Array]:
    """Return codes [out, in], scales in fp16 [out, groups] and zeros [out, groups]."""
    grouped = weight.reshape(len(weight), -1, group)
    most = 2**bits - 1
    if symmetric:
        scales = np.abs(grouped).max(-1) * 2 / most
        zeros = np.full(scales.shape, 2 ** (bits - 1))
    else:
        low, high = np.minimum(grouped.min(-1), 0), np.maximum(grouped.max(-1), 0)
        scales = (high - low) / most
        zeros = np.clip(np.round(-low / scales), 1, most)  # GPTQ's first format cannot store a zero of 0
    scales = scales.astype(np.float16)
    codes = np.round(grouped / scales.astype(np.float32)[..., None]) + zeros[..., None]
    return np.clip(codes, 0, most).reshape(weight.shape).astype(np.int64), scales, zeros.astype(np.int64)


def _meant(codes: Array, scales: Array, zeros: Array, groups: Array) -> torch.Tensor:
    """Dequantise. groups [in]: the group of each column."""
    return torch.from_numpy(scales.astype(np.float32)[:, groups] * (codes - zeros[:, groups]).astype(np.float32))


def _ordered(quantiser: Quantiser) -> Quantiser:
    """4 bits with groups of columns from the whole weight (actorder group), as in releases of compressed-tensors
    before 0.20: codes are in the order of the columns, and each column has the number of its group."""

    def quantise(weight: torch.Tensor, generator: np.random.Generator) -> tuple[Tensors, torch.Tensor]:
        cols = weight.shape[1]
        # Depends only on the number of inputs, so that modules with the same inputs have the same order.
        order = np.random.default_rng(cols).permutation(cols)
        place = np.argsort(order)
        made, meant = quantiser(weight[:, order], generator)
        numbers = made["weight_packed"].numpy().view(np.uint32)
        codes = (numbers[..., None] >> np.arange(0, 32, 4, dtype=np.uint32) & 15).reshape(len(numbers), cols)
        packed = _pack(codes[:, place].T, 4).T
        return made | _tensors(weight_packed=packed, weight_g_idx=(place // GROUP).astype(np.int32)), meant[:, place]

    return quantise


def _tensors(**arrays: Array) -> Tensors:
    return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}


def _awq(weight: torch.Tensor, generator: np.random.Generator) -> tuple[Tensors, torch.Tensor]:
    codes, scales, zeros = _affine(weight.numpy(), GROUP, 4, symmetric=False)

    def packed(values: Array) -> Array:
        """[n, out] to [n, out / 8]: the order within eight outputs is 0, 2, 4, 6, 1, 3, 5, 7."""
        order = np.array([0, 2, 4, 6, 1, 3, 5, 7])
        return _pack(values.reshape(len(values), -1, 8)[..., order].reshape(len(values), -1).T, 4).T

    made = _tensors(qweight=packed(codes.T), qzeros=packed(zeros.T), scales=scales.T)
    return made, _meant(codes, scales, zeros, np.arange(codes.shape[1]) // GROUP)


def _gptq(bits: int, *, symmetric: bool, ordered: bool = False, offset: int = 1) -> Quantiser:
    def quantise(weight: torch.Tensor, generator: np.random.Generator) -> tuple[Tensors, torch.Tensor]:
        cols = weight.shape[1]
        # Depends only on the number of inputs, so that modules with the same inputs have the same order.
        order = np.random.default_rng(cols).permutation(cols) if ordered else np.arange(cols)
        codes, scales, zeros = _affine(weight.numpy()[:, order], GROUP, bits, symmetric=symmetric)
        groups = np.empty(cols, np.int32)
        groups[order] = np.arange(cols) // GROUP
        codes[:, order] = codes.copy()
        made = _tensors(
            qweight=_pack(codes.T, bits), qzeros=_pack((zeros - offset), bits).T, scales=scales.T, g_idx=groups
        )
        return made, _meant(codes, scales, zeros, groups)

    return quantise


def _fp8(block: int) -> Quantiser:
    """FP8 in blocks, as DeepSeek and Qwen publish; 0: one scale for all, as AutoFP8 and ModelOpt write."""

    def quantise(weight: torch.Tensor, generator: np.random.Generator) -> tuple[Tensors, torch.Tensor]:
        values = weight.numpy()
        rows, cols = values.shape
        if block == 0:
            scale = np.float32(np.abs(values).max() / 448)
            codes = (values / scale).astype(ml_dtypes.float8_e4m3fn)
            made = {"weight_scale": torch.tensor(scale), "input_scale": torch.tensor(0.02)}
            whole: Any = scale
        else:
            padded = np.pad(values, ((0, -rows % block), (0, -cols % block)))  # the last blocks may be short
            blocks = padded.reshape(len(padded) // block, block, -1, block)
            scales = (np.abs(blocks).max((1, 3)) / 448).astype(np.float32)
            whole = scales.repeat(block, 0).repeat(block, 1)[:rows, :cols]
            codes = (values / whole).astype(ml_dtypes.float8_e4m3fn)
            made = _tensors(weight_scale_inv=scales)
        made["weight"] = torch.from_numpy(codes.view(np.uint8)).view(torch.float8_e4m3fn)
        return made, torch.from_numpy(codes.astype(np.float32) * whole)

    return quantise


def _scheme(
    form: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None
) -> tuple[dict[str, Any], Quantiser]:
    weights = {"symmetric": True, "dynamic": False, **weights}
    if inputs is not None:
        inputs = {"num_bits": 8, "symmetric": True, **inputs}
    config = {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": weights,
                "input_activations": inputs,
                "output_activations": None,
            }
        },
        "ignore": ["lm_head", "re:.*gate$", "re:.*in_proj_(?:a|b|ba)$"],
    }
    return config, _compressed(form, weights, inputs)


_INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
_INT8 = {"num_bits": 8, "type": "int"}
_FP8 = {"num_bits": 8, "type": "float"}
_GPTQ = {"quant_method": "gptq", "group_size": GROUP, "desc_act": False, "sym": True, "checkpoint_format": "gptq"}


def _actorder(config: dict[str, Any], quantiser: Quantiser) -> tuple[dict[str, Any], Quantiser]:
    config["config_groups"]["group_0"]["weights"]["actorder"] = "group"
    return config, _ordered(quantiser)


# Name -> quantization_config, and the function that creates the tensors.
FORMATS: dict[str, tuple[dict[str, Any], Quantiser]] = {
    "w4a16": _scheme("pack-quantized", _INT4),
    "w4a16 zeros": _scheme("pack-quantized", {**_INT4, "symmetric": False}),
    "w4a16 channels": _scheme("pack-quantized", {**_INT4, "strategy": "channel", "group_size": None}),
    "w4a16 order": _actorder(*_scheme("pack-quantized", {**_INT4, "symmetric": False})),
    "w4 in rows": _scheme("int-quantized", _INT4),
    "w8a16": _scheme("pack-quantized", {**_INT4, "num_bits": 8}),
    "w8a16 channels, zeros": _scheme("pack-quantized", {**_INT8, "strategy": "channel", "symmetric": False}),
    "w8 in rows": _scheme("int-quantized", {**_INT8, "strategy": "group", "group_size": GROUP}),
    "w8a8 dynamic": _scheme(
        "int-quantized", {**_INT8, "strategy": "channel"}, {"type": "int", "strategy": "token", "dynamic": True}
    ),
    "w8a8 static": _scheme(
        "int-quantized", {**_INT8, "strategy": "tensor"}, {"type": "int", "strategy": "tensor", "dynamic": False}
    ),
    "fp8 channels": _scheme(
        "float-quantized", {**_FP8, "strategy": "channel"}, {"type": "float", "strategy": "token", "dynamic": True}
    ),
    "fp8 tensor": _scheme(
        "float-quantized", {**_FP8, "strategy": "tensor"}, {"type": "float", "strategy": "tensor", "dynamic": False}
    ),
    "fp8 blocks": _scheme(
        "float-quantized",
        {**_FP8, "strategy": "block", "block_structure": [GROUP, GROUP]},
        {"type": "float", "strategy": "group", "group_size": GROUP, "dynamic": True},
    ),
    "mxfp4": _scheme("mxfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}, _awq),
    "gptq": ({**_GPTQ, "bits": 4}, _gptq(4, symmetric=True)),
    "gptq, its zero as it is": ({**_GPTQ, "bits": 4}, _gptq(4, symmetric=True, offset=0)),
    "gptq zeros": ({**_GPTQ, "bits": 4, "sym": False}, _gptq(4, symmetric=False)),
    "gptq order": ({**_GPTQ, "bits": 4, "desc_act": True}, _gptq(4, symmetric=True, ordered=True)),
    "gptq 8 bits": ({**_GPTQ, "bits": 8}, _gptq(8, symmetric=True)),
    "gptq 8 bits, zeros": ({**_GPTQ, "bits": 8, "sym": False}, _gptq(8, symmetric=False)),
    "gptq_v2": (
        {**_GPTQ, "bits": 4, "sym": False, "checkpoint_format": "gptq_v2"},
        _gptq(4, symmetric=False, offset=0),
    ),
    "fp8 of DeepSeek": (
        {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [GROUP, GROUP]},
        _fp8(GROUP),
    ),
    "fp8 in blocks of 128": (
        {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
        _fp8(128),
    ),
    "fp8 of AutoFP8": ({"quant_method": "fp8", "activation_scheme": "static"}, _fp8(0)),
    "fp8 of ModelOpt": ({"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}, _fp8(0)),
}

# Only experts are quantised, and one tensor has all experts of a layer.
GPT_OSS = "mxfp4 of GPT-OSS"
_GPT_OSS_CONFIG = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.weight")

_LINEAR = re.compile(
    r"(?:.*\b(?:layers|h)\.\d+\..*(?:proj|proj_with_mqa|in_proj_qkvz?|in_proj_z|per_layer_projection"
    r"|W_pack|c_attn|wqkv|wo|w[123])"
    r"|.*per_layer_model_projection)\.weight"
)


def quantise(source: Path, folder: Path, name: str) -> Tensors:
    """Write a copy of a folder of dense weights with quantised layers. Returns the dequantised weights in fp32, by
    their dense names."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    dense = load_file(source / "model.safetensors")
    if name == GPT_OSS:
        written, meant = _gpt_oss(dense)
    else:
        written, values = _by_module({key: value.contiguous() for key, value in _modules(dense)}, FORMATS[name][1])
        meant = {key: torch.empty(value.shape) for key, value in dense.items()}
        for key, value in _modules(meant):
            value.copy_(values[key])
    save_file(written, folder / "model.safetensors")
    config = _GPT_OSS_CONFIG if name == GPT_OSS else FORMATS[name][0]
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": config}))
    return meant


_FUSED = re.compile(r"(.*\.experts)\.(gate_up|down)_proj(_bias)?")


def _modules(tensors: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors. GPT-OSS' experts become modules of their own, as llm-compressor writes them: their tensors are
    views."""
    for key, value in tensors.items():
        match = _FUSED.fullmatch(key)
        if not match:
            yield key, value
            continue
        for index, one in enumerate(value if match[3] else value.transpose(1, 2)):
            parts = {"gate_proj": one[::2], "up_proj": one[1::2]} if match[2] == "gate_up" else {"down_proj": one}
            for name, part in parts.items():
                yield f"{match[1]}.{index}.{name}.{'bias' if match[3] else 'weight'}", part


def round_to_nearest(source: Path, folder: Path, scheme: str, group: int) -> None:
    """Write a copy of a folder with bf16 weights as llm-compressor does with method rtn: all arithmetic is in bf16.

    scheme: a value of the setting quantization. per_layer_model_projection and latents' kv_b_proj stay in bf16.
    """
    channels, grouped = {"strategy": "channel"}, {"strategy": "group", "group_size": group}
    by_token = {"strategy": "token", "dynamic": True}
    form, weights, inputs = {
        "w4a16": ("pack-quantized", {**_INT4, **grouped}, None),
        "w8a16": ("pack-quantized", {**_INT8, **channels}, None),
        "w8a8": ("int-quantized", {**_INT8, **channels}, {"type": "int", **by_token}),
        "fp8": ("float-quantized", {**_FP8, **channels}, {"type": "float", **by_token}),
    }[scheme]
    config, _ = _scheme(form, weights, inputs)
    config["ignore"] = ["lm_head"]  # others have a weight in bf16, which says enough
    parsed = QuantizationScheme.model_validate({**config["config_groups"]["group_0"], "format": form})
    compressor = BaseCompressor.get_value_from_registry(form)
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    written: Tensors = {}
    for key, value in _modules(load_file(source / "model.safetensors")):
        linear = _LINEAR.fullmatch(key) or key.endswith("per_layer_input_gate.weight")
        if not linear or key.endswith(("kv_b_proj.weight", "per_layer_model_projection.weight")):
            written[key] = value.contiguous()
            continue
        weight = value.contiguous()
        groups = weight.reshape(len(weight), -1, group if scheme == "w4a16" else weight.shape[1])
        scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), parsed.weights)
        assert weight.dtype == scale.dtype == torch.bfloat16
        made = compressor.compress({"weight": weight, "weight_scale": scale, "weight_zero_point": zero}, parsed)
        written |= {f"{key.removesuffix('weight')}{last}": one.contiguous() for last, one in made.items()}
    save_file(written, folder / "model.safetensors")
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": config}))


def _by_module(dense: Tensors, quantiser: Quantiser) -> tuple[Tensors, Tensors]:
    generator = np.random.default_rng(0)
    written: Tensors = {}
    meant: Tensors = {}
    for key, weight in dense.items():
        if not _LINEAR.fullmatch(key):
            written[key], meant[key] = weight, weight.float()
            continue
        tensors, values = quantiser(weight.float(), generator)
        meant[key] = values.contiguous()
        written |= {f"{key.removesuffix('weight')}{last}": value.contiguous() for last, value in tensors.items()}
    return written, meant


def _gpt_oss(dense: Tensors) -> tuple[Tensors, Tensors]:
    """Experts as in GPT-OSS: row 2 i of gate_up_proj is row i of gate, row 2 i + 1 is row i of up."""
    found = {key: match for key in dense if (match := _EXPERT.fullmatch(key))}
    stacked = [key for key in dense if re.fullmatch(r".*\.experts\.(?:gate_up|down)_proj", key)]  # of GPT-OSS itself
    written = {key: weight for key, weight in dense.items() if key not in found and key not in stacked}
    meant = {key: weight.float() for key, weight in written.items()}
    for key in stacked:
        blocks, scales = _mx_blocks(dense[key].float().transpose(1, 2).contiguous().numpy())
        written |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
        meant[key] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
    for module in {match[1] for match in found.values()}:
        names = ("w1", "w3", "w2") if module.endswith("block_sparse_moe.experts") else _OTHER_NAMES
        count = 1 + max(int(match[2]) for match in found.values() if match[1] == module)
        gate, up, down = (
            torch.stack([dense[f"{module}.{index}.{name}.weight"] for index in range(count)]).float() for name in names
        )
        values = {}
        for name, weight in (("gate_up_proj", torch.stack([gate, up], 2).flatten(1, 2)), ("down_proj", down)):
            blocks, scales = _mx_blocks(weight.numpy())
            written |= {f"{module}.{name}_blocks": blocks, f"{module}.{name}_scales": scales}
            values[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(1, 2)
        theirs = (values["gate_up_proj"][:, ::2], values["gate_up_proj"][:, 1::2], values["down_proj"])
        for name, weights in zip(names, theirs, strict=True):
            meant |= {f"{module}.{index}.{name}.weight": weight.contiguous() for index, weight in enumerate(weights)}
    return written, meant


_OTHER_NAMES = ("gate_proj", "up_proj", "down_proj")


def _mx_blocks(weight: Array) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., in] to bytes [..., in / 32, 16] with two codes each, and exponents [..., in / 32]."""
    numbers = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    groups = weight.reshape(*weight.shape[:-1], -1, 32)
    exponents = np.floor(np.log2(np.abs(groups).max(-1))).astype(np.int64) - 2
    scaled = groups / 2.0 ** exponents[..., None]
    codes = np.abs(np.abs(scaled)[..., None] - numbers).argmin(-1) + 8 * (scaled < 0)
    blocks = (codes[..., ::2] | codes[..., 1::2] << 4).astype(np.uint8)
    return torch.from_numpy(blocks), torch.from_numpy((exponents + 127).astype(np.uint8))
