"""The limits of the device, measured in the same run as the figures: bytes read per second, the rate of GEMMs, and the
time between kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from charonia import _engine

_COPY_BYTES = 2 << 30  # more than any cache holds
_MATRIX = 8192


@dataclass(frozen=True)
class Limits:
    """bandwidth: bytes per second; on the CPU of reads, on a GPU of a copy, with bytes read and written counted.
    gemm_flops: operations per second of a bf16 GEMM of two random 8192 x 8192 matrices. None: not measured."""

    bandwidth: float | None
    gemm_flops: float | None

    def better(self, other: Limits) -> Limits:
        """Return the larger value of each measurement, because other load on the machine can only lower them."""
        return Limits(
            max(filter(None, (self.bandwidth, other.bandwidth)), default=None),
            max(filter(None, (self.gemm_flops, other.gemm_flops)), default=None),
        )


def measure_limits(device: str, threads: int = 0) -> Limits:
    """device: cpu, cuda or null, as in EngineInfo. PyTorch measures a GPU. Without PyTorch, and for the device null,
    there are no limits."""
    if device == "cpu":
        return Limits(_engine.measure_read_bandwidth(threads), None)
    try:
        import torch
    except ImportError:
        return Limits(None, None)
    if device == "null" or not torch.cuda.is_available():
        return Limits(None, None)
    limits = Limits(_copy_bandwidth(torch), _gemm_flops(torch))
    torch.cuda.empty_cache()  # the engine needs the memory
    return limits


def seconds_of(torch: Any, repeats: int, run: Callable[[], Any]) -> list[float]:
    """Measure the time of `repeats` calls on the GPU, after three calls for warm-up. Returns sorted seconds."""
    for _ in range(3):
        run()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for before, after in events:
        before.record()
        run()
        after.record()
    torch.cuda.synchronize()
    return sorted(before.elapsed_time(after) / 1e3 for before, after in events)


def _copy_bandwidth(torch: Any) -> float:
    free, _ = torch.cuda.mem_get_info()
    size = int(min(_COPY_BYTES, free // 4)) // 4096 * 4096
    source = torch.randint(0, 256, (size,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return float(2 * size / seconds_of(torch, 21, lambda: target.copy_(source))[10])


def _gemm_flops(torch: Any) -> float:
    """Uses random numbers, because a GEMM of zeros draws less power and runs faster."""
    a, b = (torch.randn(_MATRIX, _MATRIX, device="cuda").to(torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    return float(2.0 * _MATRIX**3 / seconds_of(torch, 11, lambda: torch.mm(a, b, out=out))[5])


def busy_and_gaps(kernels: Sequence[tuple[float, float, str]]) -> tuple[float, list[tuple[float, str, str]]]:
    """kernels: (begin, end, name). Return the time with a kernel, and the gaps, largest first, with neighbours."""
    busy, gaps = 0.0, []
    last_end, last_name = None, ""
    for begin, end, name in sorted(kernels):
        if last_end is not None and begin > last_end:
            gaps.append((begin - last_end, last_name, name))
        busy += max(0.0, end - (begin if last_end is None else max(begin, last_end)))
        if last_end is None or end > last_end:
            last_end, last_name = end, name
    return busy, sorted(gaps, reverse=True)
