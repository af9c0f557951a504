"""What the workers of a gateway count together for the limits of keys."""

from __future__ import annotations

import sqlite3
from typing import ClassVar

from limits.aio.storage import Storage

from charonia_gateway.shared import Shared


class WorkersStorage(Storage):
    """The storage of `limits` that all workers of one gateway have."""

    STORAGE_SCHEME: ClassVar[list[str]] = ["async+charonia-workers"]  # type: ignore[misc]

    def __init__(self, shared: Shared) -> None:
        super().__init__(wrap_exceptions=True)
        self._shared = shared

    @property
    def base_exceptions(self) -> type[Exception] | tuple[type[Exception], ...]:
        return sqlite3.Error

    async def incr(self, key: str, expiry: int, amount: int = 1) -> int:
        return self._shared.count(key, amount, expiry)

    async def get(self, key: str) -> int:
        return self._shared.window(key)[0]

    async def get_expiry(self, key: str) -> float:
        return self._shared.window(key)[1]

    async def check(self) -> bool:
        return self._shared.window("")[0] == 0

    async def reset(self) -> int | None:
        return self._shared.clear_window(None)

    async def clear(self, key: str) -> None:
        self._shared.clear_window(key)
