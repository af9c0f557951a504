"""Checks before the gateway starts: its settings, the files that it reads, and its port.

`python -m charonia_gateway.check` only checks. It prints errors to stderr and ends with code 2, or 1 for the port.
`charonia serve` runs it before it starts Triton.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from pydantic import AliasChoices, ValidationError
from pydantic_settings import CliApp

from charonia_gateway.keys import read_keys
from charonia_gateway.port import PortError, held_port
from charonia_gateway.settings import FILES, Settings
from charonia_gateway.tls import Certificates

_SECRET = "redis_url"  # it may contain a password


class SettingsError(ValueError):
    """A setting cannot be used. The text names it, its value, and the remedy."""


def variable(field: str) -> str:
    """The (first) environment variable of a field."""
    alias = Settings.model_fields[field].validation_alias
    assert isinstance(alias, AliasChoices)
    return str(alias.choices[0]).upper()


def explained(error: ValidationError) -> list[str]:
    """A line for each wrong setting, with its variable, its value and its description."""
    lines = []
    for detail in error.errors(include_url=False):
        reason = str(detail["msg"]).removeprefix("Value error, ")  # pydantic's prefix for the text of a check
        if not detail["loc"]:  # an error of several fields: the input has all fields, and may contain a password
            lines.append(reason)
            continue
        name, field = _named(str(detail["loc"][0]))
        given = detail["input"]
        # Addresses may have a password before their host.
        shown = "" if field == _SECRET or "@" in str(given) else f"={given!r}"
        info = Settings.model_fields[field]
        default = "" if info.default in ("", None) else f"default {info.default}; "
        lines.append(f"{name}{shown}: {reason}. It sets: {info.description} ({default}docs/configuration.md)")
    return lines


def _named(place: str) -> tuple[str, str]:
    """Variable and field of the name under which a value was given. pydantic reports the first name of a field with
    several names, so all of them are named."""
    for field, info in Settings.model_fields.items():
        assert isinstance(info.validation_alias, AliasChoices)
        choices = list(map(str, info.validation_alias.choices))
        if place in choices:
            return " or ".join(name.upper() for name in choices if name.startswith("charonia_")), field
    raise KeyError(place)


def _why_unreadable(path: Path) -> str | None:
    if os.access(path, os.R_OK):
        return None
    try:
        path.stat()
    except FileNotFoundError:
        return "there is no such file"
    except OSError as error:  # a parent folder is not readable, or the name is not valid
        return (error.strerror or str(error)).lower()
    return "permission denied"


def check_files(settings: Settings) -> None:
    """Check the files that the gateway reads at its start or writes, and the URL of Redis. Raises SettingsError."""
    for field in FILES:
        path: Path | None = getattr(settings, field)
        if path and (reason := _why_unreadable(path)):
            more = ", as `charonia keys create` writes it" if field == "keys_file" else ", or leave the setting out"
            raise SettingsError(
                f"{variable(field)}={path} cannot be read ({reason}): name a file that this user may read{more}"
            )
    if (log := settings.log_requests) and (log.is_dir() or not os.access(log if log.exists() else log.parent, os.W_OK)):
        raise SettingsError(
            f"{variable('log_requests')}={log} cannot be written: name a file in an existing folder that this user may "
            "write to"
        )
    with _naming_settings("keys_file"):
        if settings.keys_file:
            read_keys(settings.keys_file)
    with _naming_settings("tls_cert", "tls_key"):
        if settings.tls_cert and settings.tls_key:
            Certificates(settings.tls_cert, settings.tls_key)
    with _naming_settings("tls_client_ca"):
        settings.certificates()
    with _naming_settings("triton_tls_ca", "triton_tls_cert", "triton_tls_key"):
        settings.tls_to_triton()
    if settings.redis_url:
        from charonia_gateway.state import RedisState

        try:
            RedisState(settings.redis_url)
        except ValueError as error:  # the text names the setting, but not the value
            raise SettingsError(str(error)) from None


@contextlib.contextmanager
def _naming_settings(*fields: str) -> Iterator[None]:
    """Let the error of a file name the settings of the file."""
    try:
        yield
    except ValueError as error:
        raise SettingsError(f"{', '.join(map(variable, fields))}: {error}") from None


def check_port(settings: Settings) -> None:
    """Raises PortError if the gateway could not listen now."""
    for one in held_port(settings.host, settings.port):
        one.close()


def main() -> None:
    try:
        settings = CliApp.run(Settings, cli_args=[])
        check_files(settings)
        check_port(settings)
    except ValidationError as error:  # a ValueError, too
        _end(2, *explained(error))
    except SettingsError as error:
        _end(2, str(error))
    except PortError as error:
        _end(1, str(error))


def _end(code: int, *lines: str) -> NoReturn:
    print(*lines, sep="\n", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
