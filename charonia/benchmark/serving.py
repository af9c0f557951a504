"""Sends a stream of requests to a target, in an open or a closed loop, and measures what its clients see."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

from charonia.benchmark.figures import Figures, Trace
from charonia.benchmark.targets import OpenTarget, Target, clock
from charonia.benchmark.workload import Job


def run_serving(
    open_target: OpenTarget,
    jobs: Sequence[Job],
    *,
    concurrency: int | None,
    warmup: int,
    console: Console,
    title: str = "requests",
) -> Figures:
    """concurrency: that many clients, each sending its next request when the last is answered; None: the jobs' arrival
    times. warmup: requests sent before, not measured. Errors of requests are counted, not raised."""
    return asyncio.run(_run(open_target, jobs, concurrency, warmup, console, title))


async def _run(
    open_target: OpenTarget,
    jobs: Sequence[Job],
    concurrency: int | None,
    warmup: int,
    console: Console,
    title: str,
) -> Figures:
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn())
    async with open_target() as target:
        await _closed_loop(target, jobs[:warmup], min(warmup, concurrency or warmup), lambda: None)
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
            task = bars.add_task(title, total=len(jobs))
            if concurrency is None:
                traces = await _open_loop(target, jobs, lambda: bars.advance(task))
            else:
                traces = await _closed_loop(target, jobs, concurrency, lambda: bars.advance(task))
    return Figures.of(traces)


async def _one(target: Target, job: Job) -> Trace:
    trace = Trace(clock())
    try:
        await target.run(job, trace)
    except Exception as error:  # whatever a client library raises is an answer that did not come
        trace.error = f"{type(error).__name__}: {error}"
    trace.ended = clock()
    return trace


async def _closed_loop(target: Target, jobs: Sequence[Job], clients: int, done: Callable[[], None]) -> list[Trace]:
    waiting: Iterator[Job] = iter(jobs)
    traces: list[Trace] = []

    async def client() -> None:
        for job in waiting:
            traces.append(await _one(target, job))
            done()

    await asyncio.gather(*(client() for _ in range(clients)))
    return traces


async def _open_loop(target: Target, jobs: Sequence[Job], done: Callable[[], None]) -> list[Trace]:
    began = clock()

    async def at_its_time(job: Job) -> Trace:
        await asyncio.sleep(max(0.0, began + job.arrival_s - clock()))
        trace = await _one(target, job)
        done()
        return trace

    return list(await asyncio.gather(*(at_its_time(job) for job in jobs)))
