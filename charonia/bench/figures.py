"""What happened to each request, and the figures that follow from it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Column, Table


@dataclass
class Trace:
    """One request as its client saw it; times in seconds on one clock."""

    began: float
    arrivals: list[float] = field(default_factory=list)  # of each response that carried something
    ended: float = 0.0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None


@dataclass(frozen=True)
class Spread:
    """Mean, median and 99th percentile; None where there is nothing to measure."""

    mean: float | None
    median: float | None
    p99: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        if not values:
            return cls(None, None, None)
        return cls(float(np.mean(values)), float(np.median(values)), float(np.percentile(values, 99)))


@dataclass(frozen=True)
class Figures:
    """Of one run. Times in milliseconds.

    ttft: from sending to the first response. tpot: time per output token after the first, per request. itl: between two
    responses of a request, which carry one token or, under load, a few. e2e: from sending to the last response.
    """

    requests: int
    errors: int
    duration_s: float
    input_tokens: int
    output_tokens: int
    requests_per_s: float
    output_tokens_per_s: float
    ttft_ms: Spread
    tpot_ms: Spread
    itl_ms: Spread
    e2e_ms: Spread
    error_texts: tuple[str, ...]  # one of each kind, at most five

    @classmethod
    def of(cls, traces: Sequence[Trace]) -> Figures:
        good = [trace for trace in traces if trace.error is None]
        duration = max((trace.ended for trace in traces), default=0.0) - min((t.began for t in traces), default=0.0)
        tokens = sum(trace.output_tokens for trace in good)
        several = [trace for trace in good if trace.output_tokens > 1 and len(trace.arrivals) > 1]
        return cls(
            requests=len(traces),
            errors=len(traces) - len(good),
            duration_s=duration,
            input_tokens=sum(trace.input_tokens for trace in good),
            output_tokens=tokens,
            requests_per_s=len(good) / duration if duration else 0.0,
            output_tokens_per_s=tokens / duration if duration else 0.0,
            ttft_ms=Spread.of([1e3 * (trace.arrivals[0] - trace.began) for trace in good if trace.arrivals]),
            tpot_ms=Spread.of(
                [1e3 * (trace.arrivals[-1] - trace.arrivals[0]) / (trace.output_tokens - 1) for trace in several]
            ),
            itl_ms=Spread.of([float(1e3 * gap) for trace in several for gap in np.diff(trace.arrivals)]),
            e2e_ms=Spread.of([1e3 * (trace.ended - trace.began) for trace in good]),
            error_texts=tuple(sorted({trace.error for trace in traces if trace.error}))[:5],
        )


def print_figures(console: Console, rows: Sequence[tuple[str, Figures]]) -> None:
    """For each run a line of throughput and a table of latencies."""
    for name, figures in rows:
        console.print(
            f"{name}: {figures.requests} requests, {figures.errors} errors, {figures.requests_per_s:.2f} requests/s, "
            f"{figures.output_tokens_per_s:.1f} output tokens/s",
            highlight=False,
        )
        table = Table("ms", *(Column(heading, justify="right") for heading in ("mean", "median", "p99")))
        table.add_row("time to first token", *_cells(figures.ttft_ms))
        table.add_row("time per output token", *_cells(figures.tpot_ms))
        table.add_row("inter-token latency", *_cells(figures.itl_ms))
        table.add_row("end to end", *_cells(figures.e2e_ms))
        console.print(table)
        for text in figures.error_texts:
            console.print(f"{name}: {text}", style="red", markup=False)


def _cells(spread: Spread) -> list[str]:
    return ["-" if value is None else f"{value:.1f}" for value in (spread.mean, spread.median, spread.p99)]


def write_json(file: Path | None, content: dict[str, Any]) -> None:
    """Writes a benchmark's result, if the user asked for it."""
    if file is not None:
        file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def as_json(figures: Figures) -> dict[str, Any]:
    return asdict(figures)
