"""What checks and failed requests say of a server, made into one verdict.

A check with an answer is a fact: a server that says that it is not ready, or whose port is closed, is down at once. A
check without one is a doubt: the server may hang, or this machine may be busy. Three in a row make it a fact. A server
in doubt has no new request while another can take it, but none of its requests is taken from it. One that was down
comes back after two good checks in a row, so that one which comes and goes does not take requests with it each time.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

SILENCES_UNTIL_DOWN = 3
ANSWERS_UNTIL_UP = 2


class State(Enum):
    UP = "up"
    IN_DOUBT = "in doubt"
    DOWN = "down"


@dataclass
class Health:
    """One server's. A server that nobody has asked yet is down, and up with its first good check."""

    state: State = State.DOWN
    reason: str = "it has not answered yet"  # why it is not up
    _silences: int = 0  # in a row
    _answers_needed: int = 1

    def well(self) -> None:
        """A check found it ready."""
        self._silences = 0
        self._answers_needed -= self.state is State.DOWN
        if self._answers_needed <= 0 or self.state is State.IN_DOUBT:
            self.state, self.reason = State.UP, ""

    def silent(self, why: str) -> None:
        """A check had no answer in time."""
        self._silences += 1
        if self.state is State.DOWN or self._silences >= SILENCES_UNTIL_DOWN:
            self.away(why)
        else:
            self.doubt(why)

    def away(self, why: str) -> None:
        """A check found it closed or not ready."""
        self.state, self.reason = State.DOWN, why
        self._answers_needed = ANSWERS_UNTIL_UP

    def doubt(self, why: str) -> None:
        """A request failed there for want of the server."""
        if self.state is not State.DOWN:
            self.state, self.reason = State.IN_DOUBT, why
