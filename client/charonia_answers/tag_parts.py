"""The parts of structural tags."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from .schemas import without_characters

Format = dict[str, Any]

ANY_TEXT: Format = {"type": "any_text"}
ANY_OBJECT: Format = {"type": "json_schema", "json_schema": {"type": "object"}}


class NoTagError(ValueError):
    """The format cannot be forced. The text says which part, and why."""


def const(value: str) -> Format:
    return {"type": "const_string", "value": value}


def json_of(schema: Any, name: str, without: Sequence[str] = ()) -> Format:
    """JSON that follows a schema. name: the name of the schema in errors. No string contains the first character of a
    text in `without`."""
    first = "".join(sorted({text[0] for text in without if text}))
    return {"type": "json_schema", "name": name, "json_schema": without_characters(schema, first) if first else schema}


def choice(values: Iterable[str]) -> Format:
    """One of several texts."""
    return {"type": "choice", "values": list(values)}


def any_text(*excludes: str) -> Format:
    """Any text that contains none of `excludes`."""
    return {**ANY_TEXT, "excludes": list(excludes)} if excludes else ANY_TEXT


def optional(format: Format) -> Format:
    return {"type": "optional", "content": format}


def star(format: Format) -> Format:
    """The format any number of times."""
    return {"type": "star", "content": format}


def sequence(parts: Iterable[Format]) -> Format:
    """The formats one after the other. Adjacent texts are joined."""
    joined: list[Format] = []
    for part in parts:
        inner = part["elements"] if part["type"] == "sequence" else [part]
        for one in inner:
            if joined and one["type"] == joined[-1]["type"] == "const_string":
                joined[-1] = const(joined[-1]["value"] + one["value"])
            else:
                joined.append(one)
    return joined[0] if len(joined) == 1 else {"type": "sequence", "elements": joined}


def either(options: Sequence[Format]) -> Format:
    """One of several formats."""
    return options[0] if len(options) == 1 else {"type": "or", "elements": list(options)}
