"""The limits of keys: requests and tokens a minute, and requests at once.

A window of a minute begins with a key's first request after the last one. The engine says how many tokens a request
took when it has ended, so a request begins where the window has any token left, and its tokens are taken from the
window in which it ends (docs/security.md).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import sqlite3
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Literal, TypeVar

from limits import RateLimitItemPerMinute
from limits.aio.storage import MemoryStorage, Storage
from limits.aio.strategies import FixedWindowRateLimiter
from limits.errors import ConfigurationError, StorageError
from limits.storage import storage_from_string

from charonia_gateway.counts import WorkersStorage
from charonia_gateway.errors import ApiError
from charonia_gateway.keys import Key
from charonia_gateway.shared import Shared

log = logging.getLogger("charonia_gateway")
Result = TypeVar("Result")
Limit = Literal["requests", "tokens", "concurrent"]

_STORAGE_TIMEOUT_S = 1.0
_STORAGE_PAUSE_S = 5.0
_TELL_EVERY_S = 1.0
# Each request that is being counted has one. The library's bound is 100: a burst had it take the storage for away.
_STORAGE_CONNECTIONS = 10_000


class LimitExceeded(ApiError):
    """429 of a key's own limit."""

    def __init__(self, limit: Limit, message: str, headers: dict[str, str]) -> None:
        super().__init__(429, message, type="rate_limit_error", code="rate_limit_exceeded", headers=headers)
        self.limit = limit


def _open(uri: str) -> Storage:
    """Valkey speaks Redis' protocol, and one client serves for both. ValueError for what is no address."""
    if uri.startswith("valkey"):  # the scheme's; a host may be called so, too
        uri = uri.replace("valkey", "redis", 1)
    try:
        storage = storage_from_string(
            f"async+{uri}",
            implementation="redispy",
            key_prefix="charonia",
            wrap_exceptions=True,
            socket_timeout=_STORAGE_TIMEOUT_S,
            socket_connect_timeout=_STORAGE_TIMEOUT_S,
            max_connections=_STORAGE_CONNECTIONS,
        )
    except (ConfigurationError, ValueError):
        # Nothing of it, nor of what the library says: it may hold a password.
        raise ValueError(
            "CHARONIA_GATEWAY_LIMITS_STORAGE is no address of a storage: expected "
            "redis://USER:PASSWORD@HOST:PORT/NUMBER, in which a password has %2F for /, %3A for : and %40 for @"
        ) from None
    assert isinstance(storage, Storage)
    return storage


class Limiter:
    """Counts in this process, or with the other workers of this gateway, or in a Redis or Valkey that several gateways
    share. While that is away, each gateway counts by itself."""

    def __init__(
        self, storage_uri: str = "", clock: Callable[[], float] = time.time, workers: Shared | None = None
    ) -> None:
        """workers: what this gateway's share, where it has several."""
        self._clock = clock
        self._memory = FixedWindowRateLimiter(MemoryStorage())
        self._workers = workers
        self._of_workers = FixedWindowRateLimiter(WorkersStorage(workers)) if workers else None
        self._shared = FixedWindowRateLimiter(_open(storage_uri)) if storage_uri else None
        self._away_until = 0.0
        self._running: Counter[str] = Counter()  # by key
        self._untold: set[str] = set()  # keys of which the other workers do not know what runs here
        self._told: set[str] = set()  # keys of which they have a number that is not zero

    async def begin(self, key: Key) -> dict[str, str]:
        """Counts a request, and gives the headers of its answer. LimitExceeded where it is one too many; otherwise
        end() has to follow."""
        headers: dict[str, str] = {}
        if key.max_concurrent is not None and not self._has_room(key.id, key.max_concurrent):
            text = f"the key {key.name!r} has {key.max_concurrent} requests running, which is its limit"
            raise LimitExceeded("concurrent", f"{text}: wait for one to end", {"Retry-After": "1"})
        self._running[key.id] += 1
        try:
            # Tokens first: a request that is rejected for them is not counted.
            if key.tokens_per_minute is not None:
                await self._check(key, "tokens", key.tokens_per_minute, 0, headers)
            if key.requests_per_minute is not None:
                await self._check(key, "requests", key.requests_per_minute, 1, headers)
        except BaseException:
            self._end(key)
            raise
        return headers

    async def end(self, key: Key, tokens: int) -> None:
        """Of a request that begin() has taken."""
        self._end(key)
        if tokens and (limit := key.tokens_per_minute) is not None:
            item = RateLimitItemPerMinute(limit)
            await self._counted(lambda windows: windows.hit(item, key.id, "tokens", cost=tokens))

    async def follow(self) -> None:
        """Tells the other workers what they could not be told when it happened, until it is cancelled."""
        assert self._workers is not None
        while True:
            await asyncio.sleep(_TELL_EVERY_S)
            self._tell(self._workers)

    def _end(self, key: Key) -> None:
        self._running[key.id] -= 1
        if not self._running[key.id]:
            del self._running[key.id]
        # The key's limit may have gone since it was told.
        if self._workers and (key.max_concurrent is not None or key.id in self._told):
            self._untold.add(key.id)
            self._tell(self._workers)

    def _tell(self, workers: Shared) -> None:
        with contextlib.suppress(sqlite3.Error):  # follow() tries again
            for key_id in list(self._untold):
                here = self._running.get(key_id, 0)
                workers.set_running(key_id, here)
                (self._told.add if here else self._told.discard)(key_id)
                self._untold.discard(key_id)

    def _has_room(self, key_id: str, limit: int) -> bool:
        """Whether one more may run. Where there are other workers, they know of it then."""
        here = self._running.get(key_id, 0)
        if self._workers and here < limit:
            self._tell(self._workers)
            try:
                self._told.add(key_id)
                return self._workers.begin_running(key_id, here, limit)
            except sqlite3.Error:
                self._untold.add(key_id)  # this one counts alone
        return here < limit

    async def _check(self, key: Key, of: Limit, limit: int, cost: int, headers: dict[str, str]) -> None:
        item = RateLimitItemPerMinute(limit)

        async def count(windows: FixedWindowRateLimiter) -> tuple[bool, float, int]:
            taken = await (windows.hit(item, key.id, of, cost=cost) if cost else windows.test(item, key.id, of))
            reset_at, remaining = await windows.get_window_stats(item, key.id, of)
            return taken, reset_at, remaining

        taken, reset_at, remaining = await self._counted(count)
        reset_s = max(0, math.ceil(reset_at - self._clock()))
        shown = {"limit": limit, "remaining": remaining, "reset": f"{reset_s}s"}
        headers |= {f"x-ratelimit-{what}-{of}": str(value) for what, value in shown.items()}
        if not taken:
            text = f"the key {key.name!r} has used its {limit} {of} per minute: try again in {reset_s} s"
            raise LimitExceeded(of, text, {**headers, "Retry-After": str(max(1, reset_s))})

    async def _counted(self, action: Callable[[FixedWindowRateLimiter], Awaitable[Result]]) -> Result:
        if self._shared is not None and time.monotonic() >= self._away_until:
            try:
                return await action(self._shared)
            except StorageError as error:
                known = time.monotonic() < self._away_until  # by another request that waited as well
                self._away_until = time.monotonic() + _STORAGE_PAUSE_S
                if known:
                    return await self._counted_here(action)
                # The kind alone: the text may have the URI.
                log.error(
                    "the storage of limits is away (%s): this gateway counts alone, and tries it again in %g s",
                    type(error.storage_error).__name__,
                    _STORAGE_PAUSE_S,
                )
        return await self._counted_here(action)

    async def _counted_here(self, action: Callable[[FixedWindowRateLimiter], Awaitable[Result]]) -> Result:
        if self._of_workers is not None:
            try:
                return await action(self._of_workers)
            except StorageError:
                pass  # this one counts alone
        return await action(self._memory)
