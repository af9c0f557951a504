"""Answers of /v1/responses that clients asked to be stored: in this process's memory, or with its fellow workers."""

from __future__ import annotations

import contextlib
import json
import logging
import sqlite3
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import to_json

from charonia_gateway.errors import unavailable
from charonia_gateway.shared import CONTINUED, Shared

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

    def go_on(self, entry: Stored) -> bool:
        """Whether an answer may go on with the entry's session: no other one has, or does. Then went_on() has to
        follow."""
        if entry.continued:
            return False
        entry.continued = True
        return True

    def went_on(self, entry: Stored, *, stored: bool) -> None:
        """Of an answer that go_on() was True for: whether it was stored. Where it was not, another one may go on."""
        entry.continued = stored

    def _forget_old(self) -> None:
        """The entries are in the order of their age."""
        oldest = self._clock() - self._ttl_s
        while self._entries:
            first = next(iter(self._entries.values()))
            if first.at >= oldest and len(self._entries) <= self.limit and self._bytes <= self.limit_bytes:
                return
            self._entries.popitem(last=False)
            self._bytes -= first.bytes


class SharedResponseStore(ResponseStore):
    """The same, of all workers of the gateway. What one of them stores, all find. get() and remove() raise ApiError 503
    where what the workers share cannot be had."""

    def __init__(
        self,
        limit: int,
        limit_bytes: int,
        ttl_s: float,
        clock: Callable[[], float] = time.monotonic,
        *,
        shared: Shared,
    ) -> None:
        """clock: one that all workers have."""
        super().__init__(limit, limit_bytes, ttl_s, clock)
        self._shared = shared

    def __len__(self) -> int:
        return int(self._shared.run("SELECT COUNT(*) FROM responses WHERE at >= ?", (self._oldest,)).fetchone()[0])

    @property
    def bytes(self) -> int:
        rows = self._shared.run("SELECT COALESCE(SUM(bytes), 0) FROM responses WHERE at >= ?", (self._oldest,))
        return int(rows.fetchone()[0])

    @property
    def _oldest(self) -> float:
        return self._clock() - self._ttl_s

    def add(self, entry: Stored) -> bool:
        try:
            response, conversation = to_json(entry.response), to_json(entry.conversation)
            entry.bytes = len(response) + len(conversation)
            if entry.bytes > self.limit_bytes:
                return False
            entry.at = self._clock()
            self._forget_old(1, entry.bytes)  # first, so that the file has the space already
            self._shared.run(
                "INSERT INTO responses VALUES (?, ?, ?, ?, ?, NULL, ?, ?)",
                (entry.response["id"], entry.owner, entry.session_id, entry.at, entry.bytes, response, conversation),
            )
        except (ValueError, sqlite3.Error) as error:
            log.warning("an answer is not stored: %s", error)
            return False
        return True

    def get(self, id: str, owner: str | None = None) -> Stored | None:
        return self._entry("SELECT * FROM responses WHERE id = ? AND owner IS ? AND at >= ?", id, owner, self._oldest)

    def remove(self, id: str) -> Stored | None:
        with contextlib.suppress(sqlite3.Error):
            self._forget_old()
        return self._entry("DELETE FROM responses WHERE id = ? AND at >= ? RETURNING *", id, self._oldest)

    def _entry(self, statement: str, *values: Any) -> Stored | None:
        try:
            rows = self._shared.run(statement, values).fetchall()
        except sqlite3.Error as error:
            raise unavailable("stored responses cannot be had now: try again") from error
        for _, owner, session, at, size, continued, response, conversation in rows:
            whole = json.loads(response), json.loads(conversation)
            return Stored(*whole, session, owner, continued is not None, at, size)
        return None

    def has_session(self, session_id: str) -> bool:
        try:
            values = (session_id, self._oldest)
            found = self._shared.run("SELECT 1 FROM responses WHERE session = ? AND at >= ?", values).fetchone()
        except sqlite3.Error:
            return True  # it may be
        return found is not None

    def go_on(self, entry: Stored) -> bool:
        values = (self._shared.worker, entry.response["id"])
        try:
            taken = self._shared.run("UPDATE responses SET continued = ? WHERE id = ? AND continued IS NULL", values)
        except sqlite3.Error:
            return False  # the next one begins a session, with the whole conversation
        return taken.rowcount == 1

    def went_on(self, entry: Stored, *, stored: bool) -> None:
        values = (CONTINUED if stored else None, entry.response["id"])
        with contextlib.suppress(sqlite3.Error):  # nobody goes on with its session then
            self._shared.run("UPDATE responses SET continued = ? WHERE id = ?", values)

    def _forget_old(self, more: int = 0, more_bytes: int = 0) -> None:
        """With room for so many more."""
        self._shared.run(
            "DELETE FROM responses WHERE at < ? OR rowid IN (SELECT id FROM ("
            "SELECT rowid AS id, ROW_NUMBER() OVER newest AS place, SUM(bytes) OVER newest AS total FROM responses "
            "WINDOW newest AS (ORDER BY at DESC, rowid DESC ROWS UNBOUNDED PRECEDING)) WHERE place > ? OR total > ?)",
            (self._oldest, self.limit - more, self.limit_bytes - more_bytes),
        )
