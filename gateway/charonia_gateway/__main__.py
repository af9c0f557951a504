"""`python -m charonia_gateway`: the gateway as a process, or as several below this one. On SIGTERM and SIGINT it drains
and ends with code 0."""

from __future__ import annotations

import signal
import sys

from pydantic import ValidationError
from pydantic_settings import CliApp

from charonia_gateway.cores import default_workers
from charonia_gateway.logs import configure_logging
from charonia_gateway.process import serve
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
    workers = settings.workers or default_workers()
    try:
        if workers == 1:
            serve(settings)
            return
        from charonia_gateway.workers import supervise

        sys.exit(supervise(settings, workers))
    except ValueError as error:  # of a file
        print(f"charonia_gateway: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
