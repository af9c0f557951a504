"""One of several processes of a gateway: it has a socket of its own on the port, and does what the supervisor says.

The kernel spreads connections over the sockets that listen on a port with SO_REUSEPORT. A process that dies leaves
none, so that nothing waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal

from charonia_gateway.settings import Settings
from charonia_gateway.shared import Shared

# From a worker: it listens; its event loop gets on; since it is to end, nothing runs any more. To a worker: all have
# listened once; take no new request; end now.
Message = Literal["ready", "alive", "idle", "started", "drain", "end"]


@dataclass(frozen=True)
class Post:
    """What a worker is told first. began: when the gateway did, seconds since the epoch. restarted: it replaces one."""

    settings: Settings
    number: int  # from 1
    folder: Path  # what the workers share
    began: int
    restarted: bool
    alive_s: float  # how often it says that it is alive


class Worker:
    """What the application and its server know of the other workers."""

    def __init__(self, post: Post, connection: Connection) -> None:
        self.began = post.began
        self.restarted = post.restarted
        self.shared = Shared(post.folder, post.number)
        self.all_started = False  # every worker has listened once
        self.is_orphan = False  # the supervisor has died
        self._connection = connection
        self._alive_s = post.alive_s
        self._idle = False

    def is_idle(self) -> bool:
        """Nothing runs here, and no new request is taken. False: the supervisor says when all may end."""
        if self.is_orphan:
            return True
        if not self._idle:
            self._idle = True
            self._send("idle")
        return False

    def listens(self, drain: Callable[[], None], end: Callable[[], None], close: Callable[[], None]) -> None:
        """In the event loop, once the port is open. `drain` and `end` are called when the supervisor says so; `close`
        leaves the port to a gateway that takes this one's place."""
        actions: dict[Message, Callable[[], None]] = {"started": self._started, "drain": drain, "end": end}
        loop = asyncio.get_running_loop()

        def read() -> None:
            try:
                actions[self._connection.recv()]()
            except (EOFError, OSError):
                self.is_orphan = True
                loop.remove_reader(self._connection.fileno())
                close()
                drain()

        loop.add_reader(self._connection.fileno(), read)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            loop.add_signal_handler(signal.SIGHUP, drain)
        self._send("ready")
        self._live()

    def _live(self) -> None:
        takes = select.poll()
        takes.register(self._connection.fileno(), select.POLLOUT)
        if takes.poll(0):  # a supervisor that is stopped reads nothing, and stops nobody
            self._send("alive")
        asyncio.get_running_loop().call_later(self._alive_s, self._live)

    def _started(self) -> None:
        self.all_started = True

    def _send(self, message: Message) -> None:
        with contextlib.suppress(OSError):
            self._connection.send(message)


if __name__ == "__main__":
    sys.exit("this gateway's package was exchanged while it ran: restart the gateway")
