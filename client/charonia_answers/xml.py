"""Formats of arguments that are not one JSON object: parameters with marks around each, in which strings have no
quotes, or keyword arguments as in Python. Also finds the parameters that are strings in the schema of a function."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from . import beside_calls
from .formats import Xml
from .parser import MAX_NAME, PYTHON_NAME, XML_NAME
from .schemas import Alternatives, Definitions, UnsupportedSchemaError, values_of
from .tag_parts import Format, NoTagError, const, either, json_of, optional, sequence, star

__all__ = ["Copies", "Xml", "any_keywords", "any_parameters", "keywords_of", "parameters_of", "text_parameters"]

# Makes the format of a parameter from the formats of its name and its value. None as the value: any text.
Parameter = Callable[[Format, Format | None], Format]

_ANY_KEY: Format = {"type": "regex", "pattern": "[A-Za-z_][A-Za-z0-9_]{0,63}"}
_OF_OBJECT = ("type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema", "$id")
_OF_TEXT = ("type", "enum", "const", "title", "description", "default")
_OF_REFERENCE = ("type", "title", "description", "default", "$ref", "anyOf", "oneOf")
_MAX_COPIES = 4 << 20  # characters
_MAX_OPTIONAL = 32  # properties, if none is required: the grammar's size grows with the square of their number
_COMMA = const(", ")
_ANY_VALUE = json_of(True, "any value")


@dataclass
class Copies:
    """The size of definitions and texts that one grammar repeats for each parameter that refers to them."""

    size: int = 0


@dataclass(frozen=True)
class _Text:
    """A parameter that is a string, or null if `null` is true. alternatives, passed: the results of
    `Alternatives.of`."""

    null: bool
    alternatives: Sequence[Mapping[str, Any]]
    passed: Sequence[Mapping[str, Any]]


def text_parameters(schema: Any) -> dict[str, bool]:
    """Return the parameters that are strings; True: a string or null. Accepts any schema, valid or not."""
    return {name: text.null for name, text in _texts(schema).items()}


def _texts(schema: Any) -> dict[str, _Text]:
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    if not isinstance(properties, Mapping):
        return {}
    found = {}
    alternatives = Alternatives(schema)
    known: dict[int, set[str] | None] = {}
    for name, inner in properties.items():
        options, passed = alternatives.of(inner)
        kinds = _kinds(options, known)
        if kinds and "string" in kinds and kinds <= {"string", "null"}:
            found[name] = _Text("null" in kinds, options, passed)
    return found


def any_parameters(parameter: Parameter) -> Format:
    return star(parameter(_ANY_KEY, None))


def parameters_of(schema: Mapping[str, Any], parameter: Parameter, name: str, end: str, copies: Copies) -> Format:
    """Return the format of parameters that follow the schema of an object. name: the name of the schema in errors. end:
    the mark that ends a value, if it is plain text; no value contains it. Raises NoTagError."""
    if end and end in json.dumps(schema, ensure_ascii=False):
        raise NoTagError(f"{name}: the JSON schema contains {end}, which ends a value in this format")
    properties, needed = _properties(schema, name)
    texts, values = _texts(schema), _Values(schema, name, end, copies)
    parts = []
    for key, inner in properties.items():
        at = f"/properties/{key}"
        if not XML_NAME.fullmatch(key) or len(key) > MAX_NAME:
            raise NoTagError(f"{name}, at {at}: a name must not contain white space or angle brackets in this format")
        value = values.text(texts[key], at) if key in texts else values.json(inner, at)
        part = parameter(const(key), value)
        parts.append(part if key in needed else optional(part))
    return sequence(parts) if parts else const("")


def _properties(schema: Mapping[str, Any], name: str) -> tuple[Mapping[str, Any], set[str]]:
    """Return the properties of an object's schema, and the names of required properties. Raises NoTagError."""
    for keyword in schema:
        if keyword not in _OF_OBJECT:
            raise _unsupported(name, f"/{keyword}", keyword)
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        raise NoTagError(f"{name}: properties must be an object of schemas, and required a list of names")
    for key in required:
        if not isinstance(key, str) or key not in properties:
            raise NoTagError(f"{name}, at /required: {json.dumps(key)} is not among properties")
    return properties, set(required)


def any_keywords() -> Format:
    """Return the format of keyword arguments as in Python. The values are JSON, which the parser also accepts."""
    one = sequence([_ANY_KEY, const("="), _ANY_VALUE])
    return optional(sequence([one, star(sequence([_COMMA, one]))]))


def keywords_of(schema: Mapping[str, Any], name: str, copies: Copies) -> Format:
    """Return the format of keyword arguments that follow the schema of an object. name: the name of the schema in
    errors. Raises NoTagError."""
    properties, needed = _properties(schema, name)
    values = _Values(schema, name, "", copies)
    required: list[Format] = []
    others: list[Format] = []
    for key, inner in properties.items():
        at = f"/properties/{key}"
        if not PYTHON_NAME.fullmatch(key) or len(key) > MAX_NAME:
            raise NoTagError(f"{name}, at {at}: a name must not contain white space, quotes or brackets in this format")
        (required if key in needed else others).append(sequence([const(f"{key}="), values.json(inner, at)]))
    if required:
        parts = [required[0], *(sequence([_COMMA, one]) for one in required[1:])]
        return sequence([*parts, *(optional(sequence([_COMMA, one])) for one in others)])
    if len(others) > _MAX_OPTIONAL:
        problem = f"more than {_MAX_OPTIONAL} properties, none of which is required"
        raise NoTagError(f"{name}: {problem}, are not supported in this format")
    # One option for each property that may come first. Only later properties follow it.
    options = [
        sequence([one, *(optional(sequence([_COMMA, later])) for later in others[at + 1 :])])
        for at, one in enumerate(others)
    ]
    return optional(either(options)) if options else const("")


class _Values:
    """Makes the formats of the values of one function. Raises NoTagError if a schema is not supported, or if the
    formats become too large."""

    def __init__(self, root: Mapping[str, Any], name: str, end: str, copies: Copies) -> None:
        self._definitions = Definitions(root)
        self._name = name
        self._end = end
        self._copies = copies

    def json(self, schema: Any, at: str) -> Format:
        try:
            shared, size = self._definitions.reached(schema, at)
        except UnsupportedSchemaError as error:
            raise NoTagError(f"{self._name}: the JSON schema, at {error}, in this format") from None
        self._copy(size, at)
        whole = {**schema, **shared} if isinstance(schema, Mapping) else schema
        if self._end:
            try:
                beside_calls.check_json(whole, [self._end], "which ends a value in this format")
            except NoTagError as error:
                raise NoTagError(f"{self._name}, at {at}: {error}") from None
        return json_of(whole, f"tools: {self._name}, at {at}", [self._end] if self._end else [])

    def text(self, text: _Text, at: str) -> Format | None:
        """Return the format of a string without quotes; None: any text."""
        self._check_passed(text, at)
        found: list[str] = []
        for inner in text.alternatives:
            for keyword in inner:
                if keyword not in _OF_TEXT:
                    raise _unsupported(self._name, f"{at}/{keyword}", keyword)
            values = values_of(inner)
            if values is not None:
                found += [value for value in values if isinstance(value, str)]
            elif inner.get("type") not in ("null", ["null"]):
                return None
        if any(re.search("[<\n]", value) or value in ("null", "None") for value in found):
            raise NoTagError(f"{self._name}, at {at}: strings of an enum must be single lines without < in this format")
        self._copy(sum(map(len, found)), at)
        return either([const(value) for value in [*found, *(["null"] if text.null else [])]])

    def _check_passed(self, text: _Text, at: str) -> None:
        """Raise NoTagError if a keyword next to $ref, anyOf or oneOf adds a constraint."""
        for outer in text.passed:
            keyword = next((one for one in outer if one not in _OF_REFERENCE), "")
            kinds = outer.get("type", ["string", "null"])
            kinds = kinds if isinstance(kinds, list) else [kinds]
            if not keyword and ("string" not in kinds or (text.null and "null" not in kinds)):
                keyword = "type"
            if not keyword and sum(one in outer for one in ("$ref", "anyOf", "oneOf")) > 1:
                keyword = "$ref"
            if keyword:
                problem = f"the keyword {keyword} beside $ref, anyOf or oneOf is not supported in this format"
                raise NoTagError(f"{self._name}: the JSON schema, at {at}/{keyword}: {problem}")

    def _copy(self, size: int, at: str) -> None:
        self._copies.size += size
        if self._copies.size > _MAX_COPIES:
            problem = "this format repeats definitions for each parameter that refers to them: the grammar is too large"
            raise NoTagError(f"{self._name}, at {at}: {problem} (more than {_MAX_COPIES} bytes)")


def _unsupported(name: str, at: str, keyword: str) -> NoTagError:
    return NoTagError(f"{name}: the JSON schema, at {at}: the keyword {keyword} is not supported in this format")


def _kinds(alternatives: Sequence[Mapping[str, Any]], known: dict[int, set[str] | None]) -> set[str] | None:
    """Return the types of values that follow the alternatives; None: any type. known: cached types of schemas, by id.
    The cache matters if many parameters refer to one large schema."""
    kinds: set[str] = set()
    for inner in alternatives:
        if id(inner) not in known:
            known[id(inner)] = _own_kinds(inner)
        own = known[id(inner)]
        if own is None:
            return None
        kinds |= own
    return kinds


def _own_kinds(schema: Mapping[str, Any]) -> set[str] | None:
    """Return the types "string", "null" and "other" that the keywords of a schema allow; None: any type."""
    try:
        values = values_of(schema)
    except UnsupportedSchemaError:
        return None
    if values is not None:
        return {"string" if isinstance(value, str) else "null" if value is None else "other" for value in values}
    kinds = schema.get("type")
    if not isinstance(kinds, str | list):
        return None
    return {kind if kind in ("string", "null") else "other" for kind in ([kinds] if isinstance(kinds, str) else kinds)}
