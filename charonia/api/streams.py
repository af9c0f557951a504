"""Streams of a running request, for threads and for asyncio. Leaving a stream early cancels its request. `stop` also
ends it, but keeps the generated part of a session's turn in the history."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from types import TracebackType
from typing import Any

from charonia import _engine, errors
from charonia.api.results import Chunk, Timings
from charonia.errors import EngineClosedError

# Submits a request with a callback, and returns its handle.
Submit = Callable[[Callable[[_engine.Result], None]], int]


def chunk_of(result: _engine.Result) -> Chunk:
    """Raises the error of a request that failed: DeadlineExceededError, OverloadedError, EngineClosedError or
    InternalError."""
    if result.finish_reason == "error":
        raise getattr(errors, result.error_class)(result.error)
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
        index=result.index,
        cumulative_logprob=result.cumulative_logprob,
        prompt_logprobs=result.prompt_logprobs,
        prompt_top_logprobs=result.prompt_top_logprobs,
        num_session_tokens=result.num_session_tokens,
        num_proposed_tokens=result.num_proposed_tokens,
        num_accepted_tokens=result.num_accepted_tokens,
        pooled=result.pooled,
    )


class _Handle:
    """A running request. `cancel` and `stop` may be called at any time, from any thread, any number of times."""

    def __init__(self, engine: _engine.Engine, handle: int, sequences: int) -> None:
        self._engine = engine
        self._handle = handle
        self._running = sequences
        self.done = False

    def take(self, result: _engine.Result) -> Chunk:
        """Return the chunk. The request ends after the last chunk of every sequence, or after the first error."""
        if result.finish_reason == "error":
            self._running = 0
            self.cancel()
        elif result.finish_reason:
            self._running -= 1
            self.done = self.done or self.over
        return chunk_of(result)

    @property
    def over(self) -> bool:
        return self._running == 0

    def stop(self) -> None:
        if not self.done:
            self._engine.stop(self._handle)

    def cancel(self) -> None:
        if not self.done:
            self.done = True
            self._engine.cancel(self._handle)


class _RequestStream:
    """The request of a stream. Deleting the stream cancels it."""

    _request: _Handle
    _ended = False

    def stop(self) -> None:
        """End the request, and keep the generated part of a session's turn in the history."""
        self._request.stop()

    def _take(self, result: _engine.Result) -> Chunk:
        try:
            return self._request.take(result)
        finally:
            self._ended = self._request.over

    def __del__(self) -> None:
        if hasattr(self, "_request"):
            self._request.cancel()


class Stream(_RequestStream, Iterator[Chunk]):
    """The chunks of one request. One thread iterates. Any thread may call `close`, which cancels the request."""

    def __init__(self, engine: _engine.Engine, submit: Submit, owner: object, sequences: int = 1) -> None:
        """owner: object that stays alive as long as the stream. sequences: number of sequences of the request."""
        self._owner = owner
        self._results: queue.SimpleQueue[_engine.Result] = queue.SimpleQueue()
        self._request = _Handle(engine, submit(self._results.put), sequences)

    def __next__(self) -> Chunk:
        if self._ended:
            raise StopIteration
        try:
            result = self._results.get()
        except BaseException:  # Ctrl-C while it waits
            self.close()
            raise
        return self._take(result)

    def close(self) -> None:
        """Cancel the request if it is running. The iterating thread gets finish_reason `cancelled`."""
        self._request.cancel()

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncStream(_RequestStream, AsyncIterator[Chunk]):
    """The chunks of one request on the current event loop. Cancelling the task or deleting the stream cancels it."""

    def __init__(self, engine: _engine.Engine, submit: Submit, owner: object, sequences: int = 1) -> None:
        """owner: object that stays alive as long as the stream. sequences: number of sequences of the request."""
        self._owner = owner
        loop = asyncio.get_running_loop()
        results: asyncio.Queue[_engine.Result] = asyncio.Queue()
        abandoned = threading.Event()
        self._results = results

        # Refers to the queue only, so that the stream can be deleted, which cancels the request.
        def deliver(result: _engine.Result) -> None:
            if not abandoned.is_set():
                try:
                    loop.call_soon_threadsafe(results.put_nowait, result)
                except RuntimeError:  # the loop is closed
                    abandoned.set()

        self._request = _Handle(engine, submit(deliver), sequences)

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
        return self._take(result)

    async def aclose(self) -> None:
        """Cancel the request if it is running."""
        self._request.cancel()

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


class Gathering:
    """A set of running requests with one result per sequence. Used by one thread."""

    def __init__(self, engine: _engine.Engine) -> None:
        self._engine = engine
        self._results: queue.SimpleQueue[tuple[int, _engine.Result]] = queue.SimpleQueue()
        self._running: dict[int, _Handle] = {}
        self._chunks: dict[int, list[Chunk]] = {}

    def __len__(self) -> int:
        return len(self._running)

    def submit(self, index: int, submit: Submit, sequences: int = 1) -> None:
        """Submit request number `index`."""
        results = self._results

        def deliver(result: Any) -> None:
            results.put((index, result))

        self._running[index] = _Handle(self._engine, submit(deliver), sequences)

    def wait(self) -> tuple[int, list[Chunk]]:
        """Wait for a request to finish; returns its number and the results of its sequences, in order."""
        if not self._running:
            raise EngineClosedError("no request is running")
        while True:
            index, result = self._results.get()
            request = self._running[index]
            chunks = self._chunks.setdefault(index, [])
            chunks.append(request.take(result))
            if request.over:
                del self._running[index]
                return index, sorted(self._chunks.pop(index), key=lambda chunk: chunk.index)

    def cancel(self) -> None:
        """Cancel all running requests."""
        for handle in self._running.values():
            handle.cancel()
