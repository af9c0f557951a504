"""The program of one of several processes of a gateway."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sqlite3
import sys
from multiprocessing.connection import Connection

from charonia_gateway.folder import hold, remove_unheld
from charonia_gateway.imports import kept
from charonia_gateway.port import PortError
from charonia_gateway.worker import Post, Worker

log = logging.getLogger("charonia_gateway")


def main() -> None:
    """`python -m charonia_gateway.worker_main DESCRIPTOR`: of the connection to the supervisor, which starts it."""
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
    with kept():
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
    main()
