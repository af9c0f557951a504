"""State that the processes of a gateway share: the limits of keys, the owners of sessions, and stored responses.

A gateway of one process keeps the state in memory. Several processes or gateways keep it in Redis or Valkey.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from abc import ABC, abstractmethod
from collections import ChainMap, OrderedDict, defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from redis.asyncio import Redis

log = logging.getLogger("charonia_gateway")
Result = TypeVar("Result")

WINDOW_S = 60.0
_MAX_SESSIONS = 100_000  # owners that a process keeps in memory
_OWNER_S = 7 * 86_400  # an owner is kept so long after the session's last request
_TIMEOUT_S = 5.0  # for an action, with its second try and the wait for a free connection
_PAUSE_S = 5.0  # without another try after Redis could not be reached
_CONNECTIONS = 64
_LEASE_S = 60  # a request of a process that died counts no longer than this
_RENEW_S = 20.0


class StateUnavailable(Exception):
    """Redis cannot be reached."""


@dataclass(frozen=True)
class Bounds:
    """Of stored responses: when a bound is exceeded, the oldest are removed."""

    count: int = 1000
    bytes: int = 64 << 20
    age_s: float = 3600.0


class State(ABC):
    # --- limits

    @abstractmethod
    async def count(self, name: str, amount: int) -> tuple[int, float]:
        """Add to a window of one minute, which begins with its first count. Returns its total and the seconds that it
        still lasts."""

    @abstractmethod
    async def acquire(self, name: str, holders: Sequence[str], limit: int) -> bool:
        """Add holders, sequences for example, if `name` then has at most `limit` holders. release() must follow
        True."""

    @abstractmethod
    async def release(self, name: str, holders: Sequence[str]) -> None: ...

    # --- sessions

    @abstractmethod
    async def owner(self, session: str) -> str | None:
        """The target that has the history of a session, as set_owner() was called last."""

    @abstractmethod
    async def set_owner(self, session: str, target: str | None) -> None:
        """None: the session has ended."""

    # --- stored responses. All of them raise StateUnavailable.

    @abstractmethod
    async def add_response(self, id: str, session: str, data: bytes) -> None:
        """Store a response. session: which it belongs to; without white space, as the id."""

    @abstractmethod
    async def response(self, id: str) -> bytes | None: ...

    @abstractmethod
    async def remove_response(self, id: str, session: str, size: int) -> bool:
        """Remove a response of that session and number of bytes. False if it no longer exists."""

    @abstractmethod
    async def has_session(self, session: str) -> bool:
        """Whether a response of that session is stored."""

    @abstractmethod
    async def claim(self, id: str) -> bool:
        """True for the first caller with the id of a stored response, until unclaim()."""

    @abstractmethod
    async def unclaim(self, id: str) -> None: ...

    async def follow(self) -> None:
        """Background work, until it is cancelled."""
        return

    async def close(self) -> None:
        return


class MemoryState(State):
    def __init__(self, bounds: Bounds = Bounds(), clock: Callable[[], float] = time.monotonic) -> None:
        self._bounds = bounds
        self._clock = clock
        self._windows: dict[str, tuple[int, float]] = {}  # total and end
        self._holders: defaultdict[str, set[str]] = defaultdict(set)
        self._owners: OrderedDict[str, str] = OrderedDict()
        self._responses: OrderedDict[str, tuple[str, bytes, float]] = OrderedDict()  # session, data and time, by id
        self._bytes = 0
        self._claimed: set[str] = set()

    async def count(self, name: str, amount: int) -> tuple[int, float]:
        now = self._clock()
        total, end = self._windows.get(name, (0, 0.0))
        if end <= now:
            total, end = 0, now + WINDOW_S
        self._windows[name] = (total + amount, end)
        return total + amount, min(WINDOW_S, end - now)  # Rounding makes (now + 60) - now longer than 60.

    async def acquire(self, name: str, holders: Sequence[str], limit: int) -> bool:
        if len(self._holders[name]) + len(holders) > limit:
            return False
        self._holders[name].update(holders)
        return True

    async def release(self, name: str, holders: Sequence[str]) -> None:
        self._holders[name].difference_update(holders)
        if not self._holders[name]:
            del self._holders[name]

    async def owner(self, session: str) -> str | None:
        return self._owners.get(session)

    async def set_owner(self, session: str, target: str | None) -> None:
        self._owners.pop(session, None)
        if target is not None:
            self._owners[session] = target
            if len(self._owners) > _MAX_SESSIONS:
                self._owners.popitem(last=False)

    async def add_response(self, id: str, session: str, data: bytes) -> None:
        self._responses[id] = (session, data, self._clock())
        self._bytes += len(data)
        self._trim()

    async def response(self, id: str) -> bytes | None:
        self._trim()
        return self._responses[id][1] if id in self._responses else None

    async def remove_response(self, id: str, session: str, size: int) -> bool:
        self._trim()
        return self._remove(id)

    async def has_session(self, session: str) -> bool:
        self._trim()
        return any(one == session for one, _, _ in self._responses.values())

    async def claim(self, id: str) -> bool:
        if id in self._claimed or id not in self._responses:
            return False
        self._claimed.add(id)
        return True

    async def unclaim(self, id: str) -> None:
        self._claimed.discard(id)

    def _remove(self, id: str) -> bool:
        if id not in self._responses:
            return False
        self._bytes -= len(self._responses.pop(id)[1])
        self._claimed.discard(id)
        return True

    def _trim(self) -> None:
        oldest = self._clock() - self._bounds.age_s
        while self._responses:
            id, (_, _, at) = next(iter(self._responses.items()))
            if at >= oldest and len(self._responses) <= self._bounds.count and self._bytes <= self._bounds.bytes:
                return
            self._remove(id)


# Each script runs as one step.
_COUNT = """
local total = redis.call('INCRBY', KEYS[1], ARGV[1])
local left = redis.call('PTTL', KEYS[1])
if left < 0 then
  left = tonumber(ARGV[2])
  redis.call('PEXPIRE', KEYS[1], left)
end
return {total, left}
"""
_ACQUIRE = """
local now = tonumber(redis.call('TIME')[1])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
if redis.call('ZCARD', KEYS[1]) + #ARGV - 2 > tonumber(ARGV[1]) then return 0 end
for at = 3, #ARGV do redis.call('ZADD', KEYS[1], now + ARGV[2], ARGV[at]) end
redis.call('EXPIRE', KEYS[1], ARGV[2])
return 1
"""
_RENEW = """
redis.call('ZADD', KEYS[1], 'XX', redis.call('TIME')[1] + ARGV[1], ARGV[2])
redis.call('EXPIRE', KEYS[1], ARGV[1])
"""
# KEYS: the response, the index by age, the bytes of all. A member of the index is "SIZE SESSION ID".
_ADD = """
local time = redis.call('TIME')
local now = time[1] + time[2] / 1000000
local id, session, data, age, count, bytes = unpack(ARGV)
redis.call('SET', KEYS[1] .. id, data, 'PX', math.ceil(age * 1000))
redis.call('ZADD', KEYS[2], now, #data .. ' ' .. session .. ' ' .. id)
local total = redis.call('INCRBY', KEYS[3], #data)
while true do
  local first = redis.call('ZRANGE', KEYS[2], 0, 0, 'WITHSCORES')
  if not first[1] then break end
  if tonumber(first[2]) >= now - age and total <= tonumber(bytes)
      and redis.call('ZCARD', KEYS[2]) <= tonumber(count) then break end
  local size, old = string.match(first[1], '^(%d+) %S+ (%S+)$')
  redis.call('ZREM', KEYS[2], first[1])
  total = redis.call('DECRBY', KEYS[3], size)
  redis.call('DEL', KEYS[1] .. old)
end
"""
_REMOVE = """
if redis.call('ZREM', KEYS[2], ARGV[2]) == 1 then redis.call('DECRBY', KEYS[3], ARGV[3]) end
return redis.call('DEL', KEYS[1] .. ARGV[1])
"""


class RedisState(State):
    """While Redis cannot be reached, this process applies limits and chooses servers of sessions by itself."""

    def __init__(self, url: str, bounds: Bounds = Bounds(), prefix: str = "charonia:") -> None:
        """Raises ValueError for a URL that cannot be used. The error does not contain it: it may have a password."""
        from redis.asyncio import BlockingConnectionPool, Redis
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff
        from redis.exceptions import RedisError

        try:
            pool: Any = BlockingConnectionPool.from_url(
                url.replace("valkey", "redis", 1) if url.startswith("valkey") else url,
                max_connections=_CONNECTIONS,
                timeout=None,  # _run() limits the time
                socket_timeout=None,
                socket_connect_timeout=None,
                retry=Retry(NoBackoff(), 1),  # an idle connection may be broken
            )
        except ValueError:
            raise ValueError(
                "CHARONIA_GATEWAY_REDIS_URL cannot be used: expected redis://USER:PASSWORD@HOST:PORT/NUMBER, in which "
                "a password has %2F for /, %3A for : and %40 for @"
            ) from None
        self._redis: Redis = Redis(connection_pool=pool)
        self._error = RedisError
        self._bounds = bounds
        self._prefix = prefix
        self._alone = MemoryState(bounds)  # while Redis is away
        self._away_until = 0.0
        self._is_away = False  # the last action failed
        self._changes = 0  # of _is_away
        self._is_tried = False  # an action finds out whether Redis is back; the others do not wait for it
        self._held: set[tuple[str, str]] = set()  # name and holder
        self._new_owners: dict[str, str | None] = {}  # not yet written to Redis, oldest first
        self._writing: list[dict[str, str | None]] = []  # owners that are being written
        script = self._redis.register_script
        self._count, self._acquire, self._renew = script(_COUNT), script(_ACQUIRE), script(_RENEW)
        self._add, self._remove = script(_ADD), script(_REMOVE)

    async def _run(self, action: Callable[[], Awaitable[Result]]) -> Result:
        """Raises StateUnavailable."""
        if self._is_away and (self._is_tried or time.monotonic() < self._away_until):
            raise StateUnavailable
        tries, changes = self._is_away, self._changes
        if tries:
            self._is_tried = True
        try:
            result = await asyncio.wait_for(action(), _TIMEOUT_S)
            self._set_away(False)
            return result
        except (self._error, OSError, asyncio.TimeoutError) as error:
            if changes == self._changes:  # else it began before Redis went away, or came back
                self._set_away(True)
                self._away_until = time.monotonic() + _PAUSE_S
                # Only the type: the text may contain the URL.
                log.error(
                    "Redis cannot be reached (%s): this process applies limits by itself, and tries again in %g s",
                    type(error).__name__,
                    _PAUSE_S,
                )
            raise StateUnavailable from None
        finally:
            if tries:
                self._is_tried = False

    def _set_away(self, is_away: bool) -> None:
        self._changes += is_away is not self._is_away
        self._is_away = is_away

    async def count(self, name: str, amount: int) -> tuple[int, float]:
        key = f"{self._prefix}window:{name}"
        try:
            total, left_ms = await self._run(lambda: self._count([key], [amount, int(WINDOW_S * 1000)]))
        except StateUnavailable:
            return await self._alone.count(name, amount)
        return int(total), left_ms / 1000

    async def acquire(self, name: str, holders: Sequence[str], limit: int) -> bool:
        key = f"{self._prefix}holders:{name}"
        try:
            taken = await self._run(lambda: self._acquire([key], [limit, _LEASE_S, *holders]))
        except StateUnavailable:
            return await self._alone.acquire(name, holders, limit)
        if taken:
            self._held.update((name, holder) for holder in holders)
        return bool(taken)

    async def release(self, name: str, holders: Sequence[str]) -> None:
        held = [holder for holder in holders if (name, holder) in self._held]
        await self._alone.release(name, [holder for holder in holders if holder not in held])
        if held:
            self._held.difference_update((name, holder) for holder in held)
            with contextlib.suppress(StateUnavailable):  # the lease ends by itself
                await self._run(lambda: self._redis.zrem(f"{self._prefix}holders:{name}", *held))

    async def owner(self, session: str) -> str | None:
        try:
            await self._write_owners()
            found: Any = await self._run(lambda: self._redis.get(f"{self._prefix}owner:{session}"))
        except StateUnavailable:
            return ChainMap(self._new_owners, *reversed(self._writing)).get(session)
        return None if found is None else str(found, "utf-8")

    async def set_owner(self, session: str, target: str | None) -> None:
        self._new_owners.pop(session, None)
        self._new_owners[session] = target
        if len(self._new_owners) > _MAX_SESSIONS:
            del self._new_owners[next(iter(self._new_owners))]
        with contextlib.suppress(StateUnavailable):
            await self._write_owners()

    async def _write_owners(self) -> None:
        """Write the owners that were set, also those from the time when Redis was away. Raises StateUnavailable."""
        if not self._new_owners:
            return
        writing, self._new_owners = self._new_owners, {}
        self._writing.append(writing)
        pipeline = self._redis.pipeline(transaction=False)
        for session, target in writing.items():
            key = f"{self._prefix}owner:{session}"
            pipeline.delete(key) if target is None else pipeline.set(key, target, ex=_OWNER_S)
        try:
            await self._run(pipeline.execute)
        except BaseException:
            self._new_owners = writing | self._new_owners
            raise
        finally:
            self._writing.remove(writing)

    @property
    def _response_keys(self) -> list[str]:
        return [f"{self._prefix}{name}" for name in ("response:", "responses", "response_bytes")]

    async def add_response(self, id: str, session: str, data: bytes) -> None:
        bounds = self._bounds
        values: list[Any] = [id, session, data, bounds.age_s, bounds.count, bounds.bytes]
        await self._run(lambda: self._add(self._response_keys, values))

    async def response(self, id: str) -> bytes | None:
        found: Any = await self._run(lambda: self._redis.get(f"{self._prefix}response:{id}"))
        return None if found is None else bytes(found)

    async def remove_response(self, id: str, session: str, size: int) -> bool:
        values: list[Any] = [id, f"{size} {session} {id}", size]
        return bool(await self._run(lambda: self._remove(self._response_keys, values)))

    async def has_session(self, session: str) -> bool:
        async def search() -> bool:
            async for member, _ in self._redis.zscan_iter(f"{self._prefix}responses", match=f"* {session} *"):
                if await self._redis.exists(f"{self._prefix}response:{member.decode().rpartition(' ')[2]}"):
                    return True
            return False

        return await self._run(search)

    async def claim(self, id: str) -> bool:
        key = f"{self._prefix}claim:{id}"
        age_ms = int(self._bounds.age_s * 1000) + 1
        return bool(await self._run(lambda: self._redis.set(key, b"", nx=True, px=age_ms)))

    async def unclaim(self, id: str) -> None:
        await self._run(lambda: self._redis.delete(f"{self._prefix}claim:{id}"))

    async def follow(self) -> None:
        """Renew the leases of running requests, and write owners from the time when Redis was away."""
        while True:
            await asyncio.sleep(_RENEW_S)
            with contextlib.suppress(StateUnavailable):
                await self._write_owners()
            for name, holder in list(self._held):
                if (name, holder) in self._held:
                    with contextlib.suppress(StateUnavailable):
                        key = f"{self._prefix}holders:{name}"
                        await self._run(lambda key=key, holder=holder: self._renew([key], [_LEASE_S, holder]))  # type: ignore[misc]

    async def close(self) -> None:
        await self._redis.aclose()
