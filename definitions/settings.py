"""Reads the definitions of engine settings and model attributes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from definitions.sampling import SamplingParameter, parameters
from definitions.toml_files import entries

TOKENS = ("same", "differ", "reported")
_TYPES = ("int", "float", "bool", "string", "ints", "floats")


@dataclass(frozen=True)
class Setting:
    """An entry of engine_settings.toml or model_attributes.toml. The heads of these files explain the keys."""

    name: str
    type: str
    help: str
    default: Any = None
    min: float | None = None
    max: float | None = None
    above: float | None = None
    choices: tuple[Any, ...] = ()
    check: str = ""
    values: str = ""
    note: str = ""
    member: str = ""
    required: bool = False
    ignored: bool = False
    tokens: str = ""

    def __post_init__(self) -> None:
        if self.type not in _TYPES:
            raise ValueError(f"[{self.name}] is of type {self.type!r}; expected one of {', '.join(_TYPES)}")
        if (self.default is None) != self.required:
            raise ValueError(f"[{self.name}] needs either a default or required = true")
        if (self.check or self.ignored) and not self.values:
            raise ValueError(f"[{self.name}] needs values: a text with the allowed values")
        self.range  # noqa: B018  # raises if the allowed values are not defined

    @property
    def cpp_member(self) -> str:
        return self.member or self.name

    @property
    def range(self) -> str:
        """Return the allowed values as text; "" for a bool."""
        if self.values:
            return self.values
        if self.choices:
            return " | ".join(str(choice) for choice in self.choices)
        if self.min is not None and self.max is not None:
            return f"{self.min} to {self.max}"
        if self.above is not None:
            return f"> {self.above}"
        if self.min is not None:
            return f">= {self.min}"
        if self.type == "bool":
            return ""
        raise ValueError(f"[{self.name}] does not define the allowed values: min, max, above, choices or values")


def check_tokens(name: str, tokens: str) -> None:
    """Raises ValueError if it is not decided whether a setting changes tokens."""
    if tokens not in TOKENS:
        raise ValueError(f"[{name}] has tokens = {tokens!r}; decide whether it changes tokens: {', '.join(TOKENS)}")


@cache
def engine_settings() -> tuple[Setting, ...]:
    found = tuple(entries("engine_settings.toml", Setting))
    for one in found:
        check_tokens(one.name, one.tokens)
    return found


@cache
def model_attributes() -> tuple[Setting, ...]:
    """Return the entries of model_attributes.toml, then a default for each sampling parameter that a model may set."""
    return (*entries("model_attributes.toml", Setting), *(_model_default(one) for one in parameters() if one.model))


@cache
def layer_attributes() -> tuple[Setting, ...]:
    return tuple(entries("layer_attributes.toml", Setting))


def _model_default(one: SamplingParameter) -> Setting:
    return Setting(
        name=f"default_{one.name}",
        type=one.type,
        default=one.default,
        min=one.min,
        max=one.max,
        above=one.above,
        values=one.range,
        help=f"default {one.name} of requests, from generation_config.json",
    )
