"""Work that takes long, beside the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_MANY = 4096  # of what takes some microseconds each


async def aside(count: int, work: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
    """work(...), which does something for each of `count`: in a thread where they are many, so that the event loop goes
    on. What it works on belongs to it alone meanwhile."""
    if count < _MANY:
        return work(*args, **named)
    return await asyncio.to_thread(work, *args, **named)
