"""Sends a stream of requests to a target, in an open or a closed loop, and measures client-side times."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

from charonia.bench.figures import Figures, Trace
from charonia.bench.targets import OpenTarget, Target, clock
from charonia.bench.workload import Job


def run_serving(
    open_target: OpenTarget,
    jobs: Sequence[Job],
    *,
    concurrency: int | None,
    warmup: int,
    console: Console,
    title: str = "requests",
) -> Figures:
    """concurrency: the number of clients; each sends its next request when the last one has ended. None: jobs have
    arrival times. warmup: number of requests before the measurement. Errors are counted, not raised."""
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn())

    async def run() -> list[Trace]:
        async with open_target() as target:
            await closed_loop(target, jobs[:warmup], min(warmup, concurrency or warmup), lambda: None)
            with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
                task = bars.add_task(title, total=len(jobs))
                if concurrency is None:
                    return await _open_loop(target, jobs, lambda: bars.advance(task))
                return await closed_loop(target, jobs, concurrency, lambda: bars.advance(task))

    return Figures.of(asyncio.run(run()))


def _text_of(error: BaseException) -> str:
    """Return the error with its cause: httpx's errors of a broken connection have no text."""
    first = error
    while not str(error) and (cause := error.__cause__ or error.__context__):
        error = cause
    name = type(first).__name__
    return f"{name}: {error}" if error is first else f"{name}, caused by {type(error).__name__}: {error}"


async def _one(target: Target, job: Job) -> Trace:
    trace = Trace(clock())
    try:
        await target.run(job, trace)
    except Exception as error:  # client libraries raise many types
        trace.error = _text_of(error)
    trace.ended = clock()
    return trace


async def closed_loop(target: Target, jobs: Sequence[Job], clients: int, done: Callable[[], None]) -> list[Trace]:
    """Send the jobs from `clients` clients. `done` is called after each request."""
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
