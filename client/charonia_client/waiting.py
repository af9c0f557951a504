"""Waiting for an event for some time."""

from __future__ import annotations

import asyncio


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
