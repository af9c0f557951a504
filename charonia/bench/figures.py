"""The trace of each request, and the figures of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from charonia.bench.records import Record

if TYPE_CHECKING:
    from charonia_client import GenerateResponse

    from charonia.api.results import Chunk


@dataclass
class Trace:
    """One request as its client saw it. Times are in seconds on one clock. arrivals: of each response with content."""

    began: float
    arrivals: list[float] = field(default_factory=list)
    ended: float = 0.0
    input_tokens: int = 0
    output_tokens: int = 0
    proposed_tokens: int = 0  # by speculation
    accepted_tokens: int = 0  # of them
    error: str | None = None

    def count(self, part: Chunk | GenerateResponse) -> None:
        """Store the numbers of tokens up to this part of the response."""
        self.input_tokens, self.output_tokens = part.num_input_tokens, part.num_output_tokens
        self.proposed_tokens, self.accepted_tokens = part.num_proposed_tokens, part.num_accepted_tokens


@dataclass(frozen=True)
class Figures:
    """The figures of one run; lists have a value for each request or response, in milliseconds.

    ttft: from sending to the first response. tpot: time per output token after the first, for each request. itl:
    between two responses of a request, which carry one token or, under load, several. e2e: from sending to the end.
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
    error_counts: dict[str, int]  # the five most frequent texts
    proposed_tokens: int = 0
    accepted_tokens: int = 0

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
            proposed_tokens=sum(trace.proposed_tokens for trace in good),
            accepted_tokens=sum(trace.accepted_tokens for trace in good),
        )

    def errors_text(self) -> str:
        """Return the errors, each with its count."""
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
    """Make the records of a case that was measured in several rounds. Rates and counts are medians of the rounds. Times
    are medians and 99th percentiles of the requests of all rounds. Proposed and accepted tokens have
    records only with speculation."""

    def record(name: str, unit: str, values: Sequence[float]) -> Record:
        return Record.of(benchmark, name, unit, values, case=case)

    texts = sorted({one.errors_text() for one in rounds} - {""})
    found = [
        record("requests", "1/s", [one.requests_per_s for one in rounds]),
        record("output", "tokens/s", [one.output_tokens_per_s for one in rounds]),
        record("requests", "", [one.requests for one in rounds]),
        Record.of(benchmark, "errors", "", [one.errors for one in rounds], case=case, details={"texts": texts}),
        record("input tokens", "", [one.input_tokens for one in rounds]),
        record("output tokens", "", [one.output_tokens for one in rounds]),
    ]
    if any(one.proposed_tokens for one in rounds):
        found.append(record("proposed tokens", "", [one.proposed_tokens for one in rounds]))
        found.append(record("accepted tokens", "", [one.accepted_tokens for one in rounds]))
    for name, attribute in _TIMES.items():
        times = [each for one in rounds for each in getattr(one, attribute)]
        if times:
            found.append(record(name, "ms", times))
            found.append(record(f"{name}, 99th", "ms", [float(np.percentile(times, 99))]))
    return found
