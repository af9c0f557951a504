"""Waiting for an event for some time, and for tasks that are cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

_AGAIN_S = 0.1


async def comes_within(event: asyncio.Event, timeout_s: float) -> bool:
    """Whether the event comes within that time.

    Does not use asyncio.wait_for: before Python 3.12 it swallows a cancellation that arrives together with the event,
    and a task that calls it in a loop never ends.
    """
    waiter = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait((waiter,), timeout=timeout_s)
    finally:
        waiter.cancel()
    return event.is_set()


async def end(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancels tasks and returns when they have ended; their errors are dropped.

    Cancels them repeatedly: gRPC's calls swallow a cancellation that arrives together with their response.
    """
    left = set(tasks)
    while left:
        for task in left:
            task.cancel()
        ended, left = await asyncio.wait(left, timeout=_AGAIN_S)
        for task in ended:
            if not task.cancelled():
                task.exception()
