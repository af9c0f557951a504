"""What the workers of one gateway know together: an SQLite database in a folder that is theirs alone.

A worker may be killed at any time. SQLite then undoes what it had begun, the kernel takes back its locks, and the
supervisor forgets what stood for that worker's requests. Every change is one statement, so no lock is held for longer
than microseconds. Nothing of it outlives the gateway, so nothing is written through to a disk.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

log = logging.getLogger("charonia_gateway")

_FILE = "state.sqlite"
_WAIT_S = 0.1  # for another process' statement, which takes microseconds; the event loop waits as well
_PAUSE_S = 1.0  # without a write, once that was too short: nothing of a worker waits meanwhile
_LOG_EVERY_S = 5.0
_LATER_S = 1.0
_JOURNAL_BYTES = 4 << 20  # that the journal keeps after a larger change
_SCHEMA = """
CREATE TABLE windows (name TEXT PRIMARY KEY, count INTEGER NOT NULL, expires REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE running (key TEXT, worker INTEGER, count INTEGER NOT NULL, PRIMARY KEY (key, worker)) WITHOUT ROWID;
CREATE TABLE calls (server TEXT, id TEXT, worker INTEGER NOT NULL, PRIMARY KEY (server, id)) WITHOUT ROWID;
CREATE TABLE endpoints (
    model TEXT, target TEXT, worker INTEGER, up INTEGER NOT NULL, tokens INTEGER NOT NULL,
    PRIMARY KEY (model, target, worker)
) WITHOUT ROWID;
CREATE TABLE recent (
    space TEXT, name TEXT, value TEXT, used REAL NOT NULL, gone INTEGER NOT NULL, PRIMARY KEY (space, name)
) WITHOUT ROWID;
CREATE INDEX recent_used ON recent (space, gone, used DESC);
CREATE TABLE claims (
    space TEXT, name TEXT, worker INTEGER NOT NULL, until REAL NOT NULL, PRIMARY KEY (space, name)
) WITHOUT ROWID;
CREATE TABLE responses (
    id TEXT PRIMARY KEY, owner TEXT, session TEXT NOT NULL, at REAL NOT NULL, bytes INTEGER NOT NULL, continued INTEGER,
    response BLOB NOT NULL, conversation BLOB NOT NULL
);
CREATE INDEX responses_at ON responses (at, bytes);
CREATE INDEX responses_session ON responses (session);
"""
_OF_WORKERS = ("running", "endpoints", "claims")
CONTINUED = 0  # of an answer: no worker has this number
LOST = 0  # of a request at a server: its worker has died


def create(folder: Path) -> None:
    """Makes the database in an empty folder."""
    with sqlite3.connect(folder / _FILE) as database:
        database.execute("PRAGMA journal_mode = WAL")
        database.executescript(_SCHEMA)
    database.close()


class Shared:
    """One process' access. worker: its number; 0: the supervisor. Each method may raise sqlite3.Error, which is
    logged: whoever can goes on with what this process knows itself."""

    def __init__(self, folder: Path, worker: int = 0) -> None:
        self.folder = folder
        self.worker = worker
        # A file that is missing is not made anew, without tables.
        file = f"{(folder / _FILE).absolute().as_uri()}?mode=rw"
        self._database = sqlite3.connect(file, timeout=_WAIT_S, isolation_level=None, uri=True)
        self._database.execute("PRAGMA synchronous = OFF")
        self._database.execute("PRAGMA secure_delete = ON")  # what is deleted cannot be read any more
        self._database.execute(f"PRAGMA journal_size_limit = {_JOURNAL_BYTES}")
        self._pause_until = 0.0
        self._log_at = 0.0
        self._later: set[Callable[[], None]] = set()

    def run(self, statement: str, values: Sequence[Any] = ()) -> sqlite3.Cursor:
        """One statement, which is a transaction."""
        if time.monotonic() < self._pause_until and not statement.startswith("SELECT"):  # reading waits for nobody
            raise sqlite3.OperationalError("database is locked")
        try:
            return self._database.execute(statement, values)
        except sqlite3.Error as error:
            self._failed(error)
            raise

    def _failed(self, error: sqlite3.Error) -> None:
        now = time.monotonic()
        if self.worker and "locked" in str(error):
            self._pause_until = now + _PAUSE_S
        if now >= self._log_at:
            self._log_at = now + _LOG_EVERY_S
            log.error("what the gateway's workers share cannot be had now, or not be changed: %s", error)

    def later(self, write: Callable[[], None]) -> None:
        """`write` failed, and is called again until it works. It must not raise, but call this again."""
        self._later.add(write)

    async def follow(self) -> None:
        """Does what later() says, until it is cancelled."""
        while True:
            await asyncio.sleep(_LATER_S)
            self.write_late()

    def write_late(self) -> None:
        waiting, self._later = self._later, set()
        for write in waiting:
            write()

    def close(self) -> None:
        self._database.close()

    def forget(self, worker: int) -> None:
        """Of a worker that has ended: what it had running. Another one cancels that at the servers."""
        self.run("UPDATE calls SET worker = ? WHERE worker = ?", (LOST, worker))
        for table in _OF_WORKERS:
            self.run(f"DELETE FROM {table} WHERE worker = ?", (worker,))
        self.run("UPDATE responses SET continued = NULL WHERE continued = ?", (worker,))

    # --- the windows of limits

    def count(self, name: str, amount: int, length_s: float) -> int:
        """Adds to a window that begins with its first count and lasts `length_s`. Its count."""
        now = time.time()
        row = self.run(
            "INSERT INTO windows VALUES (?1, ?2, ?3 + ?4) ON CONFLICT DO UPDATE SET "
            "count = CASE WHEN expires <= ?3 THEN ?2 ELSE count + ?2 END, "
            "expires = CASE WHEN expires <= ?3 THEN ?3 + ?4 ELSE expires END RETURNING count",
            (name, amount, now, length_s),
        ).fetchall()
        return int(row[0][0])

    def window(self, name: str) -> tuple[int, float]:
        """Count and end, in seconds since the epoch, of a window; of none: 0, and now."""
        now = time.time()
        row = self.run("SELECT count, expires FROM windows WHERE name = ? AND expires > ?", (name, now)).fetchone()
        return (int(row[0]), float(row[1])) if row else (0, now)

    def clear_window(self, name: str | None) -> int:
        """None: all."""
        return self.run("DELETE FROM windows WHERE ?1 IS NULL OR name = ?1", (name,)).rowcount

    # --- requests at once

    def begin_running(self, key: str, here: int, limit: int) -> bool:
        """Where this worker's requests of the key and those of the others are fewer than `limit`: one more than the
        `here` that this worker had. False where they are not."""
        return (
            self.run(
                "INSERT INTO running SELECT ?1, ?2, ?3 + 1 WHERE ?3 + "
                "(SELECT COALESCE(SUM(count), 0) FROM running WHERE key = ?1 AND worker <> ?2) < ?4 "
                "ON CONFLICT DO UPDATE SET count = excluded.count",
                (key, self.worker, here, limit),
            ).rowcount
            == 1
        )

    def set_running(self, key: str, here: int) -> None:
        self.run(
            "INSERT INTO running VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET count = excluded.count",
            (key, self.worker, here),
        )

    # --- the endpoints' state, as each worker sees it

    def tell_endpoints(self, rows: Iterable[tuple[str, str, bool, int]]) -> None:
        """(model, target, up, outstanding tokens) of this worker's endpoints, in place of those before."""
        self.run("BEGIN IMMEDIATE")
        try:
            self.run("DELETE FROM endpoints WHERE worker = ?", (self.worker,))
            self._database.executemany(
                "INSERT INTO endpoints VALUES (?, ?, ?, ?, ?)",
                [(model, target, self.worker, up, tokens) for model, target, up, tokens in rows],
            )
            self.run("COMMIT")
        except BaseException:
            self._database.rollback()
            raise

    def endpoints(self) -> list[tuple[str, str, bool, int]]:
        """(model, target, whether every worker finds it up, outstanding tokens of all workers)."""
        rows = self.run("SELECT model, target, MIN(up), SUM(tokens) FROM endpoints GROUP BY model, target")
        return [(str(model), str(target), bool(up), int(tokens)) for model, target, up, tokens in rows]
