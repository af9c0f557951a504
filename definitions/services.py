"""Generates the settings of launcher and gateway, and other variables: pydantic's fields, and compose's lists."""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from definitions.engine import default_text
from definitions.settings import check_tokens, engine_settings, model_attributes
from definitions.text import comment, head, literal, with_region
from definitions.toml_files import entries

PREFIX = "CHARONIA_"
_DESCRIPTION = 96  # maximum length of a description in a line
_SOURCE = "service_settings.toml"
_TYPES = {"string": "str", "url": "str", "path": "Path", "int": "int", "float": "float", "bool": "bool"}
_READERS = ("serve", "gateway", "processes")


@dataclass(frozen=True)
class ServiceSetting:
    """An entry of service_settings.toml. The head of the file explains the keys."""

    name: str
    of: tuple[str, ...]
    type: str
    help: str
    default: Any = None
    default_from: str = ""
    unset: str = ""
    gateway_default: Any = None
    gateway_names: tuple[str, ...] = ()
    min: float | None = None
    max: float | None = None
    above: float | None = None
    off_below: float | None = None
    choices: tuple[str, ...] = ()
    compose: tuple[str, ...] = ()
    nonempty: bool = False
    tokens: str = ""

    def __post_init__(self) -> None:
        if self.type not in _TYPES:
            raise ValueError(f"[{self.name}] is of type {self.type!r}; expected one of {', '.join(_TYPES)}")
        if not self.of or set(self.of) - set(_READERS):
            raise ValueError(f"[{self.name}] is of {self.of}; expected some of {', '.join(_READERS)}")
        if self.default_from:
            if self.default is not None:
                raise ValueError(f"[{self.name}] has default and default_from; expected one of them")
            shared = {one.name: one.default for one in engine_settings()}
            if self.default_from not in shared:
                raise ValueError(
                    f"[{self.name}] has default_from {self.default_from!r}, which is not an engine setting"
                )
            value = shared[self.default_from]
            whole = isinstance(value, float) and value.is_integer()
            object.__setattr__(self, "default", int(value) if whole else value)
        if self.default is None and not self.unset:
            raise ValueError(f"[{self.name}] needs a default, or unset: a text that describes the default")
        check_tokens(self.name, self.tokens)

    def field(self, reader: str) -> str:
        """Return its name in Python."""
        name = self.name.removeprefix(f"{PREFIX}GATEWAY_") if reader == "gateway" else self.name
        return name.removeprefix(PREFIX).lower()

    def default_of(self, reader: str) -> Any:
        return self.gateway_default if reader == "gateway" and self.gateway_default is not None else self.default

    @property
    def range(self) -> str:
        if self.choices:
            return " | ".join(self.choices)
        if self.type == "bool":
            return "true | false"
        if self.off_below is not None:
            return f"0, or >= {self.off_below}"
        if self.min is not None:
            return f"{self.min} to {self.max}" if self.max is not None else f">= {self.min}"
        return f"> {self.above}" if self.above is not None else ""


@cache
def service_settings() -> tuple[ServiceSetting, ...]:
    return tuple(entries(_SOURCE, ServiceSetting))


@dataclass(frozen=True)
class Variable:
    """An entry of environment.toml. The head of the file explains the keys."""

    name: str
    group: str
    default: str
    help: str


@cache
def variables() -> tuple[Variable, ...]:
    return tuple(entries("environment.toml", Variable))


# --- pydantic's fields


def _field(one: ServiceSetting, reader: str) -> str:
    default = one.default_of(reader)
    kind = _literal(one.choices) if one.choices else _TYPES[one.type]
    shown = literal(default) if isinstance(default, str) else repr(default)
    if one.off_below is not None:
        kind = f"Annotated[{kind}, off_or_at_least({one.off_below})]"
    if one.type == "path" and default is not None:
        shown = f"Path({shown})"
    names = "" if one.name == f"{PREFIX}{one.field(reader).upper()}" else literal(one.name)  # env_prefix
    if reader == "gateway":
        choices = [name.lower() for name in one.gateway_names or (one.name,)] + [one.field(reader)]
        listed = ", ".join(literal(name) for name in choices)
        names = f"AliasChoices({listed})" if len(listed) < 80 else f"AliasChoices(\n            {listed}\n        )"
    rows = [shown]
    rows += [
        f"{key}={bound}" for key, bound in (("ge", one.min), ("le", one.max), ("gt", one.above)) if bound is not None
    ]
    if one.type == "url":
        rows.append(f"pattern={literal('^https?://' if default is None else '^(https?://.+)?$')}")
    elif one.nonempty and default is not None:
        rows.append("min_length=1")
    rows += [f"validation_alias={names}"] * bool(names)
    # One word per line, so that no line is too long.
    words = one.help + (f"; default: {one.unset}" if one.unset and not default else "")
    rows.append("description=" + _wrapped(words))
    arguments = "".join(f"        {row},\n" for row in rows)
    return f"    {one.field(reader)}: {kind}{' | None' if default is None else ''} = Field(\n{arguments}    )\n"


def _literal(choices: Sequence[str]) -> str:
    """Return a Literal type, wrapped over several lines if it is long."""
    rows = [literal(choice) for choice in choices]
    joined = ", ".join(rows)
    if len(joined) < 80:
        return f"Literal[{joined}]"
    return "Literal[" + "".join(f"\n        {row}," for row in rows) + "\n    ]"


def _wrapped(text: str) -> str:
    """Return a string literal, wrapped over several lines if it is long."""
    if len(literal(text)) <= _DESCRIPTION + 3:
        return literal(text)
    rows = textwrap.wrap(text, _DESCRIPTION, drop_whitespace=False)
    return literal(rows[0]) + "".join(f"\n        {literal(row)}" for row in rows[1:])


def _similar(own: set[str]) -> list[str]:
    """Return the variables that charonia.settings.misspelled() could take for a misspelled one of these."""
    known = own | {f"{PREFIX}{one.name.upper()}" for one in (*engine_settings(), *model_attributes())}
    others = {one.name for one in variables()}
    for one in service_settings():
        others |= {one.name, *one.gateway_names}
    return [name for name in sorted(others - known) if difflib.get_close_matches(name, known, n=1, cutoff=0.85)]


def fields(reader: str) -> str:
    own = [one for one in service_settings() if reader in one.of]
    text = "".join(_field(one, reader) for one in own)
    imports = ["from __future__ import annotations\n"]
    imports += ["from pathlib import Path" if "Path" in text else ""]
    annotated = "Annotated, " if "Annotated[" in text else ""
    imports += [f"from typing import {annotated}Literal\n"]
    alias = "AliasChoices, " if reader == "gateway" else ""
    end = "\n\n\n" if not annotated else "\n\nfrom charonia.setting_types import off_or_at_least\n\n\n"
    base = "BaseSettings" if reader == "gateway" else "BaseSettings, SettingsConfigDict"
    imports += [f"from pydantic import {alias}Field", f"from pydantic_settings import {base}{end}"]
    name = {"serve": "ServeFields", "gateway": "GatewayFields"}[reader]
    shared = [one.field(reader) for one in own if "processes" in one.of]
    tail = ""
    if reader == "serve":
        rows = "".join(f"    {literal(field)},\n" for field in shared)
        tail = f"\n\n# Settings that every process of the stack reads.\nSHARED = (\n{rows})\n"
        names = "".join(f"    {literal(name)},\n" for name in _similar({one.name for one in own}))
        tail += f"\n# Variables of other processes and scripts with similar names.\nSIMILAR = (\n{names})\n"
    return (
        head("#", _SOURCE, *(["environment.toml"] if reader == "serve" else []))
        + f'"""The fields of {"the launcher" if reader == "serve" else "the gateway"}\'s settings."""\n\n'
        + "\n".join(line for line in imports if line)
        + f"class {name}(BaseSettings):\n"
        + ('    model_config = SettingsConfigDict(env_prefix="CHARONIA_")\n\n' if reader == "serve" else "")
        + text
        + tail
    )


# --- docker-compose.yml


def compose() -> str:
    text: str | None = None
    for service in ("server", "gateway"):
        names = [one.name for one in service_settings() if service in one.compose]
        if service == "server":
            names = [f"{PREFIX}{one.name.upper()}" for one in engine_settings() if not one.ignored] + names
        indent = 4 if service == "server" else 6
        rows = "".join(f"{' ' * indent}{name}:\n" for name in names)
        text = with_region("docker-compose.yml", f"environment of the {service}", rows, text)
    assert text is not None
    return text


# --- settings of logs, for the engine and Triton's Python models, which do not use pydantic

# The values that pydantic reads as true, ignoring case.
TRUE_WORDS = ("1", "true", "yes", "on", "t", "y")


def log_settings() -> tuple[ServiceSetting, ...]:
    return tuple(one for one in service_settings() if "processes" in one.of and "_LOG" in one.name)


def _constant(one: ServiceSetting) -> str:
    return "k" + one.name.removeprefix(PREFIX).title().replace("_", "")


def log_header() -> str:
    text = head("//", _SOURCE) + "// The log settings that the engine's processes read from the environment.\n"
    text += "#pragma once\n\n"
    text += "#include <array>\n#include <string_view>\n\nnamespace charonia::log_settings {\n\n"
    words = ", ".join(literal(word) for word in TRUE_WORDS)
    text += "// True values, ignoring case; all other values are false.\n"
    text += f"inline constexpr std::array<std::string_view, {len(TRUE_WORDS)}> kTrueWords = {{{words}}};\n"
    for one in log_settings():
        text += "\n" + comment("//", one.help, 0)
        text += f"inline constexpr const char* {_constant(one)} = {literal(one.name)};\n"
        for choice in one.choices:
            text += f"inline constexpr std::string_view {_constant(one)}{choice.title()} = {literal(choice)};\n"
    return text + "\n}  // namespace charonia::log_settings\n"


def model_log() -> str:
    rows = f"_TRUE_WORDS = ({', '.join(literal(word) for word in TRUE_WORDS)})\n"
    for one in log_settings():
        name = f"_{one.name.removeprefix(PREFIX)}"
        rows += f"{name} = {literal(one.name)}\n"
        rows += "".join(f"{name}_{choice.upper()} = {literal(choice)}\n" for choice in one.choices)
    return with_region("model_repository/model_log.py", "names of settings", rows)


# --- the settings on which the tokens of a request depend


def fingerprint_settings() -> str:
    rows = "".join(
        f"    {literal(one.name)}: {literal(default_text(one, 'engine')) if one.tokens == 'differ' else None},\n"
        for one in engine_settings()
    )
    text = f"SETTINGS: dict[str, str | None] = {{\n{rows}}}\n"
    names = "".join(
        f"    {literal(one.name)}: {literal(str(one.default))},\n"
        for one in service_settings()
        if one.tokens == "differ"
    )
    text += f"VARIABLES = {{\n{names}}}\n"
    return with_region("preprocessing/model_fingerprint.py", "settings that change tokens", text)


FILES: dict[str, Callable[[], str]] = {
    "engine/src/base/generated/log_settings.h": log_header,
    "model_repository/model_log.py": model_log,
    "charonia/serve_fields.py": partial(fields, "serve"),
    "gateway/charonia_gateway/setting_fields.py": partial(fields, "gateway"),
    "docker-compose.yml": compose,
    "preprocessing/model_fingerprint.py": fingerprint_settings,
}
