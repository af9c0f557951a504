"""What a shared prefix saves: the time to first token of prompts that begin alike, the first of them and the others."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Column, Table

from charonia.bench.figures import Trace
from charonia.bench.targets import OpenTarget, clock
from charonia.bench.workload import Job, random_text
from charonia.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True)
class Requests:
    """Medians over one kind of request. ttft_ms: from sending to the first token."""

    ttft_ms: float
    input_tokens: int
    cached_tokens: int

    @classmethod
    def of(cls, traces: Sequence[Trace]) -> Requests:
        return cls(
            float(np.median([1e3 * (trace.arrivals[0] - trace.began) for trace in traces])),
            int(np.median([trace.input_tokens for trace in traces])),
            int(np.median([trace.cached_tokens for trace in traces])),
        )


@dataclass(frozen=True)
class Report:
    """first: requests with a prefix that nobody has sent before. shared: the next with it and another question."""

    prefixes: int
    first: Requests
    shared: Requests

    @property
    def ratio(self) -> float:
        return self.first.ttft_ms / self.shared.ttft_ms

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "ratio": self.ratio}


def run_prefix(
    open_target: OpenTarget,
    tokenizer: PreTrainedTokenizerFast,
    *,
    prefix_tokens: int,
    question_tokens: int,
    prefixes: int,
    seed: int,
) -> Report:
    """For each of `prefixes` random prefixes two requests with different questions, one after the other."""
    generator = random.Random(seed)

    def text(tokens: int) -> str:
        return random_text(tokenizer, tokens, generator)

    async def run() -> Report:
        first: list[Trace] = []
        shared: list[Trace] = []
        async with open_target() as target:
            for index in range(-1, prefixes):  # the one before the first warms up
                prefix = text(prefix_tokens)
                for traces in (first, shared):
                    trace = Trace(clock())
                    await target.run(Job(f"{prefix} {text(question_tokens)}", max_tokens=2), trace)
                    if not trace.arrivals:
                        raise ModelError("the target answered without a token")
                    if index >= 0:
                        traces.append(trace)
        return Report(prefixes, Requests.of(first), Requests.of(shared))

    return asyncio.run(run())


def print_report(console: Console, report: Report) -> None:
    headings = ("time to first token, ms", "prompt tokens", "of them cached")
    table = Table("request", *(Column(heading, justify="right") for heading in headings))
    for name, requests in (("first with its prefix", report.first), ("next with it", report.shared)):
        table.add_row(name, f"{requests.ttft_ms:.1f}", str(requests.input_tokens), str(requests.cached_tokens))
    console.print(table)
    console.print(
        f"{report.ratio:.1f} times shorter with a shared prefix ({report.prefixes} prefixes, medians)", highlight=False
    )
