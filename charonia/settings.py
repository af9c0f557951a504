"""Settings of `charonia serve` from options, the environment and `.env` (docs/configuration.md).

definitions/service_settings.toml defines them. The inference parameters (CHARONIA_<KEY>) are settings of the engine and
are only passed on here.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dotenv import dotenv_values
from pydantic import ValidationError
from pydantic_settings import SettingsConfigDict

from charonia.errors import InvalidRequestError
from charonia.serve_fields import SHARED, SIMILAR, ServeFields

ENV_FILE = Path(".env")
PREFIX = "CHARONIA_"
# Settings of preprocessing that say how requests and responses have tools and reasoning.
OF_ANSWERS = ("chat_template", "tool_call_parser", "generic_tools", "reasoning_parser")


class ServeSettings(ServeFields):
    """Precedence: keyword arguments, environment, `.env`, defaults."""

    model_config = SettingsConfigDict(
        env_file=ENV_FILE, env_file_encoding="utf-8", env_ignore_empty=True, extra="ignore", populate_by_name=True
    )


def shared_environment(settings: ServeSettings) -> dict[str, str]:
    """Return the settings that all processes read, as environment variables."""
    values = {env_name(name): getattr(settings, name) for name in SHARED}
    return {name: _text(value) for name, value in values.items() if value is not None}


def _text(value: str | bool | Path) -> str:
    """Return a value for another process, which may run in another folder."""
    if isinstance(value, Path):
        return str(value.expanduser().absolute())
    return str(int(value)) if isinstance(value, bool) else value


def of_answers(settings: ServeSettings) -> dict[str, str]:
    """Return the settings of preprocessing, as environment variables."""
    wanted = {env_name(name) for name in OF_ANSWERS}
    return {name: value for name, value in shared_environment(settings).items() if name in wanted}


def env_name(field: str) -> str:
    """Return the environment variable of a field."""
    return str(ServeSettings.model_fields[field].validation_alias or PREFIX + field.upper())


def read_settings(**given: Any) -> ServeSettings:
    """Return the settings. `given` overrides; its None entries are ignored. Raises InvalidRequestError with the
    variable, its value and the remedy."""
    try:
        return ServeSettings(**{name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        first = error.errors()[0]
        place = str(first["loc"][0])
        fields = {
            alias: info for field, info in ServeSettings.model_fields.items() for alias in (field, env_name(field))
        }
        name = env_name(place) if place in ServeSettings.model_fields else place
        more = ""
        if info := fields.get(place):
            default = "" if info.default is None else f"default {info.default}; "
            more = f". It sets: {info.description} ({default}docs/configuration.md)"
        # An address may contain a password.
        shown = "" if "@" in str(first["input"]) else f"={first['input']!r}"
        raise InvalidRequestError(f"{name}{shown}: {first['msg']}{more}") from None


def environment() -> dict[str, str]:
    """Return the process's environment merged over `.env`; empty values count as not set."""
    dotenv = {name: value for name, value in dotenv_values(ENV_FILE).items() if value}
    return {**dotenv, **{name: value for name, value in os.environ.items() if value}}


def inference_settings(given: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the inference parameters that are set, by key. Precedence: `given`, environment, `.env`.

    Raises InvalidRequestError for a value that the engine does not allow, or for an unknown key.
    """
    from charonia import _engine

    keys = {entry.key for entry in _engine.config_fields() if not entry.model_attribute}
    values = environment()
    settings = {key: values[PREFIX + key.upper()] for key in sorted(keys) if PREFIX + key.upper() in values}
    settings.update(given or {})
    _engine.check_settings(settings)
    return settings


def misspelled() -> list[str]:
    """Return warnings about unused CHARONIA_ variables with names similar to used ones."""
    from charonia import _engine

    known = {PREFIX + entry.key.upper() for entry in _engine.config_fields()}
    known |= {env_name(field) for field in ServeSettings.model_fields}
    warnings = []
    for name in sorted(environment()):
        if name.startswith(PREFIX) and name not in known and name not in SIMILAR:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.85)
            if near:
                warnings.append(f"{name} is unknown and ignored; did you mean {near[0]}?")
    return warnings
