"""The static benchmark: batches of equal length in this process, and how near they come to the device's limits.

Decoding is held against the time that reading the weights takes, and weights with the keys and values of the contexts;
prefill against the rate of a large GEMM.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console

from charonia import _engine
from charonia.api.engine import Engine
from charonia.api.results import Output, SamplingParams
from charonia.bench.limits import Limits, measure_limits
from charonia.bench.records import Record, print_records
from charonia.bench.targets import GREEDY
from charonia.engine_settings import Setting
from charonia.errors import InvalidRequestError

_WARMUP_TOKENS = 32
_TYPE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}


@dataclass(frozen=True)
class Report:
    """records: of every batch size and pair of lengths, which are their case; see _records().

    bandwidth in bytes per second, gemm_flops in operations per second; the better of a measurement before and one after
    the batches. kernel_report: which kernels the device's operations went to, a line each, after the batches;
    gemms_rejected: how many GEMMs cuBLASLt rejected, which own kernels took."""

    model: str
    weight_type: str
    device: str
    instruction_set: str
    threads: int
    weight_bytes_per_step: int
    bandwidth: float | None
    gemm_flops: float | None
    records: tuple[Record, ...]
    kernel_report: tuple[str, ...] = ()
    gemms_rejected: int = 0

    def about(self) -> dict[str, Any]:
        """All but the records."""
        return {name: value for name, value in vars(self).items() if name != "records"}

    def value(self, name: str, **case: int) -> float | None:
        """Of the first record with this name, and a case with these values; None where that was not measured."""
        return next((r.value for r in self.records if r.name == name and case.items() <= r.case.items()), None)


def run_static(
    model: str,
    batches: Sequence[int],
    prompt_lengths: Sequence[int],
    output_lengths: Sequence[int],
    *,
    runs: int,
    dtype: str,
    settings: dict[str, Setting],
    console: Console,
) -> Report:
    """Loads the model with room for every combination, and no prefix cache, and measures it."""
    _check(batches, prompt_lengths, output_lengths, runs)
    chosen: dict[str, Setting] = {
        "session_len": max(prompt_lengths) + max(output_lengths),
        "max_batch_size": max(batches),
        "enable_prefix_caching": False,
        **settings,
    }
    with Engine.from_pretrained(model, dtype=dtype, show_progress=True, **chosen) as engine:
        return measure_static(engine, batches, prompt_lengths, output_lengths, runs=runs, console=console)


def measure_static(
    engine: Engine,
    batches: Sequence[int],
    prompt_lengths: Sequence[int],
    output_lengths: Sequence[int],
    *,
    runs: int,
    console: Console,
) -> Report:
    """Random token ids, no end token. Every combination is run `runs` times after one short run to warm up.

    The engine must have room for it (session_len, max_batch_size), and no prefix cache, or prefill is not measured.
    """
    _check(batches, prompt_lengths, output_lengths, runs)
    info = engine.info
    limits = measure_limits(info.device, info.threads)
    measured = []
    for prompt in prompt_lengths:
        for output in output_lengths:
            for batch in batches:
                with console.status(f"batch {batch}, prompt {prompt}, output {output}"):
                    measured.append((batch, prompt, output, _measure(engine, batch, prompt, output, runs)))
    limits = limits.better(measure_limits(info.device, info.threads))
    return Report(
        info.model_name,
        info.weight_type,
        info.device,
        info.instruction_set,
        info.threads,
        info.weight_bytes_per_step,
        limits.bandwidth,
        limits.gemm_flops,
        tuple(record for case in measured for record in _records(info, limits, *case)),
        tuple(engine.kernel_report()),
        engine.stats().gemms_rejected,
    )


def _check(batches: Sequence[int], prompts: Sequence[int], outputs: Sequence[int], runs: int) -> None:
    if min((*batches, *prompts), default=0) < 1 or min(outputs, default=0) < 2 or runs < 1:
        raise InvalidRequestError("batch sizes, prompt lengths and runs must be at least 1, output lengths at least 2")


def _measure(engine: Engine, batch: int, prompt: int, output: int, runs: int) -> list[tuple[float, float]]:
    """Of every run the seconds to the last first token and from there to the end."""
    generator = np.random.default_rng(0)
    seconds = []
    for tokens in (min(output, _WARMUP_TOKENS), *[output] * runs):
        sampling = SamplingParams(max_tokens=tokens, ignore_eos=True, **GREEDY)
        prompts: list[list[int]] = generator.integers(3, engine.info.vocab_size, (batch, prompt)).tolist()
        seconds.append(_phases(engine.generate(prompts, sampling)))
    return seconds[1:]


def _phases(outputs: Sequence[Output]) -> tuple[float, float]:
    first = max(output.timings.first_token_ms for output in outputs) / 1e3
    return first, max(output.timings.total_ms for output in outputs) / 1e3 - first


def _records(
    info: _engine.EngineInfo, limits: Limits, batch: int, prompt: int, output: int, runs: Sequence[tuple[float, float]]
) -> list[Record]:
    """prefill: prompt tokens per second until the last sequence's first token. decode: output tokens per second after
    it. output: output tokens per second in all. weights: bytes of weights that the steps of decoding read per second,
    of the bandwidth measured in the same run; weights and KV: with the keys and values of contexts of mean length.
    GEMMs: operations per second of the layers' GEMMs with weights during prefill, of the rate measured in the same run;
    those of attention and of the output layer are not counted. No share without the measurement of its limit; none of
    GEMMs with quantised weights, whose number the bytes alone do not tell."""
    # The sequence that began last takes one step for each of its tokens after the first.
    steps = [(output - 1) / decode for _, decode in runs]
    weights = info.weight_bytes_per_step
    kv_token = info.kv_cache_bytes / (info.num_blocks * info.cache_block_seq_len)
    contexts = batch * (prompt + output / 2) * kv_token
    case = {"batch": batch, "prompt": prompt, "output": output}

    def record(name: str, unit: str, values: Sequence[float]) -> Record:
        return Record.of("static", name, unit, values, case=case)

    found = [
        record("prefill", "tokens/s", [batch * prompt / prefill for prefill, _ in runs]),
        record("decode", "tokens/s", [batch * rate for rate in steps]),
        record("output in all", "tokens/s", [batch * output / (prefill + decode) for prefill, decode in runs]),
    ]
    if limits.gemm_flops and info.weight_type in _TYPE_BYTES:
        # The output layer works on the last row of a prompt alone.
        layers = weights / _TYPE_BYTES[info.weight_type] - info.vocab_size * info.hidden_units
        operations = 2.0 * layers * batch * prompt
        shares = [100 * operations / prefill / limits.gemm_flops for prefill, _ in runs]
        found.append(record("GEMMs", "% of their rate", shares))
    if limits.bandwidth:
        for name, read in (("weights", weights), ("weights and KV", weights + contexts)):
            found.append(record(name, "% of the bandwidth", [100 * rate * read / limits.bandwidth for rate in steps]))
    return found


def print_report(console: Console, report: Report, *, verbose: bool = False) -> None:
    """verbose: with the kernel report."""
    what = f"{report.model}, {report.weight_type}, {report.instruction_set}"
    if report.device == "cpu":
        what += f", {report.threads} threads"
    what += f"; a step reads {report.weight_bytes_per_step / 1e6:.0f} MB of weights"
    if report.bandwidth:
        what += f", memory {'reads' if report.device == 'cpu' else 'moves'} {report.bandwidth / 1e9:.1f} GB/s"
    if report.gemm_flops:
        what += f", bf16 GEMMs run at {report.gemm_flops / 1e12:.0f} TFLOP/s"
    console.print(what, highlight=False, soft_wrap=True)
    if not report.bandwidth and report.device != "null":
        console.print("shares need PyTorch, which measures the device: pip install torch", highlight=False)
    print_records(console, report.records)
    if report.gemms_rejected:
        text = f"cuBLASLt rejected {report.gemms_rejected} GEMMs, which own kernels took"
        console.print(text if verbose else f"{text}; --verbose says which", highlight=False, soft_wrap=True)
    if verbose:
        for line in report.kernel_report or ("the CPU device has no kernels to choose from",):
            console.print(line, highlight=False, soft_wrap=True, markup=False)
