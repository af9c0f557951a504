"""Waiting for an event for some time, and for tasks that are cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

_AGAIN_S = 0.1


async def comes_within(event: asyncio.Event, timeout_s: float) -> bool:
    """Whether the event comes within that time.

    Not asyncio.wait_for: before Python 3.12 that swallows a cancellation which comes together with the event, and a
    task that loops around it never ends.
    """
    waiter = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait((waiter,), timeout=timeout_s)
    finally:
        waiter.cancel()
    return event.is_set()


async def end(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancels tasks and returns when they have ended; their errors are dropped.

    They are cancelled again and again: gRPC's calls swallow a cancellation that comes together with their answer.
    """
    left = set(tasks)
    while left:
        for task in left:
            task.cancel()
        ended, left = await asyncio.wait(left, timeout=_AGAIN_S)
        for task in ended:
            if not task.cancelled():
                task.exception()
