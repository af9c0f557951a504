"""The static benchmark: batches of equal length in this process, and how near they come to the device's limits.

Decoding is held against the time that reading the weights takes, and weights with the keys and values of the contexts;
prefill against the rate of a large GEMM.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from charonia import _engine
from charonia.api.engine import Engine, Setting
from charonia.api.results import Output, SamplingParams
from charonia.bench.limits import Limits, measure_limits
from charonia.errors import InvalidRequestError

_WARMUP_TOKENS = 32
_TYPE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}


@dataclass(frozen=True)
class Row:
    """One batch size and pair of lengths; medians over the runs.

    prefill: prompt tokens per second until the last sequence's first token. decode: output tokens per second after it.
    bandwidth_share: bytes of weights that the steps read per second, of the bandwidth measured in the same run;
    bandwidth_share_with_kv: with the keys and values of contexts of mean length. gemm_share: operations per second of
    the layers' GEMMs with weights during prefill, of the rate measured in the same run; those of attention and of
    the output layer are not counted. None: without that measurement.
    """

    batch: int
    prompt_tokens: int
    output_tokens: int
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    total_output_tokens_per_s: float
    bandwidth_share: float | None
    bandwidth_share_with_kv: float | None
    gemm_share: float | None


@dataclass(frozen=True)
class Report:
    """bandwidth in bytes per second, gemm_flops in operations per second; the better of a measurement before and one
    after the batches. kernel_report: which kernels the device's operations went to, a line each, after the batches;
    gemms_rejected: how many GEMMs cuBLASLt rejected, which own kernels took."""

    model: str
    weight_type: str
    device: str
    instruction_set: str
    threads: int
    weight_bytes_per_step: int
    bandwidth: float | None
    gemm_flops: float | None
    rows: tuple[Row, ...]
    kernel_report: tuple[str, ...] = ()
    gemms_rejected: int = 0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


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
        tuple(_row(info, limits, *case) for case in measured),
        tuple(engine.kernel_report()),
        engine.stats().gemms_rejected,
    )


def _check(batches: Sequence[int], prompts: Sequence[int], outputs: Sequence[int], runs: int) -> None:
    if min((*batches, *prompts), default=0) < 1 or min(outputs, default=0) < 2 or runs < 1:
        raise InvalidRequestError("batch sizes, prompt lengths and runs must be at least 1, output lengths at least 2")


def _measure(engine: Engine, batch: int, prompt: int, output: int, runs: int) -> tuple[float, float]:
    """Medians of the seconds to the last first token and from there to the end."""
    generator = np.random.default_rng(0)
    seconds = []
    for tokens in (min(output, _WARMUP_TOKENS), *[output] * runs):
        sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        prompts: list[list[int]] = generator.integers(3, engine.info.vocab_size, (batch, prompt)).tolist()
        seconds.append(_phases(engine.generate(prompts, sampling)))
    prefill, decode = np.median(np.array(seconds[1:]), axis=0)
    return float(prefill), float(decode)


def _phases(outputs: Sequence[Output]) -> tuple[float, float]:
    first = max(output.timings.first_token_ms for output in outputs) / 1e3
    return first, max(output.timings.total_ms for output in outputs) / 1e3 - first


def _row(
    info: _engine.EngineInfo, limits: Limits, batch: int, prompt: int, output: int, seconds: tuple[float, float]
) -> Row:
    prefill, decode = seconds
    # The sequence that began last takes one step for each of its tokens after the first.
    steps_per_s = (output - 1) / decode
    weights = info.weight_bytes_per_step
    kv_token = info.kv_cache_bytes / (info.num_blocks * info.cache_block_seq_len)
    contexts = batch * (prompt + output / 2) * kv_token
    # The output layer works on the last row of a prompt alone.
    layers = weights / _TYPE_BYTES[info.weight_type] - info.vocab_size * info.hidden_units
    prefill_flops = 2.0 * layers * batch * prompt / prefill
    bandwidth, gemm = limits.bandwidth, limits.gemm_flops
    return Row(
        batch=batch,
        prompt_tokens=prompt,
        output_tokens=output,
        prefill_tokens_per_s=batch * prompt / prefill,
        decode_tokens_per_s=batch * steps_per_s,
        total_output_tokens_per_s=batch * output / (prefill + decode),
        bandwidth_share=steps_per_s * weights / bandwidth if bandwidth else None,
        bandwidth_share_with_kv=steps_per_s * (weights + contexts) / bandwidth if bandwidth else None,
        gemm_share=prefill_flops / gemm if gemm else None,
    )


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
    if not report.bandwidth:
        console.print("shares need PyTorch, which measures the device: pip install torch", highlight=False)
    table = Table("batch", "prompt", "output", title="Static; tokens/s, and shares of what was measured")
    for heading in ("prefill", "of GEMMs", "decode", "output in all", "weights", "weights and KV"):
        table.add_column(heading, justify="right")
    for row in report.rows:
        table.add_row(
            str(row.batch),
            str(row.prompt_tokens),
            str(row.output_tokens),
            f"{row.prefill_tokens_per_s:.1f}",
            _percent(row.gemm_share),
            f"{row.decode_tokens_per_s:.1f}",
            f"{row.total_output_tokens_per_s:.1f}",
            _percent(row.bandwidth_share),
            _percent(row.bandwidth_share_with_kv),
        )
    console.print(table)
    if report.gemms_rejected:
        text = f"cuBLASLt rejected {report.gemms_rejected} GEMMs, which own kernels took"
        console.print(text if verbose else f"{text}; --verbose says which", highlight=False, soft_wrap=True)
    if verbose:
        for line in report.kernel_report or ("the CPU device has no kernels to choose from",):
            console.print(line, highlight=False, soft_wrap=True, markup=False)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f} %"
