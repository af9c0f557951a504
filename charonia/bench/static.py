"""The static benchmark: batches of equal length in this process, compared with the device's limits.

Decoding is compared with the time to read the weights, and the weights with the keys and values of the contexts.
Prefill is compared with the rate of a large GEMM. Large batches need several steps of prefill, in which the sequences
that are ready decode. These tokens are not in the rate of decoding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console

from charonia import _engine
from charonia.api.engine import Engine
from charonia.api.results import SamplingParams
from charonia.bench.limits import Limits, measure_limits
from charonia.bench.records import Record, print_records, report_progress
from charonia.bench.targets import GREEDY, clock
from charonia.engine_settings import Setting
from charonia.errors import InvalidRequestError

_WARMUP_TOKENS = 32
# The queue takes all requests of a batch, and their chunks say when tokens appear.
ALL_AT_ONCE: dict[str, Setting] = {"max_queue_size": 1 << 20, "max_queue_tokens": 0, "stream_interval_per_stream_ms": 0}
_TYPE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}


@dataclass(frozen=True)
class Report:
    """bandwidth in bytes per second, gemm_flops in operations per second: the better of two measurements, before and
    after the batches. records: see _records(). kernel_report: the kernels that the device chose, one in a line.
    gemms_rejected: the number of GEMMs that built-in kernels computed although cuBLASLt was chosen."""

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
        """Return everything except the records."""
        return {name: value for name, value in vars(self).items() if name != "records"}


def run_static(
    model: str,
    cases: Sequence[tuple[int, int, int]],
    *,
    runs: int,
    dtype: str,
    settings: dict[str, Setting],
    console: Console,
) -> Iterator[Report]:
    """Load the model, without a prefix cache, and measure every case `runs` times after a short warm-up. A case is a
    batch size, and the tokens of its prompts and outputs. Prompts are random token ids, and no token ends a response.
    Yields a report after each case, and at the end once more, with the better of both measurements of the limits."""
    if not cases or runs < 1 or any(min(batch, prompt) < 1 or output < 2 for batch, prompt, output in cases):
        raise InvalidRequestError("batch sizes, prompt lengths and runs must be at least 1, output lengths at least 2")
    chosen: dict[str, Setting] = {
        "session_len": max(prompt + output for _, prompt, output in cases),
        "max_batch_size": max(batch for batch, _, _ in cases),
        "cache_max_entry_count": 0.8,  # the default on a CPU holds less than a full batch
        "enable_prefix_caching": False,
        **ALL_AT_ONCE,
        **settings,
    }
    with Engine.from_pretrained(model, dtype=dtype, show_progress=True, **chosen) as engine:
        info = engine.info
        limits = measure_limits(info.device, info.threads)
        measured = []
        for case in cases:
            text = "batch {}, prompt {}, output {}".format(*case)
            with console.status(text):
                measured.append((*case, _measure(engine, *case, runs, text)))
            yield _report(engine, limits, measured)
        yield _report(engine, limits.better(measure_limits(info.device, info.threads)), measured)


def _report(engine: Engine, limits: Limits, measured: Sequence[tuple[int, int, int, Sequence[Phases]]]) -> Report:
    info = engine.info
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


def _measure(engine: Engine, batch: int, prompt: int, output: int, runs: int, text: str) -> list[Phases]:
    """text: names the case."""
    generator = np.random.default_rng(0)
    found = []
    for tokens in (min(output, _WARMUP_TOKENS), *[output] * runs):
        sampling = SamplingParams(max_tokens=tokens, ignore_eos=True, **GREEDY)
        prompts: list[list[int]] = generator.integers(3, engine.info.vocab_size, (batch, prompt)).tolist()
        report_progress(f"{text}: {tokens} tokens each")
        found.append(phases(run_batch(engine, prompts, sampling)))
    return found[1:]


@dataclass(frozen=True)
class Phases:
    """Seconds. prefill: until all sequences have their first token. decode: for all output tokens after the first ones,
    at the rate that they have while all sequences decode. total: until the last sequence has ended."""

    prefill: float
    decode: float
    total: float


@dataclass(frozen=True)
class Arrivals:
    """The number of tokens of a sequence at several times, in milliseconds. At the first time it has one token."""

    times: Sequence[float]
    tokens: Sequence[int]

    def at(self, ms: float) -> float:
        """The number of tokens at a time, interpolated: a chunk may have several tokens."""
        return float(np.interp(ms, self.times, self.tokens))


def run_batch(
    engine: Engine, prompts: Sequence[list[int]], sampling: SamplingParams, lora: str | Sequence[str] = ""
) -> list[Arrivals]:
    """Run all prompts together. lora: one adapter for all prompts, or one for each."""
    loras = [lora] * len(prompts) if isinstance(lora, str) else lora
    streams, submitted = [], []
    for prompt, name in zip(prompts, loras, strict=True):
        submitted.append(1e3 * clock())
        streams.append(engine.stream(prompt, sampling, lora=name))
    found = []
    for stream, at in zip(streams, submitted, strict=True):
        chunks = list(stream)
        times = [chunks[0].timings.first_token_ms, *(chunk.timings.total_ms for chunk in chunks)]
        tokens = [1, *(chunk.num_output_tokens for chunk in chunks)]
        found.append(Arrivals([at - submitted[0] + ms for ms in times], tokens))
    return found


def phases(sequences: Sequence[Arrivals]) -> Phases:
    """The rate of decoding is that between the last sequence's first token and the first end of a sequence. If a
    sequence ends before another has its first token, it is the rate from then to the last end, of the sequences that
    are left."""
    begins = max(one.times[0] for one in sequences)
    ends = [one.times[-1] for one in sequences]
    until = min(ends) if min(ends) > begins else max(ends)
    counted = sum(one.at(until) - one.at(begins) for one in sequences)
    later = sum(one.tokens[-1] - 1 for one in sequences)
    return Phases(begins / 1e3, (until - begins) / 1e3 * later / counted, max(ends) / 1e3)


def _records(
    info: _engine.EngineInfo, limits: Limits, batch: int, prompt: int, output: int, runs: Sequence[Phases]
) -> list[Record]:
    """prefill: prompt tokens per second until the last sequence's first token. decode: output tokens per second while
    all sequences decode (phases()). output in all: output tokens per second over the whole run. weights: bytes of
    weights that decode steps read, as a share of the bandwidth; weights and KV: with keys and values of contexts of
    mean length. GEMMs: the rate of the layers' GEMMs during prefill, as a share of a large GEMM's rate; unknown for
    quantised weights."""
    steps = [(output - 1) / run.decode for run in runs]
    weights = info.weight_bytes_per_step
    kv_token = info.kv_cache_bytes / (info.num_blocks * info.cache_block_seq_len)
    contexts = batch * (prompt + output / 2) * kv_token
    case = {"batch": batch, "prompt": prompt, "output": output}

    def record(name: str, unit: str, values: Sequence[float]) -> Record:
        return Record.of("static", name, unit, values, case=case)

    found = [
        record("prefill", "tokens/s", [batch * prompt / run.prefill for run in runs]),
        record("decode", "tokens/s", [batch * rate for rate in steps]),
        record("output in all", "tokens/s", [batch * output / run.total for run in runs]),
    ]
    if limits.gemm_flops and info.weight_type in _TYPE_BYTES:
        # For a prompt, the output layer computes only the last row.
        layers = weights / _TYPE_BYTES[info.weight_type] - info.vocab_size * info.hidden_units
        operations = 2.0 * layers * batch * prompt
        shares = [100 * operations / run.prefill / limits.gemm_flops for run in runs]
        found.append(record("GEMMs", "% of their rate", shares))
    if limits.bandwidth:
        for name, read in (("weights", weights), ("weights and KV", weights + contexts)):
            found.append(record(name, "% of the bandwidth", [100 * rate * read / limits.bandwidth for rate in steps]))
    return found


def print_report(console: Console, report: Report, *, verbose: bool = False) -> None:
    """verbose: also print the kernel report."""
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
        text = f"built-in kernels computed {report.gemms_rejected} GEMMs although cuBLASLt was chosen"
        console.print(text if verbose else f"{text}; --verbose shows which", highlight=False, soft_wrap=True)
    if verbose:
        for line in report.kernel_report or ("the CPU device has no kernels to choose from",):
            console.print(line, highlight=False, soft_wrap=True, markup=False)
