"""Measures a GPU with PyTorch, for gpu_check.py. Arguments: `limits` or `gap MODEL`, and `--json FILE`."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from torch.utils.benchmark import Timer

from charonia import Engine, SamplingParams
from charonia.bench import records
from charonia.bench.limits import busy_and_gaps
from charonia.bench.machine import gpu_of

ON_GPU = torch.cuda.is_available()  # otherwise a rehearsal
DEVICE = "cuda" if ON_GPU else "cpu"
BENCHMARK = sys.argv[1]


def record(name: str, unit: str, value: float, what: str) -> records.Record:
    return records.Record.of(BENCHMARK, name, unit, value, case={"what": what})


def limits() -> Iterator[records.Record]:
    """The read rate of memory, and GEMMs in a burst and after five seconds, with the clock."""
    side = 8192 if ON_GPU else 64
    data = torch.ones((4 << 30 if ON_GPU else 1 << 20) // 4, device=DEVICE)
    a, b = torch.randn((2, side, side), device=DEVICE).to(torch.bfloat16)
    one = torch.ones((), device=DEVICE)
    a_fp8, b_fp8 = (x.to(torch.float8_e4m3fn) for x in (a, b))
    a_int8, b_int8 = ((40 * x).clamp(-127, 127).to(torch.int8) for x in (a, b))
    calls = {
        "bf16": partial(torch.mm, a, b.t()),
        "fp8": partial(torch._scaled_mm, a_fp8, b_fp8.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16),
        "s8": partial(torch._int_mm, a_int8, b_int8.t()),
    }

    def seconds(call: partial[torch.Tensor]) -> float:
        return float(Timer("call()", globals={"call": call}).timeit(5).mean)  # waits for the GPU

    yield record("read", "TB/s", data.nbytes / seconds(partial(torch.sum, data)) / 1e12, "sum of 4 GB")
    for kind, call in calls.items():
        for when, warm_s in (("burst", 0.0), ("after 5 s", 5.0 if ON_GPU else 0.0)):
            ends_at = time.monotonic() + warm_s
            while time.monotonic() < ends_at:
                call()
                torch.cuda.synchronize()
            yield record(f"{kind} GEMM", "T operations/s", 2 * side**3 / seconds(call) / 1e12, when)
            if mhz := gpu_of("clocks.sm").split():
                yield record("SM clock", "MHz", float(mhz[0]), f"{kind}, {when}")


def gap(model: str) -> Iterator[records.Record]:
    """A prefill step of 2048 rows: its time, the sum of its kernels, and the largest gaps between them."""
    rows = 2048 if ON_GPU else 64
    activity, wanted = (ProfilerActivity.CUDA, DeviceType.CUDA) if ON_GPU else (ProfilerActivity.CPU, DeviceType.CPU)
    settings: dict[str, Any] = {"token_budget": rows, "session_len": rows + 64, "enable_prefix_caching": False}
    with Engine.from_pretrained(model, max_batch_size=1, **settings) as engine:

        def step(seed: int) -> float:
            prompt = [3 + (seed + i * 7919) % (engine.info.vocab_size - 3) for i in range(rows)]
            [output] = engine.generate([prompt], SamplingParams(max_tokens=1, ignore_eos=True, temperature=0.0))
            return float(output.timings.first_token_ms - output.timings.queue_ms)

        yield record("step", "ms", sorted(step(seed) for seed in range(7))[3], "without the profiler")
        with profile(activities=[activity]) as profiler:
            yield record("step", "ms", step(7), "with the profiler")
            torch.cuda.synchronize() if ON_GPU else torch.ones(8).sum()  # the rehearsal's only operations
    kernels = [(e.time_range.start, e.time_range.end, e.name) for e in profiler.events() if e.device_type == wanted]
    busy, gaps = busy_and_gaps(kernels)
    span = max(end for _, end, _ in kernels) - min(begin for begin, _, _ in kernels)
    yield record("first to last kernel", "ms", span / 1e3, f"{len(kernels)} kernels")
    yield record("kernels", "ms", busy / 1e3, "time in which a kernel ran")
    for rank, (length, before, after) in enumerate(gaps[:10]):
        yield record("gap", "us", length, f"{1 + rank}: {before[:60]} -> {after[:60]}")


if __name__ == "__main__":
    list(records.keep(Path(sys.argv[-1]), {}, limits() if BENCHMARK == "limits" else gap(sys.argv[2])))
