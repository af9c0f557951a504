"""One of several processes of a gateway.

It listens on the port with its own socket: the kernel distributes connections over all sockets with SO_REUSEPORT. It
obeys its supervisor and ignores signals, because a terminal and systemd send them to all processes."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection

from charonia_gateway.imports import without_gc
from charonia_gateway.port import PortError
from charonia_gateway.settings import Settings
from charonia_gateway.workers import SETTINGS_EXIT_CODE

log = logging.getLogger("charonia_gateway")


def main() -> None:
    """`python -m charonia_gateway.worker DESCRIPTOR`, the descriptor of the connection to the supervisor."""
    _ignore_signals()
    supervisor = Connection(int(sys.argv[1]))
    settings: Settings
    settings, restarted = supervisor.recv()
    with without_gc():
        from charonia_gateway.logs import configure_logging
        from charonia_gateway.process import serve

    configure_logging(settings)

    def obey(drain: Callable[[], None], stop: Callable[[], None]) -> None:
        """Call `stop` for each order of the supervisor, and `drain` when it dies."""
        _ignore_signals()  # uvicorn has set its own handlers

        def read() -> None:
            try:
                supervisor.recv()
            except (EOFError, OSError):
                asyncio.get_running_loop().remove_reader(supervisor.fileno())
                drain()
            else:
                stop()

        asyncio.get_running_loop().add_reader(supervisor.fileno(), read)

    try:
        serve(settings, obey=obey, restarted=restarted)
    except ValueError as error:  # a file cannot be used
        print(f"charonia_gateway: {error}", file=sys.stderr)
        sys.exit(SETTINGS_EXIT_CODE)
    except PortError as error:
        log.error("%s", error)
        sys.exit(1)


def _ignore_signals() -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


if __name__ == "__main__":
    main()
