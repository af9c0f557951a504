"""Runs long computations outside the event loop."""

from __future__ import annotations

import asyncio
import contextvars
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_MIN_ITEMS = 1024  # of a thread; an item takes about a microsecond
# Few threads, because the event loop shares Python's lock with each of them.
_threads = ThreadPoolExecutor(2, "charonia-offload")


async def offload(num_items: int, work: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
    """Returns work(...). It runs in a thread if it processes many items, so that the event loop is not blocked. Nothing
    else may use the arguments meanwhile."""
    if num_items < _MIN_ITEMS:
        return work(*args, **named)
    call = functools.partial(contextvars.copy_context().run, work, *args, **named)
    return await asyncio.get_running_loop().run_in_executor(_threads, call)
