"""Sends a stream of requests to a target, in an open or a closed loop, and measures what its clients see."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

from charonia.bench.figures import Figures, Trace
from charonia.bench.targets import OpenTarget, Target, clock
from charonia.bench.workload import Job

_START_LIMIT_S = 120.0


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


def run_in_processes(
    make_target: Callable[[], OpenTarget], jobs: Sequence[Job], *, concurrency: int, warmup: int, processes: int
) -> Figures:
    """A closed loop like run_serving's, with the clients spread over processes: one Python process alone may be slower
    than a GPU behind a server. make_target: runs in each process; what pickle can send. Each sends its own `warmup`."""
    processes = min(processes, concurrency)
    shares = [
        (make_target, jobs[index::processes], len(range(index, concurrency, processes)), warmup)
        for index in range(processes)
    ]
    # Spawned, not forked: nothing of this process's threads and devices is in them.
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager, ProcessPoolExecutor(processes, context) as pool:
        # All have started and warmed up before the first measured request.
        barrier = manager.Barrier(processes)
        futures = [pool.submit(_share, *share, barrier) for share in shares]
        return Figures.of([trace for future in futures for trace in future.result()])


def _share(
    make_target: Callable[[], OpenTarget], jobs: Sequence[Job], clients: int, warmup: int, barrier: Any
) -> list[Trace]:
    """One process's part. Times are of a clock that all processes of a machine share."""

    async def run() -> list[Trace]:
        async with make_target()() as target:
            await closed_loop(target, jobs[:warmup], clients, lambda: None)
            await asyncio.to_thread(barrier.wait, _START_LIMIT_S)
            return await closed_loop(target, jobs, clients, lambda: None)

    return asyncio.run(run())


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
        await closed_loop(target, jobs[:warmup], min(warmup, concurrency or warmup), lambda: None)
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
            task = bars.add_task(title, total=len(jobs))
            if concurrency is None:
                traces = await _open_loop(target, jobs, lambda: bars.advance(task))
            else:
                traces = await closed_loop(target, jobs, concurrency, lambda: bars.advance(task))
    return Figures.of(traces)


def _told(error: BaseException) -> str:
    """With what is behind it: httpx's errors of a connection that broke have no words of their own."""
    first = error
    while not str(error) and (behind := error.__cause__ or error.__context__):
        error = behind
    name = type(first).__name__
    return f"{name}: {error}" if error is first else f"{name}, of {type(error).__name__}: {error}"


async def _one(target: Target, job: Job) -> Trace:
    trace = Trace(clock())
    try:
        await target.run(job, trace)
    except Exception as error:  # whatever a client library raises is an answer that did not come
        trace.error = _told(error)
    trace.ended = clock()
    return trace


async def closed_loop(target: Target, jobs: Sequence[Job], clients: int, done: Callable[[], None]) -> list[Trace]:
    """That many clients, each sending its next request when the last is answered. done: called after each."""
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
