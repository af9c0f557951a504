"""Streams of a running request, for threads and for asyncio. Leaving one early, in whatever way, cancels it."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from types import TracebackType
from typing import Any

from charonia import _engine
from charonia.errors import EngineClosedError, InternalError
from charonia.results import Chunk, Timings

# Submits with a callback and returns the request's handle.
Submit = Callable[[Callable[[_engine.Result], None]], int]


def chunk_of(result: _engine.Result) -> Chunk:
    """Raises InternalError for a request that failed inside the engine."""
    if result.finish_reason == "error":
        raise InternalError(result.error)
    return Chunk(
        text=result.text,
        token_ids=result.token_ids,
        finish_reason=result.finish_reason or None,
        num_input_tokens=result.num_input_tokens,
        num_output_tokens=result.num_output_tokens,
        num_cached_tokens=result.num_cached_tokens,
        timings=Timings(*result.timings),
        logprobs=result.logprobs,
        top_logprobs=result.top_logprobs,
    )


class _Handle:
    """A running request. `cancel` may be called at any time, from any thread, any number of times."""

    def __init__(self, engine: _engine.Engine, handle: int) -> None:
        self._engine = engine
        self._handle = handle
        self.done = False

    def cancel(self) -> None:
        if not self.done:
            self.done = True
            self._engine.cancel(self._handle)


class Stream(Iterator[Chunk]):
    """The chunks of one request. One thread iterates; any thread may call `close`, which cancels and ends it."""

    def __init__(self, engine: _engine.Engine, submit: Submit, owner: object) -> None:
        """owner: kept alive as long as the stream."""
        self._owner = owner
        self._results: queue.SimpleQueue[_engine.Result] = queue.SimpleQueue()
        self._ended = False
        self._request = _Handle(engine, submit(self._results.put))

    def __next__(self) -> Chunk:
        if self._ended:
            raise StopIteration
        try:
            result = self._results.get()
        except BaseException:  # Ctrl-C while waiting
            self.close()
            raise
        if result.finish_reason:
            self._ended = self._request.done = True
        return chunk_of(result)

    def close(self) -> None:
        """Cancels the request if it still runs. A thread that iterates sees finish_reason `cancelled`."""
        self._request.cancel()

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_request"):
            self._request.cancel()


class AsyncStream(AsyncIterator[Chunk]):
    """The chunks of one request on the event loop that made it. A cancelled task or a dropped stream cancels it."""

    def __init__(self, engine: _engine.Engine, submit: Submit, owner: object) -> None:
        """owner: kept alive as long as the stream."""
        self._owner = owner
        loop = asyncio.get_running_loop()
        results: asyncio.Queue[_engine.Result] = asyncio.Queue()
        abandoned = threading.Event()
        self._results = results
        self._ended = False

        # Refers to the queue alone, so that dropping the stream ends the request.
        def deliver(result: _engine.Result) -> None:
            if not abandoned.is_set():
                try:
                    loop.call_soon_threadsafe(results.put_nowait, result)
                except RuntimeError:  # the loop is closed: nobody listens any more
                    abandoned.set()

        self._request = _Handle(engine, submit(deliver))

    def __aiter__(self) -> AsyncStream:
        return self

    async def __anext__(self) -> Chunk:
        if self._ended:
            raise StopAsyncIteration
        try:
            result = await self._results.get()
        except BaseException:  # the task was cancelled
            self._request.cancel()
            raise
        if result.finish_reason:
            self._ended = self._request.done = True
        return chunk_of(result)

    async def aclose(self) -> None:
        """Cancels the request if it still runs."""
        self._request.cancel()

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if hasattr(self, "_request"):
            self._request.cancel()


class Gathering:
    """Many requests at once, each answered with one result. For one thread."""

    def __init__(self, engine: _engine.Engine) -> None:
        self._engine = engine
        self._results: queue.SimpleQueue[tuple[int, _engine.Result]] = queue.SimpleQueue()
        self._running: dict[int, _Handle] = {}

    def __len__(self) -> int:
        return len(self._running)

    def submit(self, index: int, submit: Submit) -> None:
        """Submits request number `index`."""
        results = self._results

        def deliver(result: Any) -> None:
            results.put((index, result))

        self._running[index] = _Handle(self._engine, submit(deliver))

    def wait(self) -> tuple[int, Chunk]:
        """The next request that finishes: its number and its result."""
        if not self._running:
            raise EngineClosedError("no request is running")
        index, result = self._results.get()
        self._running.pop(index).done = True
        return index, chunk_of(result)

    def cancel(self) -> None:
        """Cancels what still runs."""
        for handle in self._running.values():
            handle.cancel()
