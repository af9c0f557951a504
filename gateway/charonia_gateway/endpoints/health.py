"""The state of one server: up, suspect, not ready or down, from its checks and its failed requests.

A server whose port is closed, or that ends, is down at once. One that answers and says that it is not ready drains, or
is about to be ready: it gets no new request and keeps those that it has, which come to their end there. A server that
does not answer a check in time is suspect: it may hang, or this machine may be busy. After three such checks in a row
it is down. A suspect server gets no new request while another can take it, but it keeps those that it has. A server
that was not ready or down is up again after two good checks in a row, so that a server that keeps failing does not get
requests in between.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

TIMEOUTS_UNTIL_DOWN = 3
ANSWERS_UNTIL_UP = 2


class State(Enum):
    UP = "up"
    SUSPECT = "suspect"
    NOT_READY = "not ready"
    DOWN = "down"


@dataclass
class Health:
    """State of one server. It begins as down, and is up after its first good check."""

    state: State = State.DOWN
    reason: str = "it has not answered yet"  # why it is not up
    _timeouts: int = 0  # in a row
    _answers_needed: int = 1

    @property
    def usable(self) -> bool:
        """Whether it may get new requests."""
        return self.state in (State.UP, State.SUSPECT)

    def well(self) -> None:
        """A check found it ready."""
        self._timeouts = 0
        self._answers_needed -= not self.usable
        if self._answers_needed <= 0 or self.state is State.SUSPECT:
            self.state, self.reason = State.UP, ""

    def unresponsive(self, why: str) -> None:
        """A check had no answer in time."""
        self._timeouts += 1
        if self.state is State.DOWN or self._timeouts >= TIMEOUTS_UNTIL_DOWN:
            self.away(why)
        else:
            self.suspect(why)

    def away(self, why: str) -> None:
        """A check found it closed or ending."""
        self.state, self.reason = State.DOWN, why
        self._answers_needed = ANSWERS_UNTIL_UP

    def not_ready(self, why: str) -> None:
        """A check had the answer that it takes no new request."""
        self._timeouts = 0
        self.state, self.reason = State.NOT_READY, why
        self._answers_needed = ANSWERS_UNTIL_UP

    def suspect(self, why: str) -> None:
        """A request failed there as Unavailable."""
        if self.usable:
            self.state, self.reason = State.SUSPECT, why
