"""A client of one worker of a gateway in several processes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator

import httpx
import psutil

HANG_S = 120


@contextlib.asynccontextmanager
async def client_of(url: str, pid: int) -> AsyncIterator[httpx.AsyncClient]:
    """Yield a client whose only connection goes to this worker. The kernel chooses the worker, so this retries until
    the choice is right. The connection stays open, because a new one may go to another worker."""
    limits = httpx.Limits(max_connections=1, keepalive_expiry=None)
    deadline = time.monotonic() + HANG_S  # a new worker may not listen yet
    while time.monotonic() < deadline:
        async with httpx.AsyncClient(base_url=url, timeout=HANG_S, limits=limits) as web:
            answer = await web.get("/health/live")
            _, own_port = answer.extensions["network_stream"].get_extra_info("client_addr")
            theirs = psutil.Process(pid).net_connections("tcp")
            if any(one.raddr and one.raddr.port == own_port for one in theirs):
                yield web
                return
    raise AssertionError("no connection came to that worker")
