"""Waits until a condition holds. Only a hang reaches the limit, even on a slow and busy machine."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable
from typing import Any

HANG_S = 120


def wait_until(holds: Callable[[], Any], said: Callable[[], object] = lambda: "it does not hold") -> Any:
    """Return the first true result of `holds`. said: the message of the failure."""
    deadline = time.monotonic() + HANG_S
    while not (found := holds()):
        assert time.monotonic() < deadline, said()
        time.sleep(0.05)
    return found


async def until(holds: Callable[[], Any], said: Callable[[], object] = lambda: "it does not hold") -> Any:
    """Like wait_until. `holds` may be asynchronous."""
    deadline = time.monotonic() + HANG_S
    while True:
        found = holds()
        if inspect.isawaitable(found):
            found = await found
        if found:
            return found
        assert time.monotonic() < deadline, said()
        await asyncio.sleep(0.02)
