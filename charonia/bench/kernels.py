"""Measures single operations: GEMMs with a model's weights in each format, and attention over its KV cache.

The operations run on the engine's own devices, so each GEMM uses the kernel that the engine would choose.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from charonia import _engine
from charonia.bench.limits import Limits, measure_limits
from charonia.bench.random_model import Shape
from charonia.bench.records import Record

FORMATS = ("bf16", "w4a16", "mxfp4", "w8a16", "w8a8", "fp8")
_STEP_BYTES = {"cpu": 300e6, "cuda": 2e9}  # bytes read in a measured step: more than caches hold, and little overhead
_MOST_LAYERS = 64


def measure_kernels(
    shape: Shape,
    *,
    device: str,
    threads: int,
    reproducible: bool,
    formats: Sequence[str],
    rows: Sequence[int],
    contexts: Sequence[int],
    batch: int,
    rounds: int,
) -> Iterator[Record]:
    """Yield the records of GEMMs for each format and number of rows, then of attention for each context and kind of KV
    cache: decodes of one and of `batch` sequences, and a chunk of 512 prompt tokens at the end of the context."""
    limits = measure_limits(device, threads)
    bench = _engine.KernelBench(device, threads, reproducible)
    dim = shape.hidden // shape.heads
    weights = {
        "qkv": ((shape.heads + 2 * shape.kv_heads) * dim, shape.hidden),
        "o": (shape.hidden, shape.heads * dim),
        "gate_up": (2 * shape.intermediate, shape.hidden),
        "down": (shape.hidden, shape.intermediate),
    }
    if limits.bandwidth:
        yield Record.of("limits", "bandwidth", "GB/s", limits.bandwidth / 1e9)
    if limits.gemm_flops:
        yield Record.of("limits", "bf16 GEMM", "TFLOP/s", limits.gemm_flops / 1e12)
    for name, (n, k) in weights.items():
        for code in formats:
            layers = _layers(device, n * k * (2 if code == "bf16" else 0.5))
            size, times = bench.gemm(n, k, code, list(rows), layers, rounds)
            for count in rows:
                case = {"weight": f"{name} {n} x {k}", "format": code, "rows": count}
                yield from _records("gemm", case, times[count], size, 2.0 * count * n * k, limits)
    for bits in (16, 8, 4):
        for context in contexts:
            chunk = min(512, context)
            for sequences, fresh in dict.fromkeys([(1, 1), (batch, 1), (1, chunk)]):
                layers = _layers(device, 4 * sequences * context * shape.kv_heads * dim * bits / 16)
                kv_size, seconds = bench.attention(
                    shape.heads, shape.kv_heads, dim, bits, sequences, fresh, context, layers, rounds
                )
                case = {"KV bits": bits, "context": context, "sequences": sequences, "rows": fresh}
                seen = fresh * (context - (fresh - 1) / 2)  # positions, over the rows of a sequence
                operations = 4.0 * sequences * shape.heads * dim * seen
                yield from _records("attention", case, seconds, kv_size, operations, limits)


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
