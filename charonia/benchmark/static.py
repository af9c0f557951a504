"""The static benchmark: batches of equal length in this process, and how near decoding comes to the memory's speed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from charonia import _engine
from charonia.engine import Engine, Setting
from charonia.errors import InvalidRequestError
from charonia.results import Output, SamplingParams


@dataclass(frozen=True)
class Row:
    """One batch size and pair of lengths; medians over the runs.

    prefill: prompt tokens per second until the last sequence's first token. decode: output tokens per second after it.
    bandwidth_share: bytes of weights that the steps read per second, of the bandwidth measured in the same run.
    """

    batch: int
    prompt_tokens: int
    output_tokens: int
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    total_output_tokens_per_s: float
    bandwidth_share: float


@dataclass(frozen=True)
class Report:
    """bandwidth in bytes per second, the better of a measurement before and one after the batches."""

    model: str
    weight_type: str
    instruction_set: str
    threads: int
    weight_bytes_per_step: int
    read_bandwidth: float
    rows: tuple[Row, ...]

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
    """Random token ids, no end token, no prefix cache. Every combination is run `runs` times after one warm-up."""
    if min((*batches, *prompt_lengths), default=0) < 1 or min(output_lengths, default=0) < 2 or runs < 1:
        raise InvalidRequestError("batch sizes, prompt lengths and runs must be at least 1, output lengths at least 2")
    longest = max(prompt_lengths) + max(output_lengths)
    chosen: dict[str, Setting] = {
        "session_len": longest,
        "max_batch_size": max(batches),
        "enable_prefix_caching": False,
        **settings,
    }
    with Engine.from_pretrained(model, dtype=dtype, show_progress=True, **chosen) as engine:
        info = engine.info
        before = _engine.measure_read_bandwidth(info.threads)
        measured = []
        for prompt in prompt_lengths:
            for output in output_lengths:
                for batch in batches:
                    with console.status(f"batch {batch}, prompt {prompt}, output {output}"):
                        measured.append((batch, prompt, output, _measure(engine, batch, prompt, output, runs)))
        bandwidth = max(before, _engine.measure_read_bandwidth(info.threads))
        rows = tuple(
            _row(batch, prompt, output, seconds, info.weight_bytes_per_step / bandwidth)
            for batch, prompt, output, seconds in measured
        )
        return Report(
            info.model_name,
            info.weight_type,
            info.instruction_set,
            info.threads,
            info.weight_bytes_per_step,
            bandwidth,
            rows,
        )


def _measure(engine: Engine, batch: int, prompt: int, output: int, runs: int) -> tuple[float, float]:
    """Medians of the seconds to the last first token and from there to the end."""
    generator = np.random.default_rng(0)
    sampling = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
    seconds = []
    for _ in range(runs + 1):
        prompts: list[list[int]] = generator.integers(3, engine.info.vocab_size, (batch, prompt)).tolist()
        seconds.append(_phases(engine.generate(prompts, sampling)))
    prefill, decode = np.median(np.array(seconds[1:]), axis=0)
    return float(prefill), float(decode)


def _phases(outputs: Sequence[Output]) -> tuple[float, float]:
    first = max(output.timings.first_token_ms for output in outputs) / 1e3
    return first, max(output.timings.total_ms for output in outputs) / 1e3 - first


def _row(batch: int, prompt: int, output: int, seconds: tuple[float, float], step_seconds_at_limit: float) -> Row:
    prefill, decode = seconds
    # The sequence that began last takes one step for each of its tokens after the first.
    steps_per_s = (output - 1) / decode
    return Row(
        batch=batch,
        prompt_tokens=prompt,
        output_tokens=output,
        prefill_tokens_per_s=batch * prompt / prefill,
        decode_tokens_per_s=batch * steps_per_s,
        total_output_tokens_per_s=batch * output / (prefill + decode),
        bandwidth_share=steps_per_s * step_seconds_at_limit,
    )


def print_report(console: Console, report: Report) -> None:
    console.print(
        f"{report.model}, {report.weight_type}, {report.instruction_set}, {report.threads} threads; a step reads "
        f"{report.weight_bytes_per_step / 1e6:.0f} MB of weights, memory reads {report.read_bandwidth / 1e9:.1f} GB/s",
        highlight=False,
        soft_wrap=True,
    )
    table = Table("batch", "prompt", "output", title="Static; tokens/s")
    for heading in ("prefill", "decode", "output in all", "share of read bandwidth"):
        table.add_column(heading, justify="right")
    for row in report.rows:
        table.add_row(
            str(row.batch),
            str(row.prompt_tokens),
            str(row.output_tokens),
            f"{row.prefill_tokens_per_s:.1f}",
            f"{row.decode_tokens_per_s:.1f}",
            f"{row.total_output_tokens_per_s:.1f}",
            f"{100 * row.bandwidth_share:.0f} %",
        )
    console.print(table)
