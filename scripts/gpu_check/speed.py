"""Bars 1 to 4, 6 and 7: random weights of real shapes, measured with `charonia benchmark`'s own functions."""

from __future__ import annotations

import io
import shutil
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gpu_check.context import Context
from gpu_check.records import TABLE_RATE, Failure, Outcome, bar, skipped
from gpu_check.worker import Session

if TYPE_CHECKING:
    from charonia import Engine
    from charonia.bench.random_model import Shape
    from charonia.bench.records import Record
    from charonia.bench.static import Report

_SHAPES = {"7b": "llama2-7b", "8b": "llama3-8b"}
_TABLE = (1, 16, 32, 64)
_SCHEMES = ("", "w4a16", "w8a16", "w8a8", "fp8")  # of weights, 16 bits first


def shape_of(context: Context, size: str) -> Shape:
    """A rehearsal's has the same proportions and the tiniest sizes."""
    from charonia.bench.random_model import SHAPES, Shape

    shape = SHAPES[_SHAPES[size]]
    if context.rehearse:
        return Shape(2, 64, 4, 4 * shape.kv_heads // shape.heads, 160, 320, 4096, shape.rope_theta)
    return shape


def model_of(context: Context, size: str, scheme: str = "") -> str:
    """The model's folder; written when it is not there yet. scheme: how its weights are quantised; empty: not."""
    from charonia.bench.random_model import write_random_model

    shape = shape_of(context, size)
    bytes_needed = 2 * (
        2 * shape.vocab * shape.hidden + shape.layers * shape.hidden * (4 * shape.hidden + 3 * shape.intermediate)
    )
    name = f"{_SHAPES[size]}-{scheme}" if scheme else _SHAPES[size]
    folder = (context.work / "models" if context.rehearse else context.room_for(bytes_needed)) / name
    if not (folder / "complete").is_file():
        shutil.rmtree(folder, ignore_errors=True)
        write_random_model(folder, shape, scheme=scheme, quick=True)
        (folder / "complete").touch()
    return str(folder)


def engine_of(context: Context, session: Session, size: str, scheme: str = "", **more: Any) -> Engine:
    """One engine for all bars of a model that want no setting more, so that it is loaded once."""
    sizes: dict[str, Any] = {"max_batch_size": 256, "token_budget": 2048}
    if context.rehearse:
        sizes = {"max_batch_size": 16, "token_budget": 256, "cache_max_entry_count": 512, "threads": 2}
    settings = {
        "session_len": 4096,
        "max_queue_size": 8192,
        "enable_prefix_caching": False,
        "device": context.device,
        **sizes,
        **context.settings,
        **more,
    }
    engine: Engine = session.engine(model_of(context, size, scheme), settings)
    return engine


def _number(bar: str, size: str) -> str:
    return f"6.{bar}" if size == "8b" else bar


def _static(
    context: Context, session: Session, size: str, batches: tuple[int, ...], prompt: int, output: int, runs: int
) -> tuple[Report, dict[str, Any]]:
    """charonia benchmark static's report, and what else the engine is."""
    from rich.console import Console

    from charonia.bench.static import measure_static, print_report

    engine = engine_of(context, session, size)
    if context.rehearse:
        batches, prompt, output = tuple(min(batch, 4) for batch in batches), min(prompt, 32), min(output, 8)
    report = measure_static(engine, batches, [prompt], [output], runs=runs, console=Console(file=io.StringIO()))
    print_report(Console(width=140), report)
    about = {**report.about(), "num_blocks": engine.info.num_blocks, "warnings": list(engine.info.warnings)}
    return report, about


def bench1(context: Context, session: Session, size: str) -> Outcome:
    report, about = _static(context, session, size, (1,), 1, 512, 3)
    summary, share = f"{report.value('decode'):.1f} tokens/s", report.value("weights")
    if share is None or report.bandwidth is None:
        told = f"{summary}; the bandwidth was not measured: PyTorch is missing"
        return Outcome("failed", told, about, list(report.records))
    share_of = bar(
        _number("1", size), f"{report.model}, batch 1, 1 in, 512 out: share of the bandwidth", share, "%", 80
    )
    told = f"{summary}, {share:.1f} % of {report.bandwidth / 1e9:.0f} GB/s"
    return Outcome("passed", told, about, [*report.records, share_of])


def bench2(context: Context, session: Session, size: str) -> Outcome:
    found: list[Record] = []
    outcome = skipped("no batch was measured")
    for batch in _TABLE:
        report, about = _static(context, session, size, (batch,), 1, 2048, 1)
        found += report.records
        rates = [record for record in found if record.name == TABLE_RATE]
        bars = [
            bar(
                _number("2", size),
                f"{report.model}, batch {rate.case['batch']}, {rate.case['prompt']} in, {rate.case['output']} out",
                rate.value,
                "tokens/s",
            )
            for rate in rates
        ]
        told = ", ".join(f"{rate.value:.0f}" for rate in rates)
        outcome = Outcome("passed", f"{told} tokens/s", about, [*found, *bars])
        session.tell(outcome)
    return outcome


def bench3(context: Context, session: Session, size: str) -> Outcome:
    report, about = _static(context, session, size, (8,), 2048, 2, 3)
    summary, share = f"{report.value('prefill'):.0f} prompt tokens/s", report.value("GEMMs")
    if share is None or report.gemm_flops is None:
        # On the CPU nothing measures GEMMs, and the rehearsal ends here.
        status = "passed" if context.rehearse else "failed"
        return Outcome(status, f"{summary}; GEMMs were not measured", about, list(report.records))
    what = f"{report.model}, prefill of 8 x 2048 tokens: share of a GEMM's rate"
    told = f"{summary}, {share:.1f} % of {report.gemm_flops / 1e12:.0f} TFLOP/s"
    return Outcome("passed", told, about, [*report.records, bar(_number("3", size), what, share, "%", 55)])


def bench7(context: Context, session: Session, size: str) -> Outcome:
    """Decode steps over long contexts less those over none: what reading k and v takes, by how they are kept."""
    from rich.console import Console

    from charonia.bench.static import measure_static

    batch, prompt, output, runs = (2, 24, 8, 1) if context.rehearse else (16, 3072, 64, 2)
    bars, rows, told = [], {}, []
    for policy in (0, 8, 4):
        engine = engine_of(context, session, size, quant_policy=policy)
        info = engine.info
        kv_token = info.kv_cache_bytes / (info.num_blocks * info.cache_block_seq_len)
        report = measure_static(engine, [batch], [1, prompt], [output], runs=runs, console=Console(file=io.StringIO()))
        short, long = (report.value("decode", prompt=length) or 0.0 for length in (1, prompt))
        step_s = [batch / rate for rate in (short, long)]
        read = batch * (prompt - 1) * kv_token
        attention_s = step_s[1] - step_s[0]
        name = f"{policy} bits" if policy else "16 bits"
        rows[name] = {
            "kv_bytes_per_token": kv_token,
            "step_ms": {"short": step_s[0] * 1e3, "long": step_s[1] * 1e3},
            "kv_bytes_per_s": read / attention_s if attention_s > 0 else None,
            "bandwidth": report.bandwidth,
        }
        what = f"{info.model_name}, batch {batch}, {prompt} in: decode with KV in {name}"
        bars.append(bar(_number("7", size), what, long, "tokens/s"))
        if attention_s > 0:
            what = f"{info.model_name}, batch {batch}, {prompt} in: KV in {name} read"
            bars.append(bar(_number("7", size), what, read / attention_s / 1e9, "GB/s"))
        told.append(f"{name}: {long:.0f} tokens/s")
        session.tell(Outcome("passed", ", ".join(told), {"runs": rows}, bars))
    return Outcome("passed", ", ".join(told), {"runs": rows}, bars)


def bench8(context: Context, session: Session, size: str) -> Outcome:
    """Decode at batch 1 and prefill by the weights' scheme, beside those of 16 bits."""
    from rich.console import Console

    from charonia.bench.static import measure_static

    batch, prompt, output, runs = (2, 24, 8, 1) if context.rehearse else (4, 2048, 256, 2)
    asked = {("w4a16", "decode"): 2.8, ("fp8", "prefill"): 1.5}
    bars: list[Record] = []
    rows: dict[str, dict[str, float]] = {}
    told = []
    for scheme in _SCHEMES:
        engine = engine_of(context, session, size, scheme)
        found = {}
        for name, sizes in (("decode", (1, 1, output)), ("prefill", (batch, prompt, 2))):
            report = measure_static(
                engine, [sizes[0]], [sizes[1]], [sizes[2]], runs=runs, console=Console(file=io.StringIO())
            )
            measured = report.value(name)
            if not measured:
                return Outcome("failed", f"{scheme or '16 bits'}: {name} was not measured", {"runs": rows}, bars)
            found[name] = measured
            what = f"{engine.info.model_name}: {name}, tokens/s"
            bars.append(bar("8", what, found[name], "tokens/s"))
            if scheme:
                ratio = f"{scheme}: {name} against 16 bits"
                bars.append(bar("8", ratio, found[name] / rows[""][name], "x", asked.get((scheme, name))))
        rows[scheme] = found
        told.append(f"{scheme or '16 bits'}: {found['decode']:.0f} and {found['prefill']:.0f}")
        session.tell(Outcome("passed", ", ".join(told), {"runs": rows}, bars))
    return Outcome("passed", f"{', '.join(told)} tokens/s of decode and prefill", {"runs": rows}, bars)


def bench4(context: Context, session: Session, size: str) -> Outcome:
    """All requests at once give the capacity; then they arrive as recorded, sped up to 0.7 times and once that rate."""
    trace = context.trace or next(context.carried.glob("*.csv"), None)
    if trace is None:
        return skipped("no trace: name one with --trace FILE (columns TIMESTAMP, ContextTokens, GeneratedTokens)")
    if not trace.is_file():
        return skipped(f"{trace} is not here: bring it along")
    from rich.console import Console

    from charonia.bench import targets, workload
    from charonia.bench.figures import print_errors, records
    from charonia.bench.records import print_records
    from charonia.bench.serving import run_serving

    engine = engine_of(context, session, size)
    count, longest = context.trace_requests, engine.info.session_len
    if context.rehearse:
        count, longest = 6, 64
    jobs = workload.jobs_from_trace(trace, count, engine.tokenizer, longest, 0)
    console = Console(width=140)

    def measure(name: str, speed: float | None) -> list[Record]:
        timed = [replace(job, arrival_s=job.arrival_s / speed if speed else 0.0) for job in jobs]
        figures = run_serving(targets.in_process(engine), timed, concurrency=None, warmup=2, console=console)
        measured = records("trace", [figures], {"arrival": name})
        print_records(console, measured)
        print_errors(console, measured)
        session.tell(Outcome("passed", name, {"speed": speed}, measured))
        return measured

    found = measure("all at once", None)
    at_once = {(record.name, record.unit): record.value for record in found}
    recorded = len(jobs) / max(jobs[-1].arrival_s, 1e-9)
    for load in (0.7, 1.0):
        found += measure(f"{load:g} of that rate", load * at_once["requests", "1/s"] / recorded)
    model = engine.info.model_name
    bars = [
        bar(_number("4", size), f"{model}, trace, {record.case['arrival']}: {record.name}", record.value, record.unit)
        for record in found
        if (record.name, record.unit) in _OF_A_TRACE
    ]
    about = {"model": model, "requests": len(jobs), "recorded_requests_per_s": recorded}
    summary = f"{at_once['requests', '1/s']:.1f} requests/s, {at_once['output', 'tokens/s']:.0f} tokens/s at once"
    return told_errors("trace", found, Outcome("passed", summary, about, [*found, *bars]))


def told_errors(what: str, found: Sequence[Record], outcome: Outcome) -> Outcome:
    """The outcome, failed if requests of these records ended with errors."""
    counts = [record for record in found if record.name == "errors"]
    if errors := sum(record.maximum for record in counts):
        texts = sorted({text for record in counts for text in record.details["texts"]})
        outcome.status, outcome.summary = "failed", f"{errors:.0f} errors; {outcome.summary}"
        outcome.failures.append(Failure(what, "\n".join(texts)))
    return outcome


_OF_A_TRACE = {
    ("requests", "1/s"), ("output", "tokens/s"), ("time to first token", "ms"), ("inter-token latency", "ms"),
    ("inter-token latency, 99th", "ms"),
}  # fmt: skip
