"""`python -m charonia_gateway`: the gateway as a process, or as several below this one. On SIGTERM and SIGINT it drains
and ends with code 0."""

from __future__ import annotations

import logging
import signal
import sys
from typing import NoReturn

from pydantic import ValidationError
from pydantic_settings import CliApp

from charonia_gateway.check import SettingsError, check_files, explained
from charonia_gateway.imports import without_gc
from charonia_gateway.logs import configure_logging
from charonia_gateway.port import PortError, is_loopback, machine_names
from charonia_gateway.settings import Settings

log = logging.getLogger("charonia_gateway")


def _settings() -> Settings:
    try:
        settings = CliApp.run(Settings)
        check_files(settings)
    except ValidationError as error:  # a ValueError, too
        _refuse(*explained(error))
    except SettingsError as error:
        _refuse(str(error))
    return settings


def _refuse(*lines: str) -> NoReturn:
    for line in lines:
        print(f"charonia_gateway: {line}", file=sys.stderr)
    sys.exit(2)


def main() -> None:
    settings = _settings()
    configure_logging(settings)
    if settings.keys_file is None and not is_loopback(settings.host):
        log.warning(
            "the gateway listens on %s without API keys: anyone with access to port %d can use the models; "
            "set CHARONIA_GATEWAY_KEYS_FILE to require keys. Its pages work under an IP address, localhost and names "
            "of this machine (%s); CHARONIA_GATEWAY_ALLOWED_ORIGINS=http://NAME:%d adds a name",
            settings.host,
            settings.port,
            ", ".join(sorted(machine_names())),
            settings.port,
        )
    if settings.log_requests:
        log.warning(
            "the texts of all prompts are written to %s, because CHARONIA_GATEWAY_LOG_REQUESTS is set",
            settings.log_requests,
        )
    # After its shutdown uvicorn raises the signal again, which would then set the exit code.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))
    from charonia_gateway.workers import default_workers, supervise

    workers = settings.workers or (default_workers() if settings.redis_url else 1)
    try:
        if workers > 1:
            sys.exit(supervise(settings, workers))
        with without_gc():
            from charonia_gateway.process import serve
        serve(settings)
    except ValueError as error:  # an unusable file
        _refuse(str(error))
    except PortError as error:
        log.error("%s", error)
        sys.exit(1)


if __name__ == "__main__":
    main()
