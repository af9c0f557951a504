"""What a shared prefix saves: the time to first token of prompts that begin alike, the first of them and the others."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING

from charonia.bench.figures import Trace
from charonia.bench.records import Record
from charonia.bench.targets import OpenTarget, clock
from charonia.bench.workload import Job, random_text
from charonia.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def run_prefix(
    open_target: OpenTarget,
    tokenizer: PreTrainedTokenizerFast,
    *,
    prefix_tokens: int,
    question_tokens: int,
    prefixes: int,
    seed: int,
) -> list[Record]:
    """For each of `prefixes` random prefixes two requests with different questions, one after the other.

    Records of the first requests, whose prefix nobody has sent before, and of the next with it; and how many times
    shorter the median time to the first token is for the latter."""
    generator = random.Random(seed)

    def text(tokens: int) -> str:
        return random_text(tokenizer, tokens, generator)

    async def run() -> list[Record]:
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
        return [*_records(_FIRST, first), *_records(_SHARED, shared), _shorter(first, shared)]

    return asyncio.run(run())


_FIRST, _SHARED = "first with its prefix", "next with it"


def _records(request: str, traces: Sequence[Trace]) -> list[Record]:
    values = (
        ("time to first token", "ms", _times(traces)),
        ("prompt tokens", "", [trace.input_tokens for trace in traces]),
        ("of them cached", "", [trace.cached_tokens for trace in traces]),
    )
    return [Record.of("prefix", name, unit, several, case={"request": request}) for name, unit, several in values]


def _shorter(first: Sequence[Trace], shared: Sequence[Trace]) -> Record:
    return Record.of(
        "prefix", "shorter", "times", median(_times(first)) / median(_times(shared)), case={"request": _SHARED}
    )


def _times(traces: Sequence[Trace]) -> list[float]:
    return [1e3 * (trace.arrivals[0] - trace.began) for trace in traces]
