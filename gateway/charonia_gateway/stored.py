"""Answers of /v1/responses that clients asked to be stored, in this process's memory."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import to_json

log = logging.getLogger("charonia_gateway")


@dataclass
class Stored:
    """conversation: its messages, the answer included. session_id: that of the engine, which the whole chain of
    answers shares. owner: the id of the key that made it. continued: another answer has gone on with that."""

    response: dict[str, Any]
    conversation: list[dict[str, Any]]
    session_id: str
    owner: str | None = None
    continued: bool = False
    at: float = 0.0
    bytes: int = field(default=0)


class ResponseStore:
    """Forgets what is older than `ttl_s`, and the oldest where there are more than `limit` or `limit_bytes`."""

    def __init__(self, limit: int, limit_bytes: int, ttl_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit = limit
        self.limit_bytes = limit_bytes
        self._ttl_s = ttl_s
        self._clock = clock
        self._entries: OrderedDict[str, Stored] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        self._forget_old()
        return len(self._entries)

    @property
    def bytes(self) -> int:
        return self._bytes

    def add(self, entry: Stored) -> bool:
        """False where it is too large to be kept, or could not be sent as JSON."""
        try:
            entry.bytes = len(to_json(entry.response)) + len(to_json(entry.conversation))
        except ValueError as error:
            log.warning("an answer is not stored: %s", error)
            return False
        if entry.bytes > self.limit_bytes:
            return False
        entry.at = self._clock()
        self._entries[entry.response["id"]] = entry
        self._bytes += entry.bytes
        self._forget_old()
        return True

    def get(self, id: str, owner: str | None = None) -> Stored | None:
        """None also for another owner's."""
        self._forget_old()
        entry = self._entries.get(id)
        return entry if entry and entry.owner == owner else None

    def remove(self, id: str) -> Stored | None:
        self._forget_old()
        entry = self._entries.pop(id, None)
        if entry:
            self._bytes -= entry.bytes
        return entry

    def has_session(self, session_id: str) -> bool:
        """Whether an answer of that chain is stored."""
        return any(entry.session_id == session_id for entry in self._entries.values())

    def _forget_old(self) -> None:
        """The entries are in the order of their age."""
        oldest = self._clock() - self._ttl_s
        while self._entries:
            first = next(iter(self._entries.values()))
            if first.at >= oldest and len(self._entries) <= self.limit and self._bytes <= self.limit_bytes:
                return
            self._entries.popitem(last=False)
            self._bytes -= first.bytes
