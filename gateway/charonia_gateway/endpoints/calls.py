"""Which requests a server has, so that what a worker leaves there that dies is cancelled by another one.

Triton does not tell the engine that the caller of its ensemble has gone (docs/contracts.md, "Stopping a request").
"""

from __future__ import annotations

import sqlite3

from charonia_gateway.shared import LOST, Shared


class Calls:
    """Of one server, of all workers. What the database does not take now is written when it does."""

    def __init__(self, shared: Shared, server: str) -> None:
        """server: its name among others."""
        self._shared = shared
        self._server = server
        self._untold: dict[str, bool] = {}  # by request id: whether it runs

    def begin(self, id: str) -> None:
        """Before the server is asked."""
        self._untold[id] = True
        self._tell()

    def end(self, id: str) -> None:
        if self._untold.pop(id, False):  # nobody has heard of it
            return
        self._untold[id] = False
        self._tell()

    def take_lost(self) -> list[str]:
        """The requests of workers that have died, which are this one's from now on: end() or give_back() follows."""
        try:
            # Reading alone takes no lock, and nearly always there are none.
            lost = "SELECT 1 FROM calls WHERE server = ? AND worker = ? LIMIT 1"
            if not self._shared.run(lost, (self._server, LOST)).fetchall():
                return []
            taken = self._shared.run(
                "UPDATE calls SET worker = ? WHERE server = ? AND worker = ? RETURNING id",
                (self._shared.worker, self._server, LOST),
            )
            return [str(id) for (id,) in taken.fetchall()]
        except sqlite3.Error:
            return []

    def give_back(self, id: str) -> None:
        """One of take_lost() of which the server could not be told."""
        try:
            self._shared.run("UPDATE calls SET worker = ? WHERE server = ? AND id = ?", (LOST, self._server, id))
        except sqlite3.Error:
            self._shared.later(lambda: self.give_back(id))

    def _tell(self) -> None:
        try:
            for id, runs in list(self._untold.items()):
                if runs:
                    values = (self._server, id, self._shared.worker)
                    self._shared.run("INSERT OR REPLACE INTO calls VALUES (?, ?, ?)", values)
                else:
                    self._shared.run("DELETE FROM calls WHERE server = ? AND id = ?", (self._server, id))
                del self._untold[id]
        except sqlite3.Error:
            self._shared.later(self._tell)
