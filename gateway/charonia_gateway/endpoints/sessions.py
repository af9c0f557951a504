"""Where sessions have their servers, and which servers have yet to forget some: of this process, or of all workers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import sqlite3
import time
from collections.abc import Iterator, MutableMapping
from typing import Any, Literal, NamedTuple, TypeVar

from charonia_gateway.endpoints.affinity import MAX_SESSIONS, Affinity, Recent
from charonia_gateway.shared import Shared

Value = TypeVar("Value")
Claim = Literal["mine", "theirs", "gone"]

_PRUNE_EVERY = 256  # entries that a worker adds or deletes
_PRUNE_AT_ONCE = 1024  # of what was deleted long ago: others wait for the statement
_DELETED_S = 600.0  # that what was deleted stays so, whatever another worker writes late
_CLAIM_S = 60.0  # longer than a server may take to answer: a claim ends even where its worker could not end it
POLL_S = 0.02
# What is newer stays as it is: this may come late, once the database takes it. NULL: it was deleted, and is gone.
_WRITE = (
    "INSERT INTO recent (space, name, value, used, gone) VALUES (?1, ?2, ?3, ?4, ?3 IS NULL) "
    "ON CONFLICT DO UPDATE SET value = excluded.value, used = excluded.used, gone = excluded.gone "
    "WHERE used <= excluded.used"
)
# Names beyond a limit. By the index alone: other workers wait at most 0.1 s for a write, and there may be 100,000.
BEYOND = "SELECT name FROM recent WHERE space = ?1 ORDER BY gone, used DESC LIMIT -1 OFFSET ?2"


class StaleSessions(Recent[str, None]):
    """Sessions whose history at a server is out of date, as it was not told."""

    def claim(self, session_id: str) -> Claim:
        """Before the server is told. mine: release() has to follow. theirs: another worker tells it now. gone: it need
        not be told any more."""
        return "mine" if session_id in self else "gone"

    def release(self, session_id: str) -> None:
        """The server was told, or could not be."""

    def take(self, session_id: str) -> bool:
        """No longer out of date, unless another worker tells the server now or it was not."""
        if session_id not in self:
            return False
        del self[session_id]
        return True

    async def told_elsewhere(self, session_id: str) -> None:
        """Returns when no other worker tells the server of that session."""


class _Kept(NamedTuple):
    text: str | None  # the value as JSON; None: it was deleted
    at: float  # on the clock of all workers


class _SharedRecent(MutableMapping[str, Value]):
    """As Recent, of all workers. What another one deletes at the same time is no error. What the database does not take
    now is kept here until it does, unless another worker has written something newer."""

    def __init__(self, shared: Shared, space: str, limit: int = MAX_SESSIONS) -> None:
        """space: its name among others."""
        self._shared = shared
        self._space = space
        self._limit = limit
        self._written = 0
        self._kept: Recent[str, _Kept] = Recent(limit)  # by name

    def __getitem__(self, name: str) -> Value:
        text = self._text(name)
        if text is None:
            raise KeyError(name)
        return self._decoded(text)

    def _text(self, name: str) -> str | None:
        rows = self._read("SELECT value, used FROM recent WHERE space = ? AND name = ?", name)
        text, used = rows[0] if rows else (None, -math.inf)
        kept = self._kept.get(name)
        return kept.text if kept and kept.at >= used else text

    def __setitem__(self, name: str, value: Value) -> None:
        self._write(name, json.dumps(value))

    def __delitem__(self, name: str) -> None:
        self._write(name, None)
        self._count()

    def __iter__(self) -> Iterator[str]:
        rows = self._read("SELECT name FROM recent INDEXED BY recent_used WHERE space = ? AND gone = 0")
        names = dict.fromkeys(str(row[0]) for row in rows)
        for name in self._kept:
            names.pop(name, None)
            if self._text(name) is not None:
                names[name] = None
        return iter(list(names))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def remember(self, name: str, value: Value) -> None:
        self[name] = value
        self._count()

    def _count(self) -> None:
        self._written += 1
        if self._written % _PRUNE_EVERY == 0:
            with contextlib.suppress(sqlite3.Error):
                self.prune()

    def _read(self, statement: str, *values: str) -> list[Any]:
        """Nothing where the database cannot be had."""
        try:
            return self._shared.run(statement, (self._space, *values)).fetchall()
        except sqlite3.Error:
            return []

    def _write(self, name: str, text: str | None) -> None:
        one = _Kept(text, time.monotonic())
        try:
            self._write_kept()
            self._run(name, one)
        except sqlite3.Error:
            self._kept.remember(name, one)
            self._shared.later(self._write_late)

    def _write_late(self) -> None:
        try:
            self._write_kept()
        except sqlite3.Error:
            self._shared.later(self._write_late)

    def _write_kept(self) -> None:
        """Raises sqlite3.Error."""
        for name, kept in list(self._kept.items()):
            self._run(name, kept)
            del self._kept[name]

    def _run(self, name: str, one: _Kept) -> None:
        self._shared.run(_WRITE, (self._space, name, *one))

    def prune(self) -> None:
        """Forgets what was deleted long ago, and what was not used for the longest time, beyond the limit: of what was
        deleted first."""
        self._shared.run(
            "DELETE FROM recent WHERE space = ?1 AND name IN "
            "(SELECT name FROM recent WHERE space = ?1 AND gone = 1 AND used < ?2 LIMIT ?3)",
            (self._space, time.monotonic() - _DELETED_S, _PRUNE_AT_ONCE),
        )
        self._shared.run(f"DELETE FROM recent WHERE space = ?1 AND name IN ({BEYOND})", (self._space, self._limit))

    def prune_spaces(self, beginning: str, limit: int) -> None:
        """Forgets all of the spaces of that name's beginning that were not used for the longest time, beyond `limit`.
        Raises sqlite3.Error."""
        self._shared.run(
            "DELETE FROM recent WHERE space IN (SELECT space FROM recent WHERE substr(space, 1, length(?1)) = ?1 "
            "GROUP BY space ORDER BY MAX(used) DESC LIMIT -1 OFFSET ?2)",
            (beginning, limit),
        )

    def _decoded(self, text: str) -> Value:
        found: Value = json.loads(text)
        return found


class SharedSessions(_SharedRecent[Affinity]):
    """The server of each session of a model, as SessionAffinity."""

    def _decoded(self, text: str) -> Affinity:
        return Affinity(*json.loads(text))


class SharedEnds(_SharedRecent[float]):
    """When each session was ended last, on the clock that all processes of a machine have. One that begins anew is
    deleted: the end was not for what comes then."""

    def note(self, session_id: str) -> None:
        self.remember(session_id, time.monotonic())

    def since(self, session_id: str, at: float) -> bool:
        """Whether it was ended after `at`, of time.monotonic()."""
        return self.get(session_id, -math.inf) > at


class SharedStaleSessions(_SharedRecent[None]):
    """As StaleSessions. Whoever tells a server holds a claim, so that a session is told once at a time: what comes
    second could end the turn that has begun after the first. A worker that dies leaves none. Where the database cannot
    be had, a worker goes on as if it were the only one."""

    def claim(self, session_id: str) -> Claim:
        now = time.monotonic()
        try:
            self._write_kept()
            taken = self._shared.run(
                "INSERT INTO claims SELECT space, name, ?3, ?5 FROM recent WHERE space = ?1 AND name = ?2 "
                "AND gone = 0 "
                "ON CONFLICT DO UPDATE SET worker = excluded.worker, until = excluded.until WHERE until <= ?4",
                (self._space, session_id, self._shared.worker, now, now + _CLAIM_S),
            )
        except sqlite3.Error:
            return "theirs" if self._is_claimed(session_id) else "mine" if session_id in self else "gone"
        if taken.rowcount == 1:
            return "mine"
        return "theirs" if self._is_claimed(session_id) else "gone"

    def release(self, session_id: str) -> None:
        values = (self._space, session_id, self._shared.worker)
        with contextlib.suppress(sqlite3.Error):  # it ends by itself
            self._shared.run("DELETE FROM claims WHERE space = ? AND name = ? AND worker = ?", values)

    def take(self, session_id: str) -> bool:
        try:
            self._write_kept()
            gone = self._shared.run(
                "UPDATE recent SET value = NULL, used = ?3, gone = 1 WHERE space = ?1 AND name = ?2 AND gone = 0 "
                "AND NOT EXISTS (SELECT 1 FROM claims WHERE space = ?1 AND name = ?2 AND until > ?3)",
                (self._space, session_id, time.monotonic()),
            )
        except sqlite3.Error:
            if session_id not in self or self._is_claimed(session_id):
                return False
            del self[session_id]
            return True
        return gone.rowcount == 1

    async def told_elsewhere(self, session_id: str) -> None:
        while self._is_claimed(session_id):
            await asyncio.sleep(POLL_S)

    def _is_claimed(self, session_id: str) -> bool:
        """Also by this worker: a server that left the list and came back has another Endpoint than before."""
        claims = self._read("SELECT until FROM claims WHERE space = ? AND name = ?", session_id)
        return any(until > time.monotonic() for (until,) in claims)
