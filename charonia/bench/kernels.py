"""Measures single operations: GEMMs with a model's weights in each format, attention over its KV cache, and layers of
experts.

The operations run on the engine's own devices, so each GEMM uses the kernel that the engine would choose.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Sequence

from charonia import _engine
from charonia.bench.limits import Limits, measure_limits
from charonia.bench.random_model import Shape
from charonia.bench.records import Record
from charonia.errors import InvalidRequestError, UnsupportedError

log = logging.getLogger("charonia")

# The experts of Qwen3-30B-A3B and GPT-OSS 20B: how many, how many of them a row takes, hidden and intermediate size.
EXPERTS = ((128, 8, 2048, 768), (32, 4, 2880, 2880))
FORMATS = ("bf16", "w4a16", "mxfp4", "w8a16", "w8a8", "fp8")
_CACHES = {"16 bits": (0, 16), "fp8": (16, 8), "8 bits": (8, 8), "4 bits": (4, 4)}  # quant_policy, bits of an element
_STEP_BYTES = {"cpu": 300e6, "cuda": 2e9}  # bytes read in a measured step: more than caches hold, and little overhead
_MOST_LAYERS = 64
_EXPERT_LAYERS = 2  # of a step: a layer of a model is larger than caches
_GROUPS = {"w4a16": 128, "mxfp4": 32}  # columns; other formats have one scale a row
# A line of the engine's report: "rows 5..8 n 4096 k 4096 bf16 -> bf16: own stream 8 x 16, 4 stages, 8.0 us, 4.19 TB/s".
_CHOICE = re.compile(r"rows (\d+)\.\.(\d+) n (\d+) k (\d+) [^:]*: (.*?)(?:, [\d.]+ us, .*|, by rule)")


def measure_kernels(
    shape: Shape,
    *,
    device: str,
    threads: int,
    modes: Sequence[bool],
    formats: Sequence[str],
    rows: Sequence[int],
    contexts: Sequence[int],
    batch: int,
    rounds: int,
) -> Iterator[Record]:
    """Yield the records of GEMMs for each format and number of rows, then of attention for each context and kind of KV
    cache: decodes of one and of `batch` sequences, and a chunk of 512 prompt tokens at the end of the context; on a GPU
    also a prompt of that length. An FP8 cache is left out, with a warning, if the device does not support it. modes:
    values of the setting `reproducible`. On a GPU, the records of GEMMs name the kernel that the mode chose."""
    limits = measure_limits(device, threads)
    benches = {
        "reproducible" if reproducible else "normal": _engine.KernelBench(device, threads, reproducible)
        for reproducible in modes
    }
    dim = shape.hidden // shape.heads
    if limits.bandwidth:
        yield Record.of("limits", "bandwidth", "GB/s", limits.bandwidth / 1e9)
    if limits.gemm_flops:
        yield Record.of("limits", "bf16 GEMM", "TFLOP/s", limits.gemm_flops / 1e12)
    for name, (n, k) in weights_of(shape).items():
        for code in formats:
            layers = _layers(device, n * k * (2 if code == "bf16" else 0.5))
            for mode, bench in benches.items():
                known = set(bench.report())
                size, times = bench.gemm(n, k, code, list(rows), layers, rounds)
                chosen = [line for line in bench.report() if line not in known]
                for count in rows:
                    case: dict[str, object] = {"weight": f"{name} {n} x {k}", "format": code, "rows": count}
                    if device == "cuda":
                        case |= {"mode": mode, "kernel": kernel_of(chosen, n, k, count)}
                    yield from _records("gemm", case, times[count], size, 2.0 * count * n * k, limits)
    for cache, (policy, bits) in _CACHES.items():
        for context in contexts:
            chunk = min(512, context)
            whole = [(1, context)] if device == "cuda" else []
            for sequences, fresh in dict.fromkeys([(1, 1), (batch, 1), (1, chunk), *whole]):
                layers = _layers(device, 4 * sequences * context * shape.kv_heads * dim * bits / 16)
                for mode, bench in benches.items():
                    try:
                        kv_size, seconds = bench.attention(
                            shape.heads, shape.kv_heads, dim, policy, sequences, fresh, context, layers, rounds
                        )
                    except UnsupportedError as error:
                        log.warning("left out: %s", error)
                        continue
                    case = {"KV cache": cache, "context": context, "sequences": sequences, "rows": fresh}
                    if device == "cuda":
                        case["mode"] = mode
                    seen = fresh * (context - (fresh - 1) / 2)  # positions, over the rows of a sequence
                    operations = 4.0 * sequences * shape.heads * dim * seen
                    yield from _records("attention", case, seconds, kv_size, operations, limits)


def parse_experts(text: str) -> tuple[int, int, int, int]:
    """Parse the sizes of a layer of experts: their number, how many of them a row takes, hidden and intermediate size.
    Raises InvalidRequestError."""
    try:
        count, top_k, hidden, inter = (int(part) for part in text.split(","))
        if not (1 <= top_k <= count and hidden > 0 and inter > 0):
            raise ValueError
    except ValueError as error:
        raise InvalidRequestError(
            f"experts {text!r} are not valid; expected four numbers separated by commas: how many there are, how many "
            "of them a row takes, hidden size, intermediate size (128,8,2048,768)"
        ) from error
    return count, top_k, hidden, inter


def parse_layers(texts: Sequence[str], formats: Sequence[str]) -> list[tuple[int, int, int, int]]:
    """Parse the sizes of layers of experts. Raises InvalidRequestError, also if none of the formats can be measured."""
    layers = [parse_experts(text) for text in texts]
    for text, (_, _, hidden, inter) in zip(texts, layers, strict=True):
        if not expert_formats(formats, hidden, inter):
            raise InvalidRequestError(
                f"--experts {text}: none of the formats can be measured; groups must divide both sizes (w4a16: 128, "
                "mxfp4: 32), and experts in bf16 are not measured"
            )
    return layers


def expert_formats(formats: Sequence[str], hidden: int, inter: int) -> list[str]:
    """The quantised formats whose groups divide both sizes."""
    whole = {
        one for one in formats if one != "bf16" and hidden % _GROUPS.get(one, 1) == inter % _GROUPS.get(one, 1) == 0
    }
    return [one for one in formats if one in whole]


def measure_experts(
    experts: Sequence[tuple[int, int, int, int]],
    *,
    device: str,
    threads: int,
    modes: Sequence[bool],
    formats: Sequence[str],
    rows: Sequence[int],
    rounds: int,
) -> Iterator[Record]:
    """Yield the records of layers of experts (parse_experts()) for each of expert_formats() and number of rows. On a
    GPU of compute capability 9.0 without `reproducible` there are two kernels for more than four rows an expert. No GPU
    has run wgmma yet, so it is measured last, and only with $CHARONIA_CUDA_UNPROVEN = 1."""
    limits = measure_limits(device, threads)
    both = device == "cuda" and False in modes and os.environ.get("CHARONIA_CUDA_UNPROVEN") == "1"
    for wgmma in (False, True) if both else (False,):
        bench = _engine.KernelBench(device, threads, False not in modes, wgmma_experts=wgmma)
        for count, top_k, hidden, inter in experts:
            many = {one for one in rows if one * top_k // count > 4}
            used = [one for one in rows if not wgmma or one in many]
            for code in expert_formats(formats, hidden, inter) if used else ():
                size, times = bench.experts(count, top_k, hidden, inter, code, used, _EXPERT_LAYERS, rounds)
                if wgmma and not any(": wgmma" in line for line in bench.report()):
                    return  # the device, or the build, does not have it
                for one in used:
                    name = f"{top_k} of {count}, {hidden} x {inter}"
                    case: dict[str, object] = {"experts": name, "format": code, "rows": one}
                    if device == "cuda":
                        case["kernel"] = "wgmma" if wgmma else "tiles" if one in many else "stream"
                    read = size * min(1.0, one * top_k / count)  # an estimate: rows share experts
                    yield from _records("experts", case, times[one], read, 6.0 * one * top_k * hidden * inter, limits)


def weights_of(shape: Shape) -> dict[str, tuple[int, int]]:
    """Output and input features of a layer's GEMMs."""
    dim = shape.hidden // shape.heads
    return {
        "qkv": ((shape.heads + 2 * shape.kv_heads) * dim, shape.hidden),
        "o": (shape.hidden, shape.heads * dim),
        "gate_up": (2 * shape.intermediate, shape.hidden),
        "down": (shape.hidden, shape.intermediate),
    }


def kernel_of(report: Sequence[str], n: int, k: int, rows: int) -> str:
    """The kernel that the lines of an engine's report name for a GEMM; empty if there is none. A number of rows beyond
    the last line uses the last line's kernel."""
    found = [match.groups() for line in report if (match := _CHOICE.fullmatch(line))]
    kernels = [(int(last), kernel) for _, last, *of, kernel in found if of == [str(n), str(k)]]
    return next((kernel for last, kernel in kernels if rows <= last), kernels[-1][1] if kernels else "")


def _layers(device: str, size: float) -> int:
    """The number of operations in a step, by the bytes that one reads."""
    return int(max(2, min(_MOST_LAYERS, _STEP_BYTES[device] // size + 1)))


def _records(
    benchmark: str, case: dict[str, object], seconds: Sequence[float], size: float, operations: float, limits: Limits
) -> Iterator[Record]:
    """size: bytes of weights, or of keys and values, that the operation reads."""

    def record(name: str, unit: str, values: list[float]) -> Record:
        return Record.of(benchmark, name, unit, values, case=case)

    yield record("time", "us", [1e6 * one for one in seconds])
    yield record("read", "GB/s", [size / one / 1e9 for one in seconds])
    if limits.bandwidth:
        yield record("of limit", "%", [100 * size / one / limits.bandwidth for one in seconds])
    yield record("rate", "GFLOP/s", [operations / one / 1e9 for one in seconds])
    if limits.gemm_flops:
        yield record("of a bf16 GEMM", "%", [100 * operations / one / limits.gemm_flops for one in seconds])
