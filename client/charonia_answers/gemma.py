"""Writes EBNF grammars for arguments in Gemma's own syntax: for any object, or for objects that follow a JSON schema.

Supported keywords of JSON Schema: type, properties, required, items, enum, const, anyOf, oneOf, and $ref within the
schema. Other keywords raise an error, except those in _IGNORED, so no constraint is silently dropped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from .scanners import GEMMA_WORD, JSON_VALUE, MAX_WORD
from .schemas import UnsupportedSchemaError, target_of, values_of

_ANY = """\
object ::= "{" ("" | pair ("," pair)*) "}"
pair ::= key ":" value
key ::= [A-Za-z_] [A-Za-z0-9_]{0,63}
value ::= string | number | boolean | null | object | array
array ::= "[" ("" | value ("," value)*) "]"
integer ::= "-"? ("0" | [1-9] [0-9]{0,15})
number ::= integer ("." [0-9]{1,15})? ([eE] [+-]? [0-9]{1,2})?
boolean ::= "true" | "false"
null ::= "null"
"""
_TYPES = ("object", "array", "string", "integer", "number", "boolean", "null")
# Keywords that do not change which values are valid. Objects have only the properties that the schema names.
_IGNORED = ("$defs", "definitions", "$schema", "$id", "additionalProperties", "title", "description", "default")
_MAX_RULES = 10_000
_MAX_DEPTH = 128  # nesting levels of schemas, including references


def any_object(quote: str, token: int | None) -> str:
    """Return the grammar of any object. quote: the text on both sides of a string. token: the id of the quote if it is
    a special token."""
    return f"root ::= object\n{_ANY}{_string(quote, token)}"


def object_of(schema: Mapping[str, Any], quote: str, token: int | None) -> str:
    """Return the grammar of objects that follow a schema. Raises UnsupportedSchemaError."""
    return _Writer(schema, quote, token).write()


def literal(text: str) -> str:
    """Write a string literal of EBNF."""
    return '"' + re.sub(r'["\\\x00-\x1f\x7f]', lambda found: f"\\x{ord(found.group()):02x}", text) + '"'


def _quote(quote: str, token: int | None) -> str:
    return literal(quote) if token is None else f"Token({token})"


def _string(quote: str, token: int | None) -> str:
    # A text contains no special token. If the quote is plain text, the string must not contain its first character.
    inner = "[^\\x00]" if token is not None else f"[^\\x00{re.escape(quote[0])}]"
    return f"string ::= {_quote(quote, token)} {inner}* {_quote(quote, token)}\n"


class _Writer:
    def __init__(self, schema: Mapping[str, Any], quote: str, token: int | None) -> None:
        self._root = schema
        self._spelled = quote if token is None else ""
        self._quote = _quote(quote, token)
        self._rules: list[str] = []
        self._referred: dict[str, str] = {}
        self._string = _string(quote, token)

    def write(self) -> str:
        root = self._value(self._root, "", 0)
        return f"root ::= {root}\n{''.join(self._rules)}{_ANY}{self._string}"

    def _rule(self, body: str | None = None) -> str:
        """Add a rule and return its name. If `body` is None, `_fill` sets the body later."""
        if len(self._rules) >= _MAX_RULES:
            raise UnsupportedSchemaError(f"it has more than {_MAX_RULES} parts")
        name = f"r{len(self._rules)}"
        self._rules.append("" if body is None else f"{name} ::= {body}\n")
        return name

    def _fill(self, name: str, body: str) -> None:
        self._rules[int(name[1:])] = f"{name} ::= {body}\n"

    def _value(self, schema: Any, path: str, depth: int) -> str:
        """Return the name of the rule for a schema."""
        if depth > _MAX_DEPTH:
            raise UnsupportedSchemaError(f"at {path}: schemas are nested deeper than {_MAX_DEPTH}, references included")
        if schema is True or schema == {}:
            return "value"
        if not isinstance(schema, Mapping):
            raise UnsupportedSchemaError(f"at {path or 'its root'}: a schema must be an object or true")
        if "$ref" in schema:
            self._only(schema, path, "$ref")
            return self._reference(schema["$ref"], path, depth)
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                self._only(schema, path, keyword)
                options = self._list(schema[keyword], f"{path}/{keyword}")
                return self._rule(" | ".join(self._value(one, f"{path}/{keyword}", depth + 1) for one in options))
        if "enum" in schema or "const" in schema:
            self._only(schema, path, "enum", "const", "type")
            try:
                values = values_of(schema) or []
            except UnsupportedSchemaError as error:
                raise UnsupportedSchemaError(f"at {path}{error}") from None
            return self._rule(" | ".join(self._constant(value, path) for value in values))
        self._only(schema, path, "type", "properties", "required", "items")
        kinds = schema.get("type", "object" if "properties" in schema else None)
        kinds = kinds if isinstance(kinds, list) and kinds else [kinds]
        for kind in kinds:
            if kind not in _TYPES:
                raise UnsupportedSchemaError(f"at {path}/type: type must be one or more of {', '.join(_TYPES)}")
        return self._rule(" | ".join(self._typed(kind, schema, path, depth) for kind in kinds))

    def _only(self, schema: Mapping[str, Any], path: str, *known: str) -> None:
        for keyword in schema:
            if keyword not in known and keyword not in _IGNORED:
                raise UnsupportedSchemaError(f"at {path}/{keyword}: the keyword {keyword} is not supported")

    def _list(self, value: Any, path: str) -> list[Any]:
        if not isinstance(value, list) or not value:
            raise UnsupportedSchemaError(f"at {path}: a list is expected")
        return value

    def _reference(self, reference: Any, path: str, depth: int) -> str:
        if not isinstance(reference, str) or not re.fullmatch(r"#(/[^/~%]+)*", reference):
            raise UnsupportedSchemaError(f"at {path}/$ref: the reference {reference!r} is not supported")
        if reference not in self._referred:
            target = target_of(self._root, reference)
            if target is None:
                raise UnsupportedSchemaError(f"at {path}/$ref: there is nothing at {reference}")
            self._referred[reference] = self._rule()
            self._fill(self._referred[reference], self._value(target, reference[1:], depth + 1))
        return self._referred[reference]

    def _constant(self, value: Any, path: str) -> str:
        if isinstance(value, str):
            if self._spelled and self._spelled in value:
                raise UnsupportedSchemaError(f"at {path}: strings must not contain {self._spelled}")
            return f"{self._quote} {literal(value)} {self._quote}" if value else f"{self._quote} {self._quote}"
        shown = json.dumps(value)
        if not JSON_VALUE.fullmatch(shown):
            raise UnsupportedSchemaError(f"at {path}: enum and const take strings, numbers, true, false and null")
        return literal(shown)

    def _typed(self, kind: str, schema: Mapping[str, Any], path: str, depth: int) -> str:
        if kind == "array" and "items" in schema:
            items = self._value(schema["items"], f"{path}/items", depth + 1)
            return f'"[" ("" | {items} ("," {items})*) "]"'
        if kind == "object":
            more = schema.get("additionalProperties", True)
            if "properties" in schema or schema.get("required") or more is False:
                return self._object(schema, path, depth)
            if more is not True and more != {}:
                problem = "it must be true or false if the object has no properties"
                raise UnsupportedSchemaError(f"at {path}/additionalProperties: {problem}")
        return kind

    def _object(self, schema: Mapping[str, Any], path: str, depth: int) -> str:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, Mapping):
            raise UnsupportedSchemaError(f"at {path}/properties: it must be an object of schemas")
        if not isinstance(required, list):
            raise UnsupportedSchemaError(f"at {path}/required: it must be a list of names")
        for name in required:
            if not isinstance(name, str) or name not in properties:
                raise UnsupportedSchemaError(f"at {path}/required: {json.dumps(name)} is not among properties")
        needed = set(required)
        # Rules for the remaining properties: `first` if no property came before, `later` if one came before.
        first = later = '""'
        for name, inner in reversed(list(properties.items())):
            plain = len(name) <= MAX_WORD and GEMMA_WORD.fullmatch(name)
            key = literal(name) if plain else self._constant(name, f"{path}/properties")
            value = self._value(inner, f"{path}/properties/{name}", depth + 1)
            own = f'{key} ":" {value} {later}'
            begun, more = own, f'"," {own}'
            if name not in needed:
                begun, more = f"{own} | {first}", f'"," {own} | {later}'
            first, later = self._rule(begun), self._rule(more)
        return f'"{{" {first} "}}"'
