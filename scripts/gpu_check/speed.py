"""Bars 1 to 4, 6 and 7: random weights of real shapes, measured with `charonia benchmark`'s own functions."""

from __future__ import annotations

import io
import shutil
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gpu_check.context import Context
from gpu_check.records import Bar, Failure, Outcome, skipped
from gpu_check.worker import Session

if TYPE_CHECKING:
    from charonia import Engine
    from charonia.bench.random_model import Shape

_SHAPES = {"7b": "llama2-7b", "8b": "llama3-8b"}
_TABLE = (1, 16, 32, 64)


def shape_of(context: Context, size: str) -> Shape:
    """A rehearsal's has the same proportions and the tiniest sizes."""
    from charonia.bench.random_model import SHAPES, Shape

    shape = SHAPES[_SHAPES[size]]
    if context.rehearse:
        return Shape(2, 64, 4, 4 * shape.kv_heads // shape.heads, 160, 320, 4096, shape.rope_theta)
    return shape


def model_of(context: Context, size: str) -> str:
    """The model's folder; written when it is not there yet."""
    from charonia.bench.random_model import write_random_model

    shape = shape_of(context, size)
    bytes_needed = 2 * (
        2 * shape.vocab * shape.hidden + shape.layers * shape.hidden * (4 * shape.hidden + 3 * shape.intermediate)
    )
    folder = (context.work / "models" if context.rehearse else context.room_for(bytes_needed)) / _SHAPES[size]
    if not (folder / "complete").is_file():
        shutil.rmtree(folder, ignore_errors=True)
        write_random_model(folder, shape, quick=True)
        (folder / "complete").touch()
    return str(folder)


def engine_of(context: Context, session: Session, size: str, **more: Any) -> Engine:
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
    engine: Engine = session.engine(model_of(context, size), settings)
    return engine


def _number(bar: str, size: str) -> str:
    return f"6.{bar}" if size == "8b" else bar


def _static(
    context: Context, session: Session, size: str, batches: tuple[int, ...], prompt: int, output: int, runs: int
) -> dict[str, Any]:
    """charonia benchmark static's report, with what the engine is."""
    from rich.console import Console

    from charonia.bench.static import measure_static, print_report

    engine = engine_of(context, session, size)
    if context.rehearse:
        batches, prompt, output = tuple(min(batch, 4) for batch in batches), min(prompt, 32), min(output, 8)
    report = measure_static(engine, batches, [prompt], [output], runs=runs, console=Console(file=io.StringIO()))
    print_report(Console(width=140), report)
    figures = report.to_json()
    figures["num_blocks"] = engine.info.num_blocks
    figures["warnings"] = list(engine.info.warnings)
    return figures


def bench1(context: Context, session: Session, size: str) -> Outcome:
    figures = _static(context, session, size, (1,), 1, 512, 3)
    [row] = figures["rows"]
    summary = f"{row['decode_tokens_per_s']:.1f} tokens/s"
    if row["bandwidth_share"] is None:
        return Outcome("failed", f"{summary}; the bandwidth was not measured: PyTorch is missing", figures)
    share = 100 * row["bandwidth_share"]
    bar = Bar(_number("1", size), f"{figures['model']}, batch 1, 1 in, 512 out: share of the bandwidth", share, "%", 80)
    limit = figures["bandwidth"] / 1e9
    return Outcome("passed", f"{summary}, {share:.1f} % of {limit:.0f} GB/s", figures, [bar])


def bench2(context: Context, session: Session, size: str) -> Outcome:
    rows: list[dict[str, Any]] = []
    outcome = skipped("no batch was measured")
    for batch in _TABLE:
        figures = _static(context, session, size, (batch,), 1, 2048, 1)
        rows += figures["rows"]
        bars = [
            Bar(
                _number("2", size),
                f"{figures['model']}, batch {row['batch']}, {row['prompt_tokens']} in, {row['output_tokens']} out",
                row["total_output_tokens_per_s"],
                "tokens/s",
            )
            for row in rows
        ]
        told = ", ".join(f"{bar.measured:.0f}" for bar in bars)
        outcome = Outcome("passed", f"{told} tokens/s", {**figures, "rows": rows}, bars)
        session.tell(outcome)
    return outcome


def bench3(context: Context, session: Session, size: str) -> Outcome:
    figures = _static(context, session, size, (8,), 2048, 2, 3)
    [row] = figures["rows"]
    summary = f"{row['prefill_tokens_per_s']:.0f} prompt tokens/s"
    if row["gemm_share"] is None:
        # On the CPU nothing measures GEMMs, and the rehearsal ends here.
        return Outcome("passed" if context.rehearse else "failed", f"{summary}; GEMMs were not measured", figures)
    share = 100 * row["gemm_share"]
    bar = Bar(
        _number("3", size), f"{figures['model']}, prefill of 8 x 2048 tokens: share of a GEMM's rate", share, "%", 55
    )
    limit = figures["gemm_flops"] / 1e12
    return Outcome("passed", f"{summary}, {share:.1f} % of {limit:.0f} TFLOP/s", figures, [bar])


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
        short, long = report.rows
        step_s = [batch / row.decode_tokens_per_s for row in (short, long)]
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
        bars.append(Bar(_number("7", size), what, long.decode_tokens_per_s, "tokens/s"))
        if attention_s > 0:
            what = f"{info.model_name}, batch {batch}, {prompt} in: KV in {name} read"
            bars.append(Bar(_number("7", size), what, read / attention_s / 1e9, "GB/s"))
        told.append(f"{name}: {long.decode_tokens_per_s:.0f} tokens/s")
        session.tell(Outcome("passed", ", ".join(told), {"runs": rows}, bars))
    return Outcome("passed", ", ".join(told), {"runs": rows}, bars)


def bench4(context: Context, session: Session, size: str) -> Outcome:
    """All requests at once give the capacity; then they arrive as recorded, sped up to 0.7 times and once that rate."""
    trace = context.trace or next(context.carried.glob("*.csv"), None)
    if trace is None:
        return skipped("no trace: name one with --trace FILE (columns TIMESTAMP, ContextTokens, GeneratedTokens)")
    if not trace.is_file():
        return skipped(f"{trace} is not here: bring it along")
    from rich.console import Console

    from charonia.bench import targets, workload
    from charonia.bench.figures import as_json, print_figures
    from charonia.bench.serving import run_serving

    engine = engine_of(context, session, size)
    count, longest = context.trace_requests, engine.info.session_len
    if context.rehearse:
        count, longest = 6, 64
    jobs = workload.jobs_from_trace(trace, count, engine.tokenizer, longest, 0)
    console = Console(width=140)

    def measure(name: str, speed: float | None) -> dict[str, Any]:
        timed = [replace(job, arrival_s=job.arrival_s / speed if speed else 0.0) for job in jobs]
        figures = run_serving(targets.in_process(engine), timed, concurrency=None, warmup=2, console=console)
        print_figures(console, [(name, figures)])
        measured = {"speed": speed, **as_json(figures)}
        session.tell(Outcome("passed", name, {"runs": {name: measured}}))
        return measured

    at_once = measure("all at once", None)
    recorded = len(jobs) / max(jobs[-1].arrival_s, 1e-9)
    rows = {"all at once": at_once}
    for load in (0.7, 1.0):
        speed = load * at_once["requests_per_s"] / recorded
        rows[f"{load:g} of that rate"] = measure(f"{load:g} of that rate", speed)
    errors = sum(row["errors"] for row in rows.values())
    model = engine.info.model_name
    bars = [
        bar
        for name, row in rows.items()
        for bar in (
            Bar(_number("4", size), f"{model}, trace, {name}: requests", row["requests_per_s"], "requests/s"),
            Bar(_number("4", size), f"{model}, trace, {name}: output", row["output_tokens_per_s"], "tokens/s"),
            Bar(
                _number("4", size),
                f"{model}, trace, {name}: time to first token, median",
                row["ttft_ms"]["median"],
                "ms",
            ),
            Bar(
                _number("4", size),
                f"{model}, trace, {name}: inter-token latency, median",
                row["itl_ms"]["median"],
                "ms",
            ),
            Bar(_number("4", size), f"{model}, trace, {name}: inter-token latency, 99th", row["itl_ms"]["p99"], "ms"),
        )
        if bar.measured is not None
    ]
    figures = {"model": model, "requests": len(jobs), "recorded_requests_per_s": recorded, "runs": rows}
    summary = f"{at_once['requests_per_s']:.1f} requests/s, {at_once['output_tokens_per_s']:.0f} tokens/s at once"
    if errors:
        texts = sorted({text for row in rows.values() for text in row["error_texts"]})
        return Outcome("failed", f"{errors} errors; {summary}", figures, bars, [Failure("trace", "\n".join(texts))])
    return Outcome("passed", summary, figures, bars)
