"""One of several processes of a gateway: it has a socket of its own on the port, and does what the supervisor says.

The kernel spreads connections over the sockets that listen on a port with SO_REUSEPORT. A process that dies leaves
none, so that nothing waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import signal
import sqlite3
import sys
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal

from charonia_gateway.folder import hold, remove_unheld
from charonia_gateway.port import PortError
from charonia_gateway.settings import Settings
from charonia_gateway.shared import Shared

log = logging.getLogger("charonia_gateway")

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


def main() -> None:
    """`python -m charonia_gateway.worker DESCRIPTOR`: of the connection to the supervisor, which starts it."""
    for number in (signal.SIGTERM, signal.SIGINT):  # as in charonia_gateway.__main__
        signal.signal(number, lambda *_: sys.exit(0))
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # not with nohup
        signal.signal(signal.SIGHUP, lambda *_: sys.exit(0))
    connection = Connection(int(sys.argv[1]))
    try:
        post: Post = connection.recv()
    except EOFError:
        sys.exit(0)
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(post.folder)
    from prometheus_client import values

    # By number: the one that replaces another goes on with its counters, and there are no more files than workers.
    values.ValueClass = values.MultiProcessValue(lambda: post.number)  # type: ignore[no-untyped-call]
    from charonia_gateway.logs import configure_logging
    from charonia_gateway.process import serve

    configure_logging(post.settings)
    try:
        held = hold(post.folder)
        worker = Worker(post, connection)
    except (OSError, sqlite3.Error) as error:
        log.error("what the workers of this gateway share is gone, or cannot be had: %s", error)
        sys.exit(1)
    try:
        serve(post.settings, worker=worker)
    except ValueError as error:  # of a file
        print(f"charonia_gateway: {error}", file=sys.stderr)
        sys.exit(2)
    except PortError as error:
        log.error("%s", error)
        sys.exit(1)
    finally:
        if worker.is_orphan:  # the last one does what the supervisor would have done
            with contextlib.suppress(OSError):
                remove_unheld(post.folder, held)


if __name__ == "__main__":
    # Not this module once more, beside the one that `post` is of.
    from charonia_gateway import worker

    worker.main()
