"""The limits of keys: requests and tokens per minute, and concurrent sequences.

A window of one minute begins with a key's first request after the last window. The engine reports the tokens of a
request when it ends. So a request is accepted if its window has at least one token left, and its tokens are charged to
the window in which it ends (docs/security.md).
"""

from __future__ import annotations

import math
from typing import Literal

from charonia_gateway.errors import ApiError
from charonia_gateway.keys import Key
from charonia_gateway.state import State

Limit = Literal["requests", "tokens", "concurrent"]


class LimitExceeded(ApiError):
    """429 for a limit of the key."""

    def __init__(self, limit: Limit, message: str, headers: dict[str, str]) -> None:
        super().__init__(429, message, type="rate_limit_error", code="rate_limit_exceeded", headers=headers)
        self.limit = limit


def _holders(holder: str, sequences: int) -> list[str]:
    return [holder, *(f"{holder}:{number}" for number in range(1, sequences))]


class Limiter:
    def __init__(self, state: State) -> None:
        self._state = state

    async def begin(self, key: Key, holder: str) -> dict[str, str]:
        """Count a request. Returns the headers of its response, or raises LimitExceeded. end() must follow with the
        same holder, a unique id."""
        await self._acquire(key, [holder])
        try:
            # Tokens first: a request that is rejected for its tokens is not counted.
            headers = await self.check_tokens(key)
            if key.requests_per_minute is not None:
                await self._check(key, "requests", key.requests_per_minute, headers)
        except BaseException:
            await self.end(key, holder)
            raise
        return headers

    async def check_tokens(self, key: Key) -> dict[str, str]:
        """Raises LimitExceeded if the key has used its tokens. Returns the headers of the response."""
        headers: dict[str, str] = {}
        if key.tokens_per_minute is not None:
            await self._check(key, "tokens", key.tokens_per_minute, headers)
        return headers

    async def add(self, key: Key, holder: str, sequences: int) -> None:
        """Count the sequences of a request that begin() has accepted as one. Raises ApiError 400 for a request that
        the key can never send, and LimitExceeded."""
        if key.max_concurrent is not None and sequences > key.max_concurrent:
            raise ApiError(
                400,
                f"n: the request asks for {sequences} sequences, and the key {key.name!r} may have "
                f"{key.max_concurrent} at once: ask for fewer",
                param="n",
                code="invalid_value",
            )
        if sequences > 1 and key.max_concurrent is not None:
            # All at once: otherwise two requests could each hold one sequence and wait for the other's.
            await self._state.release(key.id, [holder])
            await self._acquire(key, _holders(holder, sequences))

    async def _acquire(self, key: Key, holders: list[str]) -> None:
        limit = key.max_concurrent
        if limit is not None and not await self._state.acquire(key.id, holders, limit):
            text = f"the key {key.name!r} may have {limit} sequences running, and this request would exceed it"
            raise LimitExceeded("concurrent", f"{text}: wait for others to end", {"Retry-After": "1"})

    async def charge(self, key: Key, tokens: int) -> None:
        """Count the tokens of a request."""
        if tokens and key.tokens_per_minute is not None:
            await self._state.count(f"{key.id}:tokens", tokens)

    async def end(self, key: Key, holder: str, sequences: int = 1) -> None:
        """A request that begin() has accepted does not run any more. `sequences`: as in add()."""
        if key.max_concurrent is not None:
            await self._state.release(key.id, _holders(holder, sequences))

    async def drop(self, key_id: str, holder: str) -> None:
        """Like end(), also for a key that no longer exists."""
        await self._state.release(key_id, [holder])

    async def _check(self, key: Key, of: Limit, limit: int, headers: dict[str, str]) -> None:
        amount = 1 if of == "requests" else 0
        total, left_s = await self._state.count(f"{key.id}:{of}", amount)
        remaining = max(0, limit - total)
        reset_s = math.ceil(left_s)
        shown = {"limit": limit, "remaining": remaining, "reset": f"{reset_s}s"}
        headers |= {f"x-ratelimit-{what}-{of}": str(value) for what, value in shown.items()}
        if total - amount >= limit:
            text = f"the key {key.name!r} has used its {limit} {of} per minute: try again in {reset_s} s"
            raise LimitExceeded(of, text, {**headers, "Retry-After": str(max(1, reset_s))})
