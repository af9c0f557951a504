"""What the device can do at best, measured in the same run: bytes moved per second and GEMMs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from charonia import _engine

_COPY_BYTES = 2 << 30
_COPIES = 20
_MATRIX = 8192
_GEMMS = 10


@dataclass(frozen=True)
class Limits:
    """bandwidth: bytes per second, of reads on the CPU; of a copy on a GPU, where bytes read and written are counted.

    gemm_flops: operations per second of a GEMM of two random 8192 x 8192 matrices in bf16. None: not measured.
    """

    bandwidth: float | None
    gemm_flops: float | None

    def better(self, other: Limits) -> Limits:
        """Of two measurements: whatever else the machine did can only have made one worse."""
        return Limits(_larger(self.bandwidth, other.bandwidth), _larger(self.gemm_flops, other.gemm_flops))


def _larger(one: float | None, other: float | None) -> float | None:
    known = [value for value in (one, other) if value is not None]
    return max(known, default=None)


def measure_limits(device: str, threads: int = 0) -> Limits:
    """device: cpu | cuda | null, as EngineInfo says it. threads: of the CPU's measurement.

    A GPU is measured with PyTorch; without it nothing is known and nothing fails.
    """
    if device == "cpu":
        return Limits(_engine.measure_read_bandwidth(threads), None)
    if device == "null":  # reads and computes nothing
        return Limits(None, None)
    try:
        import torch
    except ImportError:
        return Limits(None, None)
    limits = Limits(_copy_bandwidth(torch), _gemm_flops(torch))
    # What PyTorch keeps for later is the engine's.
    torch.cuda.empty_cache()
    return limits


def _seconds(torch: Any, repeats: int, run: Callable[[], Any]) -> float:
    """The median of `repeats` calls, timed on the device, after three that are not counted."""
    for _ in range(3):
        run()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for before, after in events:
        before.record()
        run()
        after.record()
    torch.cuda.synchronize()
    times = sorted(before.elapsed_time(after) for before, after in events)
    return float(times[len(times) // 2]) / 1e3


def _copy_bandwidth(torch: Any) -> float:
    """Of two buffers of 2 GB, far more than any cache holds, or of what is free."""
    free, _ = torch.cuda.mem_get_info()
    size = int(min(_COPY_BYTES, free // 4)) // 4096 * 4096
    source = torch.randint(0, 256, (size,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    seconds = _seconds(torch, _COPIES, lambda: target.copy_(source))
    return 2 * size / seconds


def _gemm_flops(torch: Any) -> float:
    """Random numbers: a GEMM of zeros draws less power and runs faster."""
    a, b = (torch.randn(_MATRIX, _MATRIX, device="cuda").to(torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    seconds = _seconds(torch, _GEMMS, lambda: torch.mm(a, b, out=out))
    return 2.0 * _MATRIX**3 / seconds
