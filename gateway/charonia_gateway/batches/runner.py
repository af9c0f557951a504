"""Runs the requests of one batch: several at the same time, each as a request of the gateway to itself."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import islice

from pydantic_core import to_json
from starlette.types import ASGIApp

from charonia_gateway.batches.lines import Line, answer_line
from charonia_gateway.inner import InnerAnswer, ask_itself
from charonia_gateway.record import Inner

PRIORITY = -1  # of the requests of batches; other requests have 0 unless they ask for another one
# The server cannot run the request now: a limit of the key, a full queue, or a server that restarts.
_LATER = (429, 503)
_DEFAULT_WAIT_S = 5.0
_PIECE = 64  # lines
_PIECE_BYTES = 1 << 20  # a piece ends with the line that exceeds it


class Runner:
    """Runs requests until all have an answer, or until `stop` is called.

    free: one slot for each request that may run, shared with other batches. most: requests of this batch that run or
    wait for their next try. write: gets the custom_id, the line with the answer, and whether the request succeeded.
    retries: whether a request with this status runs again later; otherwise this is its answer."""

    def __init__(
        self,
        app: ASGIApp,
        inner: Inner,
        free: asyncio.Semaphore,
        most: int,
        write: Callable[[str, bytes, bool], None],
        *,
        retries: Callable[[int], bool] = lambda status: status in _LATER,
    ) -> None:
        self._app = app
        self._inner = inner
        self._free = free
        self._own = asyncio.Semaphore(most)
        self._write = write
        self._retries = retries
        self._stopping = asyncio.Event()  # no other request begins
        self._cancelled = asyncio.Event()  # the running requests end

    def stop(self, *, cancel: bool = False) -> None:
        """Begin no other request. cancel: also cancel the running requests, which then have no answer."""
        self._stopping.set()
        if cancel:
            self._cancelled.set()

    @property
    def stopping(self) -> bool:
        return self._stopping.is_set()

    async def run(self, lines: Iterator[Line]) -> None:
        """Raises the errors of `lines`, `write` and `retries`. A thread reads the lines."""
        tasks: set[asyncio.Task[None]] = set()
        try:
            async for line in _read_in_thread(lines):
                await self._own.acquire()
                for task in [one for one in tasks if one.done()]:
                    tasks.discard(task)
                    task.result()
                if self.stopping:
                    break
                tasks.add(asyncio.create_task(self._run(line)))
            if tasks:  # not gather(): when this is cancelled, it would wait for tasks that do not know it
                await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            self.stop(cancel=True)  # a cancelled task may still get a response: that the gateway shuts down
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, line: Line) -> None:
        body = to_json(line.body)
        try:
            while not self.stopping:
                async with self._free:
                    if self.stopping:
                        return
                    answer = await ask_itself(self._app, line.url, body, self._inner, self._cancelled)
                if self._cancelled.is_set() and answer.status != 200:
                    return
                if not self._retries(answer.status):
                    self._write(line.custom_id, answer_line(line.custom_id, answer), answer.status == 200)
                    return
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), _wait_s(answer))
        finally:
            self._own.release()


async def _read_in_thread(lines: Iterator[Line]) -> AsyncIterator[Line]:
    while piece := await asyncio.to_thread(_piece, lines):
        for line in piece:
            yield line


def _piece(lines: Iterator[Line]) -> list[Line]:
    piece, size = [], 0
    for line in islice(lines, _PIECE):
        piece.append(line)
        size += line.size
        if size > _PIECE_BYTES:
            break
    return piece


def _wait_s(answer: InnerAnswer) -> float:
    given = answer.headers.get("retry-after", "")
    return float(given) if given.isdigit() else _DEFAULT_WAIT_S
