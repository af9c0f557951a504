"""What happened to each request, and the figures that follow from it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from rich.console import Console

from charonia.bench.records import Record


@dataclass
class Trace:
    """One request as its client saw it; times in seconds on one clock.

    made_ms: when the engine made each response of `arrivals`, in milliseconds since it took the request, where the
    target says so."""

    began: float
    arrivals: list[float] = field(default_factory=list)  # of each response that carried something
    made_ms: list[float] = field(default_factory=list)
    ended: float = 0.0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None


@dataclass(frozen=True)
class Figures:
    """Of one run, as records() has them; lists are of all requests or responses, in milliseconds.

    ttft: from sending to the first response. tpot: time per output token after the first, per request. itl: between two
    responses of a request, which carry one token or, under load, a few. e2e: from sending to the last response.
    """

    requests: int
    errors: int
    duration_s: float
    input_tokens: int
    output_tokens: int
    ttft_ms: list[float]
    tpot_ms: list[float]
    itl_ms: list[float]
    e2e_ms: list[float]
    error_counts: dict[str, int]  # of each kind, the most frequent five

    @classmethod
    def of(cls, traces: Sequence[Trace]) -> Figures:
        good = [trace for trace in traces if trace.error is None]
        several = [trace for trace in good if trace.output_tokens > 1 and len(trace.arrivals) > 1]
        return cls(
            requests=len(traces),
            errors=len(traces) - len(good),
            duration_s=max((t.ended for t in traces), default=0.0) - min((t.began for t in traces), default=0.0),
            input_tokens=sum(trace.input_tokens for trace in good),
            output_tokens=sum(trace.output_tokens for trace in good),
            ttft_ms=[1e3 * (trace.arrivals[0] - trace.began) for trace in good if trace.arrivals],
            tpot_ms=[1e3 * (trace.arrivals[-1] - trace.arrivals[0]) / (trace.output_tokens - 1) for trace in several],
            itl_ms=[float(1e3 * gap) for trace in several for gap in np.diff(trace.arrivals)],
            e2e_ms=[1e3 * (trace.ended - trace.began) for trace in good],
            error_counts=dict(Counter(trace.error for trace in traces if trace.error).most_common(5)),
        )

    def why(self) -> str:
        """The errors, with how often each came."""
        return "; ".join(f"{count} x {text}" for text, count in self.error_counts.items())

    @property
    def requests_per_s(self) -> float:
        return (self.requests - self.errors) / self.duration_s if self.duration_s else 0.0

    @property
    def output_tokens_per_s(self) -> float:
        return self.output_tokens / self.duration_s if self.duration_s else 0.0


_TIMES = {
    "time to first token": "ttft_ms",
    "time per output token": "tpot_ms",
    "inter-token latency": "itl_ms",
    "end to end": "e2e_ms",
}


def records(benchmark: str, rounds: Sequence[Figures], case: dict[str, Any]) -> list[Record]:
    """Of one case that was measured several times. Rates and counts are of rounds. Times are of all requests of all
    rounds, with the 99th percentile beside the median; there are none where nothing was answered."""

    def record(name: str, unit: str, values: Sequence[float], **details: Any) -> Record:
        return Record.of(benchmark, name, unit, values, case=case, details=details)

    texts = sorted({text for one in rounds for text in one.error_counts})
    found = [
        record("requests", "1/s", [one.requests_per_s for one in rounds]),
        record("output", "tokens/s", [one.output_tokens_per_s for one in rounds]),
        record("requests", "", [one.requests for one in rounds]),
        record("errors", "", [one.errors for one in rounds], texts=texts),
        record("input tokens", "", [one.input_tokens for one in rounds]),
        record("output tokens", "", [one.output_tokens for one in rounds]),
    ]
    for name, attribute in _TIMES.items():
        times = [each for one in rounds for each in getattr(one, attribute)]
        if times:
            found.append(record(name, "ms", times))
            found.append(record(f"{name}, 99th", "ms", [float(np.percentile(times, 99))]))
    return found


def print_errors(console: Console, records: Sequence[Record]) -> None:
    for text in sorted({text for record in records for text in record.details.get("texts", ())}):
        console.print(text, style="red", markup=False)
