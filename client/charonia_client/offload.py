"""Runs long computations outside the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_MIN_ITEMS = 4096  # of a thread; an item takes about a microsecond


async def offload(num_items: int, work: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
    """Returns work(...). It runs in a thread if it processes many items, so that the event loop is not blocked. Nothing
    else may use the arguments meanwhile."""
    if num_items < _MIN_ITEMS:
        return work(*args, **named)
    return await asyncio.to_thread(work, *args, **named)
