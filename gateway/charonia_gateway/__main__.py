"""`python -m charonia_gateway`: the gateway as a process. On SIGTERM and SIGINT it drains and ends with code 0."""

from __future__ import annotations

import signal
import sys

import uvicorn
from pydantic import ValidationError
from pydantic_settings import CliApp

from charonia_gateway.app import create_app
from charonia_gateway.connection import bounded
from charonia_gateway.drain import Drain, DrainingServer
from charonia_gateway.logs import configure_logging
from charonia_gateway.settings import Settings

_SECRET = ("charonia_gateway_limits_storage", "limits_storage")


def _settings() -> Settings:
    try:
        return CliApp.run(Settings)
    except ValidationError as error:
        for detail in error.errors():
            name = ".".join(str(part) for part in detail["loc"])
            # A storage's address may hold a password, and an error of no field has all of them.
            shown = "" if not name or name in _SECRET else f" = {detail['input']!r}"
            print(f"charonia_gateway: {name}{shown}{': ' if name else ''}{detail['msg']}", file=sys.stderr)
        sys.exit(2)


def main() -> None:
    settings = _settings()
    configure_logging(settings)
    # uvicorn shuts down in order and then raises the signal again, which would make its number the exit code.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))
    drain = Drain(settings.shutdown_timeout_s)
    try:
        app = create_app(settings, drain)
        certificates = settings.certificates()
    except ValueError as error:  # of a file
        print(f"charonia_gateway: {error}", file=sys.stderr)
        sys.exit(2)
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
    DrainingServer(config, drain, settings.write_timeout_s, certificates).run()


if __name__ == "__main__":
    main()
