"""The gateway as a process: its port, its end in order."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial

import uvicorn
from fastapi import FastAPI

from charonia_gateway.app import create_app
from charonia_gateway.connection import bounded
from charonia_gateway.drain import Drain, DrainingServer
from charonia_gateway.endpoints.server import Server
from charonia_gateway.port import PortError, bound_sockets
from charonia_gateway.settings import Settings
from charonia_gateway.worker import Worker

log = logging.getLogger("charonia_gateway")


def serve(
    settings: Settings,
    servers: Mapping[str, Server] | None = None,
    started: Callable[[FastAPI], None] | None = None,
    worker: Worker | None = None,
) -> None:
    """Returns after SIGTERM or SIGINT, when all has ended; call it from the main thread. `servers`: as create_app takes
    them. `started` is called with the application, in the event loop, once the port is open. `worker`: which of several
    processes this is. Raises ValueError for a file that cannot be used, PortError where it cannot listen."""
    drain = Drain(settings.shutdown_timeout_s, idle=worker.is_idle) if worker else Drain(settings.shutdown_timeout_s)
    app = create_app(settings, drain, servers, worker)
    certificates = settings.certificates()
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        loop="uvloop",
        http=bounded(settings.read_timeout_s),
        ws="none",
        log_config=None,
        access_log=False,  # the gateway has its own
        server_header=False,
        # Longer than what clients and load balancers keep idle connections for, so that they close first.
        timeout_keep_alive=75,
        # What has not ended by then has had its time; this is for connections to close.
        timeout_graceful_shutdown=1,
        ssl_certfile=settings.tls_cert,
        ssl_keyfile=settings.tls_key,
    )

    def listens() -> None:
        log.info("the gateway listens on %s, port %d", settings.host, settings.port)
        if started:
            started(app)

    def end() -> None:
        server.should_exit = True

    def close() -> None:
        for one in server.servers:
            one.close()

    on_start = partial(worker.listens, drain.begin, end, close) if worker else listens
    server = DrainingServer(config, drain, settings.write_timeout_s, certificates, on_start)
    # uvicorn, which would open them itself, names no setting where it cannot.
    sockets = bound_sockets(settings.host, settings.port, shared=worker is not None)
    try:
        server.run(sockets)
    except OSError as error:
        if server.started:
            raise
        raise PortError(settings.host, settings.port, error) from None  # taken since
