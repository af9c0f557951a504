"""Turns in a bounded resource. Owners that wait take turns, however many turns each waits for."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from charonia_client.errors import Overloaded

_MAX_WAITING = 1024  # for each owner


class Turns:
    """At most `most` turns at the same time. `most` may be changed at any time."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._running = 0
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # by owner, the next one first; no deque is empty

    @asynccontextmanager
    async def turn(self, owner: str) -> AsyncGenerator[None, None]:
        """Waits for a turn, which ends with the block. A cancelled task leaves the queue. Raises Overloaded if the
        owner waits for too many turns."""
        if self._running < self.most:
            self._running += 1
        else:
            await self._wait(owner)
        try:
            yield
        finally:
            self._next()

    async def _wait(self, owner: str) -> None:
        waiting = self._waiting.setdefault(owner, deque())
        if len(waiting) >= _MAX_WAITING:
            raise Overloaded(f"{_MAX_WAITING} requests of this client wait to be tokenized, which is the limit")
        turn = asyncio.get_running_loop().create_future()
        waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it began at the same moment
                self._next()
            elif turn in waiting:
                waiting.remove(turn)
                if not waiting:
                    del self._waiting[owner]
            raise

    def _next(self) -> None:
        """Ends a turn, and begins the first turn of each next owner while there is room."""
        self._running -= 1
        while self._waiting and self._running < self.most:
            owner, waiting = next(iter(self._waiting.items()))
            del self._waiting[owner]
            turn = waiting.popleft()
            if waiting:
                self._waiting[owner] = waiting  # as the last owner
            if not turn.done():
                turn.set_result(None)
                self._running += 1
