"""The gateway as a process: its port, and its orderly end."""

from __future__ import annotations

import logging
import resource
import signal
import sys
from collections.abc import Callable, Mapping

import uvicorn
from fastapi import FastAPI

from charonia_gateway.app import create_app
from charonia_gateway.connection import bounded
from charonia_gateway.drain import Drain, DrainingServer
from charonia_gateway.endpoints.server import Server
from charonia_gateway.port import PortError, bound_sockets
from charonia_gateway.settings import Settings

log = logging.getLogger("charonia_gateway")
_OTHER_FILES = 256  # descriptors besides those of clients


def serve(
    settings: Settings,
    servers: Mapping[str, Server] | None = None,
    started: Callable[[FastAPI], None] | None = None,
    obey: Callable[[Callable[[], None], Callable[[], None]], None] | None = None,
    restarted: bool = False,
) -> None:
    """Returns after SIGTERM or SIGINT, when all requests have ended. Call it from the main thread.

    `servers`: as create_app takes them. `started` is called with the application, in the event loop, once the port is
    open. `obey`: this is one of several processes; it is called likewise, with a function that begins to drain, and one
    that does what a signal does. `restarted`: this process replaces one that died. Raises ValueError for a file that
    cannot be used, and PortError."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    sys.setswitchinterval(0.001)  # seconds that the event loop waits for Python's lock while a thread computes
    drain = Drain(settings.shutdown_timeout_s)
    app = create_app(settings, drain, servers, restarted=restarted)
    certificates = settings.certificates()
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        loop="uvloop",
        http=bounded(settings.read_timeout_s, max(1, (hard - _OTHER_FILES) // 2)),
        ws="none",
        log_config=None,
        access_log=False,  # the gateway writes its own access log
        server_header=False,
        # Otherwise uvicorn believes the headers of every client on this machine.
        proxy_headers=bool(settings.trusted_proxies),
        forwarded_allow_ips=settings.trusted_proxies,
        # Longer than clients and load balancers keep idle connections, so that they close them first.
        timeout_keep_alive=75,
        # All requests have ended by then; this is the time for connections to close.
        timeout_graceful_shutdown=1,
        ssl_certfile=settings.tls_cert,
        ssl_keyfile=settings.tls_key,
    )

    def listens() -> None:
        log.info("the gateway listens on %s, port %d", settings.host, settings.port)
        if obey:
            obey(drain.begin, lambda: server.handle_exit(signal.SIGTERM, None))
        if started:
            started(app)

    server = DrainingServer(config, drain, settings.write_timeout_s, certificates, listens)
    # If uvicorn opened them itself, its error would not name the setting.
    sockets = bound_sockets(settings.host, settings.port, shared=obey is not None)
    try:
        server.run(sockets)
    except OSError as error:
        if server.started:
            raise
        raise PortError(settings.host, settings.port, error) from None  # another process took the port after the check
