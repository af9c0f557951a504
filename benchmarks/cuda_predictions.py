"""What every CUDA kernel should take on an H200, and the table that measurements are put beside.

Model of a time: fixed + max(bytes / (memory * bandwidth), operations / (gemm * GEMM rate)). `fixed` is what a
launch takes however small it is: filling, draining, and the launches of an operation of several kernels. `memory` and
`gemm` are the shares of the device's limits that a large launch should reach. A share in the tables is the time
that the nearer limit allows over the time that is predicted or measured.
"""

from __future__ import annotations

import json
import math
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_suffix(".md")
RESULTS = Path(__file__).parent / "results" / "h200_kernels.json"  # the fastest variants of a run on such a machine
# Of an H200, measured on such machines: bytes a second that a copy moves, operations a second of a bf16 GEMM of two
# 8192 x 8192 matrices.
BANDWIDTH, GEMM_RATE = 4.3e12, 790e12

Shape = Mapping[str, Any]
_ELEMENT = {"bf16": 2, "fp16": 2, "fp32": 4}
_CODE_BITS = {"int4": 4, "int8": 8, "fp8": 8, "mxfp4": 4}


@dataclass(frozen=True)
class Kernel:
    """An operation as the results name it. compiled: the kernels that it launches, "file: kernel", files without what
    they end with (_kernel.h, .cu). fixed in microseconds; memory and gemm as the module says; why: where these come
    from."""

    name: str
    compiled: tuple[str, ...]
    fixed: float
    memory: float
    gemm: float
    why: str


_GEMM = "gemm_stream: stream_kernel"
_NEIGHBOURS = "every element is read or written once by the 16 bytes, several loads of a thread are under way"
_SAMPLED = ("sample: scan_kernel", "sample: histogram_kernel", "sample: finish_kernel")
_TWICE = "as the kernels of 16 bits; GEMMs at twice the rate, in operations of 16 bits"
_EXPERTS = (
    "experts_gemm: stream_kernel",
    "experts_gemm: tile_kernel",
    "experts_gemm: plain_kernel",
)
KERNELS = {
    kernel.name: kernel
    for kernel in (
        Kernel(
            "gemm_stream",
            (_GEMM,),
            1,
            0.98,
            0.5,
            "24 warps hold 96 KB under way where 29 KB are needed; 1 us fills and drains",
        ),
        Kernel(
            "gemm_gated",
            (_GEMM,),
            1,
            0.98,
            0.5,
            "as gemm_stream; what it saves is gated_activation's launch",
        ),
        Kernel(
            "gemm_tile",
            ("gemm_tile: tile_kernel",),
            2,
            0.9,
            0.5,
            "stages hold 96 KB under way; mma.sync has about 60 % of wgmma's rate, less what shared memory costs",
        ),
        Kernel(
            "gemm_plain",
            ("gemm_plain: plain_kernel",),
            2,
            0.6,
            1,
            "float on CUDA cores: memory bounds few rows, arithmetic more",
        ),
        Kernel("add_bias", ("gemm_bias: bias_kernel",), 2, 0.85, 1, _NEIGHBOURS),
        Kernel(
            "attention_decode",
            ("attention_decode: decode_kernel",),
            4,
            0.85,
            0.3,
            "splits of equal work on all SMs, and their combination",
        ),
        Kernel(
            "attention_prefill",
            ("attention_prefill: prefill_kernel",),
            4,
            0.6,
            0.42,
            "mma.sync, and the exponentials of a tile stand between its two products",
        ),
        Kernel(
            "attention_plain",
            ("attention_plain: plain_kernel",),
            4,
            0.2,
            1,
            "float, one element at a time: for models that no tile serves",
        ),
        Kernel("embed", ("rows: embed_kernel",), 2, 0.85, 1, _NEIGHBOURS),
        Kernel(
            "rms_norm",
            ("rows: rms_norm_kernel",),
            2.5,
            0.85,
            1,
            "a block per row with a sum over it in between: latency at few rows",
        ),
        Kernel("gated_activation", ("rows: gate_kernel",), 2, 0.85, 1, _NEIGHBOURS),
        Kernel(
            "rms_norm_codes", ("rows: rms_norm_kernel",), 3, 0.85, 1, "as rms_norm, with a maximum over the row more"
        ),
        Kernel(
            "gate_codes",
            ("rows: gate_codes_kernel",),
            3,
            0.8,
            1,
            "a block per row, of which a thread keeps two vectors",
        ),
        Kernel("soft_cap", ("rows: scale_logits_kernel",), 2, 0.85, 1, _NEIGHBOURS),
        Kernel("gather_rows", ("rows: copy_kernel",), 2, 0.85, 1, _NEIGHBOURS),
        Kernel("side_by_side", ("rows: copy_kernel",), 2, 0.85, 1, _NEIGHBOURS),
        Kernel("copy_block", ("rows: copy_kernel",), 2, 0.85, 1, _NEIGHBOURS),
        Kernel(
            "rotary_store",
            ("rotary: rotary_kernel", "rows: squares_kernel"),
            2,
            0.8,
            1,
            "as above; heads of k and v are stored 256 bytes at a time",
        ),
        Kernel(
            "rotary_store_quantised",
            ("rotary: rotary_quant_kernel",),
            2.5,
            0.7,
            1,
            "least and greatest of every head before it is stored",
        ),
        Kernel("sample", _SAMPLED, 7, 0.8, 1, "three launches; the block that finishes a row works alone"),
        Kernel(
            "sample_changed",
            ("sample: history_kernel", "sample: scatter_kernel", *_SAMPLED),
            9,
            0.7,
            1,
            "as above, with one launch more for bans or penalties",
        ),
        Kernel("sum_shards", ("collective: sum_kernel",), 2, 0.85, 1, _NEIGHBOURS),
        Kernel(
            "experts_route",
            ("experts_route: route_kernel", "experts_route: route_by_scores_kernel", "experts_route: group_kernel"),
            6,
            0.3,
            1,
            "two launches, the first by the kind of router; one block numbers all assignments",
        ),
        Kernel("experts_pad", ("experts_route: pad_kernel",), 2, 0.85, 1, _NEIGHBOURS),
        Kernel(
            "experts_gated",
            _EXPERTS,
            3,
            0.88,
            0.45,
            "as gemm_stream and gemm_tile; tiles of an expert read its weights again from L2",
        ),
        Kernel("experts_down", _EXPERTS, 3, 0.88, 0.45, "as experts_gated"),
        Kernel(
            "experts_add",
            ("experts_route: add_kernel",),
            2,
            0.8,
            1,
            "a row's experts lie apart, each is read by the 16 bytes",
        ),
        Kernel(
            "quant_stream",
            ("quant_stream: stream_kernel",),
            1.5,
            0.75,
            0.3,
            "int4 codes at 4.9 TB/s would take every instruction that SMs issue: some 190 for 2048 codes of a warp",
        ),
        Kernel(
            "quant_tile",
            ("quant_tile: tile_kernel",),
            2.5,
            0.6,
            0.35,
            "as gemm_tile, less what codes take to become numbers; inputs of many rows are bound by the L2 cache",
        ),
        Kernel(
            "quant_plain",
            ("quant_plain: plain_kernel",),
            2,
            0.015,
            1,
            "float, made to be right: 32 columns at a time between barriers",
        ),
        Kernel(
            "quant_inputs",
            ("quant_inputs: input_kernel",),
            2.5,
            0.8,
            1,
            "a row is read twice, from the cache the second time",
        ),
        Kernel(
            "dequantise",
            ("quant_dequantise: dequantise_kernel",),
            2,
            0.85,
            1,
            "a warp has 2 KB of int4 codes under way and stores whole sectors; its instructions hide behind that",
        ),
        Kernel("w8a8_stream", (_GEMM,), 1, 0.95, 0.5, _TWICE),
        Kernel("w8a8_tile", ("gemm_tile: tile_kernel",), 2, 0.85, 0.5, _TWICE),
        Kernel(
            "w8a8_inputs",
            ("w8a8_inputs: quantise_kernel",),
            2.5,
            0.8,
            1,
            "a row is read twice, from the cache the second time",
        ),
    )
}
# Of other makers, measured on the same shapes: the table shows the best of them beside ours. "dequantised": with the
# kernel that makes numbers of a quantised weight.
_LIBRARIES = {"cuBLASLt", "dequantised, cuBLASLt", "torch.mm", "SDPA FlashAttention", "SDPA cuDNN"}


def work(kernel: str, shape: Shape, variant: str) -> tuple[float, float]:
    """Bytes that must move between memory and SMs, and operations of tensor cores, those of 8 bits counted by half.

    An independent account of what benchmarks/cuda_*.cpp count; --against compares the two.
    """
    rows = shape.get("rows", 0)
    if kernel == "gemm_gated":
        both, operations = work("gemm_stream", shape, variant)
        return both - rows * shape["n"] / 2 * _ELEMENT[shape["out"]], operations
    if kernel in ("gemm_stream", "gemm_tile", "gemm_plain", "cuBLASLt"):
        n, k, element = shape["n"], shape["k"], _ELEMENT[shape["type"]]
        operations = 0 if shape["type"] == "fp32" else 2 * rows * n * k
        return (n * k + rows * k) * element + rows * n * _ELEMENT[shape["out"]], operations
    if kernel == "quant_inputs":
        return rows * (2 * 2 * shape["k"] + 4), 0
    if kernel == "w8a8_inputs":
        return rows * (3 * shape["k"] + 4), 0
    if kernel.startswith("w8a8") or (kernel == "cuBLASLt" and "codes" in shape):
        n, k = shape["n"], shape["k"]
        return (n + rows) * (k + 4) + 2 * rows * n, rows * n * k
    if kernel == "dequantise":
        read, _ = _quantised({**shape, "rows": 0})
        return read + shape["n"] * shape["k"] * _ELEMENT[shape["type"]], 0
    if kernel.startswith("quant") or kernel == "dequantised, cuBLASLt":
        return _quantised(shape)
    if kernel.startswith("attention"):
        return _attention(shape)
    if kernel.startswith("experts"):
        return _experts(kernel, shape)
    if kernel.startswith("sample"):
        return 4 * rows * shape["vocab"] * (1.5 if "penalties" in variant else 1), 0
    if kernel.startswith("rotary_store"):
        heads, kv_heads, dim = shape["heads"], shape["kv_heads"], shape["head_dim"]
        stored = 2 * kv_heads * _head_bytes(dim, shape["kv_bits"])
        return rows * ((2 * heads + 2 * kv_heads) * dim * 2 + stored + 4 * dim), 0
    if kernel == "copy_block":
        return 2 * shape["layers"] * 64 * 2 * shape["kv_heads"] * shape["head_dim"] * 2, 0
    moved = {
        "embed": lambda: rows * shape["hidden"] * (2 + 4),
        "rms_norm": lambda: (rows * (4 + 4 + 2 + 2) + 4) * shape["hidden"],
        "gated_activation": lambda: rows * shape["inter"] * (2 * 2 + 2),
        "rms_norm_codes": lambda: (rows * (4 + 4 + 2 + 1) + 4) * shape["hidden"] + 4 * rows,
        "gate_codes": lambda: rows * (shape["inter"] * (2 * 2 + 1) + 4),
        "gather_rows": lambda: rows * shape["cols"] * 2 * 4,
        "add_bias": lambda: (rows * 2 * 2 + 4) * shape["n"],
        "sum_shards": lambda: rows * shape["cols"] * 2 * (shape["ranks"] + 1),
        "soft_cap": lambda: rows * shape["vocab"] * 2 * 4,
        "side_by_side": lambda: rows * shape["ranks"] * shape["cols"] * 2 * 4,
    }
    return moved[kernel](), 0


def _quantised(shape: Shape) -> tuple[float, float]:
    n, k, rows = shape["n"], shape["k"], shape["rows"]
    scales = n * k / shape["group"] * _ELEMENT[shape["scale"]]
    inputs_outputs = rows * (n + k) * _ELEMENT[shape["type"]]
    operations = 0 if shape["type"] == "fp32" else 2 * rows * n * k
    return n * k * _CODE_BITS[shape["codes"]] / 8 + scales + inputs_outputs, operations


def _head_bytes(dim: int, bits: int) -> float:
    """Of k or v of a token: quantised ones have a scale and a zero of 16 bits."""
    return dim * bits / 8 + (4 if bits in (4, 8) else 0)


def _attention(shape: Shape) -> tuple[float, float]:
    batch, new, context = shape["batch"], shape["new_tokens"], shape["context"]
    bits, width = shape["kv_bits"], shape["heads"] * shape["head_dim"]
    element = 4 if bits == 32 else 2
    read = batch * context * 2 * shape["kv_heads"] * _head_bytes(shape["head_dim"], bits)
    seen = sum(range(context - new + 1, context + 1))
    return read + 2 * batch * new * width * element, 0 if bits == 32 else 4 * batch * width * seen


def _experts(kernel: str, shape: Shape) -> tuple[float, float]:
    rows, hidden, inter = shape["rows"], shape["hidden"], shape["inter"]
    assignments = rows * shape["top_k"]
    hit = min(shape["experts"], assignments)
    if kernel == "experts_route":
        return rows * shape["experts"] * 4 + assignments * 16, 0
    if kernel == "experts_pad":
        return rows * hidden * 2 * 2, 0
    if kernel == "experts_add":
        return (assignments + rows) * hidden * 2 + assignments * 8, 0
    if kernel == "experts_gated":
        return 2 * (
            hit * 2 * inter * hidden + rows * hidden + assignments * inter
        ), 2 * assignments * 2 * inter * hidden
    return 2 * (hit * inter * hidden + assignments * (inter + hidden)), 2 * assignments * inter * hidden


@dataclass(frozen=True)
class Prediction:
    kernel: Kernel
    shape: Shape
    variant: str  # "": the fastest one counts

    @property
    def work(self) -> tuple[float, float]:
        return work(self.kernel.name, self.shape, self.variant)

    @property
    def limit(self) -> str:
        moved, operations = self.work
        return "memory" if moved / BANDWIDTH >= operations / GEMM_RATE else "gemm"

    @property
    def limit_us(self) -> float:
        moved, operations = self.work
        return max(moved / BANDWIDTH, operations / GEMM_RATE) * 1e6

    @property
    def expected_us(self) -> float:
        moved, operations = self.work
        by_memory = moved / (BANDWIDTH * self.kernel.memory)
        by_gemms = operations / (GEMM_RATE * self.kernel.gemm)
        return self.kernel.fixed + 1e6 * max(by_memory, by_gemms)


@dataclass(frozen=True)
class _Model:
    """As model_shapes() of benchmarks/cuda_bench.cpp has it."""

    name: str
    kv_heads: int
    inter: int
    vocab: int
    hidden: int = 4096
    heads: int = 32
    head_dim: int = 128


_MODELS = (_Model("llama2-7b", 32, 11008, 32000), _Model("llama3-8b", 8, 14336, 128256))
_SAMPLINGS = ("greedy", "temperature 0.8", "top-k 50, top-p 0.9", "greedy, 20 log probabilities")
_CHANGES = ("temperature 0.8, a banned token", "temperature 0.8, penalties")


def predictions() -> list[Prediction]:
    """In the order of the suites of charonia_cuda_kernels, of whose shapes these are a part."""
    return [
        Prediction(KERNELS[kernel], shape, variant)
        for suite in (_gemms, _attentions, _rows, _sampling, _mixture, _quantised_gemms, _gemms_of_8_bits)
        for kernel, shape, variant in suite()
    ]


_Row = tuple[str, Shape, str]


def _gemms() -> Iterator[_Row]:
    seen = set()
    for m in _MODELS:
        weights = {
            "qkv": ((m.heads + 2 * m.kv_heads) * m.head_dim, m.hidden),
            "o": (m.hidden, m.heads * m.head_dim),
            "gate_up": (2 * m.inter, m.hidden),
            "down": (m.hidden, m.inter),
            "head": (m.vocab, m.hidden),
        }
        for weight, (n, k) in weights.items():
            if (n, k) in seen:
                continue
            seen.add((n, k))
            for rows in (1, 8, 16, 64, 256, 2048):
                if weight == "head" and rows > 256:
                    continue
                out = "fp32" if weight == "head" else "bf16"
                shape = {"model": m.name, "weight": weight, "rows": rows, "n": n, "k": k, "type": "bf16", "out": out}
                yield "gemm_stream" if rows <= 16 else "gemm_tile", shape, ""
                if weight == "gate_up" and rows <= 16:
                    yield "gemm_gated", shape, ""
    for rows in (1, 64):
        shape = {"model": "fp32", "weight": "o", "rows": rows, "n": 4096, "k": 4096, "type": "fp32", "out": "fp32"}
        yield "gemm_plain", shape, ""


def _attentions() -> Iterator[_Row]:
    for m in _MODELS:
        heads = {"heads": m.heads, "kv_heads": m.kv_heads, "head_dim": m.head_dim}
        for bits, variant in ((16, "bf16"), (8, "int8"), (4, "int4")):
            for batch, context in ((1, 1024), (1, 32768), (16, 4096), (64, 1024), (64, 32768)):
                shape = {"model": m.name, "batch": batch, "new_tokens": 1, "context": context, **heads, "kv_bits": bits}
                yield "attention_decode", shape, variant
        shape = {"model": m.name, "batch": 1, "new_tokens": 1, "context": 1024, **heads, "kv_bits": 32}
        yield "attention_plain", shape, "fp32"
    for m in _MODELS:
        heads = {"heads": m.heads, "kv_heads": m.kv_heads, "head_dim": m.head_dim}
        for batch, new, context in ((4, 512, 512), (1, 2048, 2048), (8, 1024, 1024), (1, 8192, 8192), (1, 2048, 32768)):
            shape = {"model": m.name, "batch": batch, "new_tokens": new, "context": context, **heads, "kv_bits": 16}
            yield "attention_prefill", shape, "bf16"


def _rows() -> Iterator[_Row]:
    m = _MODELS[1]
    qkv = (m.heads + 2 * m.kv_heads) * m.head_dim
    for rows in (1, 64, 256, 2048):
        of = {"model": m.name, "rows": rows}
        heads = {"heads": m.heads, "kv_heads": m.kv_heads, "head_dim": m.head_dim}
        yield "embed", {**of, "hidden": m.hidden}, "bf16"
        yield "rms_norm", {**of, "hidden": m.hidden}, "bf16"
        yield "gated_activation", {**of, "inter": m.inter}, "bf16"
        yield "rms_norm_codes", {**of, "hidden": m.hidden}, "bf16"
        yield "gate_codes", {**of, "inter": m.inter}, "bf16"
        yield "rotary_store", {**of, **heads, "kv_bits": 16}, "bf16"
        for bits in (8, 4):
            yield "rotary_store_quantised", {**of, **heads, "kv_bits": bits}, f"int{bits}"
        yield "gather_rows", {**of, "cols": m.hidden}, "fp32"
        yield "add_bias", {**of, "n": qkv}, "bf16"
        yield "sum_shards", {**of, "ranks": 2, "cols": m.hidden}, "bf16"
        if rows <= 256:
            yield "soft_cap", {**of, "vocab": m.vocab}, "fp32"
            yield "side_by_side", {**of, "ranks": 2, "cols": m.vocab // 2}, "fp32"
    yield "copy_block", {"model": m.name, "layers": 32, "kv_heads": m.kv_heads, "head_dim": m.head_dim}, "bf16"


def _sampling() -> Iterator[_Row]:
    for m in _MODELS:
        for rows in (1, 64, 256):
            for variant in (*_SAMPLINGS, *_CHANGES):
                kernel = "sample_changed" if variant in _CHANGES else "sample"
                yield kernel, {"model": m.name, "rows": rows, "vocab": m.vocab}, variant


def _mixture() -> Iterator[_Row]:
    for rows in (1, 16, 64, 256, 2048):
        sizes = {"experts": 8, "top_k": 2, "hidden": 4096, "inter": 14336}
        for kernel in ("experts_route", "experts_gated", "experts_down", "experts_add", "experts_pad"):
            yield kernel, {"model": "mixtral-8x7b", "rows": rows, **sizes}, ""


# Codes, the columns of a group (0: a row), the type of scales: as kFormats of benchmarks/cuda_quant.cpp has them.
_FORMATS = (("int4", 128, "bf16"), ("int8", 0, "bf16"), ("fp8", 128, "fp32"), ("mxfp4", 32, "bf16"))


def _weights_of(m: _Model) -> dict[str, tuple[int, int]]:
    return {
        "qkv": ((m.heads + 2 * m.kv_heads) * m.head_dim, m.hidden),
        "o": (m.hidden, m.heads * m.head_dim),
        "gate_up": (2 * m.inter, m.hidden),
        "down": (m.hidden, m.inter),
    }


def _quantised_shape(
    m: _Model, weight: str, rows: int | None, form: tuple[str, int, str], element: str = "bf16"
) -> Shape:
    (n, k), (codes, group, scale) = _weights_of(m)[weight], form
    of = {"model": m.name, "weight": weight, **({} if rows is None else {"rows": rows})}
    return {**of, "n": n, "k": k, "codes": codes, "group": group or k, "scale": scale, "type": element}


def _quantised_gemms() -> Iterator[_Row]:
    m = _MODELS[-1]
    for weight in _weights_of(m):
        for form in _FORMATS:
            for rows in (1, 16, 64, 256, 2048):
                yield "quant_stream" if rows <= 16 else "quant_tile", _quantised_shape(m, weight, rows, form), ""
            yield "dequantise", _quantised_shape(m, weight, None, form), ""
    yield "quant_plain", _quantised_shape(m, "o", 1, _FORMATS[0], "fp32"), ""
    for rows in (1, 64, 256, 2048):
        yield "quant_inputs", {"model": m.name, "rows": rows, "k": m.hidden}, ""


def _gemms_of_8_bits() -> Iterator[_Row]:
    m = _MODELS[-1]
    for codes in ("int8", "fp8"):
        for weight, (n, k) in _weights_of(m).items():
            for rows in (1, 16, 64, 256, 2048):
                shape = {"model": m.name, "weight": weight, "rows": rows, "n": n, "k": k, "codes": codes}
                yield "w8a8_stream" if rows <= 16 else "w8a8_tile", shape, ""
        for rows in (1, 64, 256, 2048):
            yield "w8a8_inputs", {"model": m.name, "rows": rows, "k": m.hidden}, f"{codes} by row"


# What a copy moves in a second: measured on an H200, and the same share of the datasheet's bandwidth of an H100.
_DEVICES = (("H200", BANDWIDTH), ("H100", 3.0e12))
_LAYERS = 32


def _tokens() -> list[str]:
    """Lines of a table: what all GEMMs of a token read and take at batch 1, by the type of the layers' weights."""
    m = _MODELS[-1]
    head = {"rows": 1, "n": m.vocab, "k": m.hidden, "type": "bf16", "out": "fp32"}
    lines = []
    for codes, group, scale in (("bf16", 0, ""), *_FORMATS):
        gemms: list[tuple[str, Shape]] = [("gemm_stream", head)]
        for weight, (n, k) in _weights_of(m).items():
            if codes == "bf16":
                shape: Shape = {"rows": 1, "n": n, "k": k, "type": "bf16", "out": "bf16"}
                gemms += [("gemm_stream", shape)] * _LAYERS
            else:
                gemms += [("quant_stream", _quantised_shape(m, weight, 1, (codes, group, scale)))] * _LAYERS
        moved = [(KERNELS[kernel], work(kernel, shape, "")[0]) for kernel, shape in gemms]
        times = [
            sum(kernel.fixed + 1e6 * read / (bandwidth * kernel.memory) for kernel, read in moved)
            for _, bandwidth in _DEVICES
        ]
        columns = " | ".join(_number(time) for time in times)
        lines.append(f"| {codes} | {_number(sum(read for _, read in moved) / 1e9)} | {columns} |")
    return lines


@dataclass(frozen=True)
class Measured:
    """Of one prediction: with programmatic dependent launch (the share is of the limits of that run), without it, and
    the best of the libraries. Microseconds."""

    us: float
    share: float
    without_overlap_us: float | None
    library_us: float | None
    library: str


def measured(prediction: Prediction, rows: Iterable[Mapping[str, Any]]) -> Measured | None:
    """The fastest of the rows of results that are of this prediction; None: there are none."""
    ours: list[Mapping[str, Any]] = []
    without: list[Mapping[str, Any]] = []
    libraries: list[Mapping[str, Any]] = []
    for row in rows:
        if row["shape"] != prediction.shape:
            continue
        if row["kernel"] in _LIBRARIES:
            libraries.append(row)
        elif row["kernel"] == prediction.kernel.name and prediction.variant in ("", row["variant"]):
            (without if row["pdl"] is False else ours).append(row)
    if not ours:
        return None
    best = min(ours, key=_time)
    library = min(libraries, key=_time, default=None)
    return Measured(
        best["microseconds"],
        best["share"],
        min((row["microseconds"] for row in without), default=None),
        None if library is None else library["microseconds"],
        "" if library is None else library["kernel"],
    )


def _time(row: Mapping[str, Any]) -> float:
    return float(row["microseconds"])


def markdown(results: Mapping[str, Any] | None = None) -> str:
    """The committed table, or with what was measured."""
    lines = [
        "# CUDA kernels: predicted and measured",
        "",
        "Written by `charonia benchmark cuda-predictions`; `--results FILE` takes the times from another run.",
        f"Limits of an H200: memory {BANDWIDTH / 1e12:.1f} TB/s, bf16 GEMMs {GEMM_RATE / 1e12:.0f} TFLOP/s.",
        "",
        "A time is predicted as fixed + max(bytes / (memory x bandwidth), operations / (GEMM x GEMM rate)); a",
        "share is what the nearer limit allows over the time. Measured shares are of the limits of their own run.",
        "",
        "| kernel | compiled from | fixed, us | memory | GEMM | why |",
        "|---|---|---:|---:|---:|---|",
    ]
    for kernel in KERNELS.values():
        gemm = f"{100 * kernel.gemm:.0f} %" if kernel.gemm < 1 else ""
        lines.append(
            f"| {kernel.name} | {', '.join(kernel.compiled)} | {kernel.fixed:g} | {100 * kernel.memory:.0f} % "
            f"| {gemm} | {kernel.why} |"
        )
    lines.append("")
    if results is None:
        lines.append("Nothing has been measured yet.")
    else:
        lines.append(_run(results))
    lines += [
        "",
        "| kernel | shape | MB | GFLOP | limit | limit, us | expected, us | share "
        "| measured, us | share | without overlap, us | library, us |",
        "|---|---|---:|---:|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    rows = [] if results is None else results["rows"]
    for one in predictions():
        moved, operations = one.work
        found = measured(one, rows)
        variant = f", {one.variant}" if one.variant else ""
        lines.append(
            f"| {one.kernel.name} | {_text(one.shape)}{variant} | {_number(moved / 1e6)} | {_number(operations / 1e9)} "
            f"| {one.limit} | {_number(one.limit_us)} | {_number(one.expected_us)} "
            f"| {100 * one.limit_us / one.expected_us:.0f} % | {_columns(found)} |"
        )
    lines += [
        "",
        f"All GEMMs of a token of {_MODELS[-1].name} at batch 1, its output layer in bf16, in microseconds; H100: with",
        "3.0 TB/s, the same share of its datasheet's bandwidth:",
        "",
        f"| weights | GB | {' | '.join(f'expected on {name}, us' for name, _ in _DEVICES)} |",
        f"|---|---:|{'---:|' * len(_DEVICES)}",
        *_tokens(),
    ]
    return "\n".join(lines) + "\n"


def _run(results: Mapping[str, Any]) -> str:
    limits, device = results["limits"], results["device"]
    reads, gemm, mma = (
        limits[name] / 1e12 for name in ("read_bytes_per_s", "gemm_operations_per_s", "mma_operations_per_s")
    )
    return (
        f"Measured on {device['name']} ({device['driver']}): memory reads at {reads:.2f} TB/s, GEMMs run at "
        f"{gemm:.0f} TFLOP/s ({limits['gemm_by']}), mma.sync in registers at {mma:.0f} TFLOP/s."
    )


def _text(shape: Shape) -> str:
    return ", ".join(str(value) if name in ("model", "weight") else f"{name} {value}" for name, value in shape.items())


def _number(value: float) -> str:
    """Three digits that count."""
    return "" if value == 0 else f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f}"


def _columns(found: Measured | None) -> str:
    if found is None:
        return " |  |  | "
    without = "" if found.without_overlap_us is None else _number(found.without_overlap_us)
    library = "" if found.library_us is None else f"{_number(found.library_us)} ({found.library})"
    return f"{_number(found.us)} | {100 * found.share:.0f} % | {without} | {library}"


def check_against(program: Path | str) -> list[str]:
    """What the program counts otherwise than work(), or measures not at all; nothing: all is well."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernels.json"
        try:
            done = subprocess.run([Path(program).absolute(), file, "tiny"], capture_output=True, text=True, check=False)
        except OSError as error:
            return [f"{program} cannot be run: {error.strerror}"]
        if done.returncode != 0:
            told = file.read_text(encoding="utf-8") if file.is_file() else ""
            return [f"{program} ended with {done.returncode}: {done.stderr}{told}"]
        try:
            return differences(json.loads(file.read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError) as error:
            return [
                f"{program} is no charonia_cuda_kernels_on_host: its file of results is not there or another: {error!r}"
            ]


def differences(results: Mapping[str, Any]) -> list[str]:
    """As check_against(), of results with shapes of any size."""
    wrong = []
    names: dict[str, set[str]] = {}
    for row in results["rows"]:
        names.setdefault(row["kernel"], set()).add(",".join(row["shape"]))
        counted, own = (row["bytes"], row["operations"]), work(row["kernel"], row["shape"], row["variant"])
        if not all(math.isclose(a, b, rel_tol=1e-12) for a, b in zip(counted, own, strict=True)):
            wrong.append(
                f"{row['kernel']} {row['shape']} {row['variant']}: the program counts {counted}, the table {own}"
            )
    for one in predictions():
        name, shape = one.kernel.name, ",".join(one.shape)
        if shape not in names.get(name, ()):
            wrong.append(f"{name}: the table's shapes are of {shape}, the program's of {names.get(name, 'nothing')}")
    return sorted(set(wrong))


def check(program: Path | str) -> int:
    """check_against() for a person, and for CTest, whose Python need not have the compiled module: says what it found,
    and returns an exit code."""
    wrong = check_against(program)
    print("\n".join(wrong) or "bytes and operations are those of the table")
    return 1 if wrong else 0


def write_table(results_file: Path | None, out: Path | None) -> None:
    """results_file: times, as charonia benchmark kernels writes them; None: those of RESULTS. out: None for TABLE."""
    from charonia.bench.kernels import read
    from charonia.errors import InvalidRequestError

    results, out = read(results_file or RESULTS), out or TABLE
    if not results["limits"] or not results["device"]:
        raise InvalidRequestError(f"{results_file} has no times: no suite of that run could be measured")
    out.write_text(markdown(results), encoding="utf-8")
    missing = sum(measured(one, results["rows"]) is None for one in predictions())
    print(f"{out}: {len(predictions()) - missing} of {len(predictions())} predictions have been measured")
