"""Reads JSON schemas for formats whose arguments are not JSON. Time is bounded for every schema."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

_DEFINITIONS = ("$defs", "definitions")
# Keywords whose values are objects from names to schemas, and keywords whose values are not schemas.
_BY_NAME = (*_DEFINITIONS, "properties", "patternProperties", "dependentSchemas", "dependencies")
_VALUES = ("enum", "const", "default", "examples", "required")
_ANY = "any-json"
_ANY_REFERENCE = f"#/$defs/{_ANY}"
_MAX_REFERENCE = 256  # characters
_MAX_VISITS = 10_000


class UnsupportedSchemaError(ValueError):
    """The schema is not supported. The text names the place in the schema and the problem."""


class Alternatives:
    """Finds the alternatives of a schema: a valid value follows one of them. For one root, at most `_MAX_VISITS`
    schemas and values are visited. After that, the only alternative is {}, which allows any value."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._left = _MAX_VISITS

    def of(self, schema: Any) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
        """Return the alternatives, and the schemas that lead to them with $ref, anyOf or oneOf."""
        found: list[Mapping[str, Any]] = []
        passed: list[Mapping[str, Any]] = []
        waiting, seen = [schema], set()
        while waiting:
            schema = waiting.pop()
            if not isinstance(schema, Mapping) or not self._pay(1):
                return [{}], []
            reference = schema.get("$ref")
            options = next((schema[key] for key in ("anyOf", "oneOf") if isinstance(schema.get(key), list)), None)
            if isinstance(reference, str):
                passed.append(schema)
                if reference not in seen:
                    seen.add(reference)
                    waiting.append(self._at(reference))
            elif options is not None:
                passed.append(schema)
                if not self._pay(len(options)):
                    return [{}], []
                waiting += reversed(options)
            else:
                enum = schema.get("enum")
                if isinstance(enum, list) and not self._pay(len(enum)):
                    return [{}], []
                found.append(schema)
        return found or [{}], passed

    def _pay(self, count: int) -> bool:
        if count > self._left:
            return False
        self._left -= count
        return True

    def _at(self, reference: str) -> Any:
        return target_of(self._root, reference) if len(reference) <= _MAX_REFERENCE else None


def target_of(root: Any, reference: str) -> Any:
    """Return the value at the reference #/key/key...; None if there is none."""
    target = root
    for key in reference.split("/")[1:]:
        target = target.get(key) if isinstance(target, Mapping) else None
    return target


def values_of(schema: Mapping[str, Any]) -> list[Any] | None:
    """Return the values that `enum`, `const` and `type` allow; None if there is neither `enum` nor `const`. Raises
    UnsupportedSchemaError, which names the wrong keyword."""
    if "enum" not in schema and "const" not in schema:
        return None
    values = schema["enum"] if "enum" in schema else [schema["const"]]
    if not isinstance(values, list) or not values:
        raise UnsupportedSchemaError("/enum: it must be a list of values")
    if "const" in schema:
        const = schema["const"]
        values = [one for one in values if one == const and isinstance(one, bool) == isinstance(const, bool)]
    kinds = schema.get("type")
    if kinds is not None:
        kinds = {one for one in (kinds if isinstance(kinds, list) else [kinds]) if isinstance(one, str)}
        values = [value for value in values if not kinds.isdisjoint(_types_of(value))]
    if not values:
        raise UnsupportedSchemaError(": no value is in enum, equals const and has the type")
    return values


def _types_of(value: Any) -> tuple[str, ...]:
    if isinstance(value, bool) or value is None:
        return ("null" if value is None else "boolean",)
    if isinstance(value, int | float):
        return ("number", "integer") if isinstance(value, int) or value.is_integer() else ("number",)
    return ("string" if isinstance(value, str) else "array" if isinstance(value, list) else "object",)


class Definitions:
    """Finds the definitions of a root schema that parts of the schema refer to."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._references: dict[tuple[str, str], list[str]] = {}
        self._sizes: dict[tuple[str, str], int] = {}

    def reached(self, schema: Any, path: str) -> tuple[dict[str, Any], int]:
        """Return the definitions that a schema refers to, directly or indirectly, as keywords of a schema, and the size
        of their JSON. path: the place of the schema in the root. Raises UnsupportedSchemaError."""
        found: dict[str, Any] = {}
        size = 0
        waiting = [(reference, path) for reference in references(schema)]
        seen = set()
        while waiting:
            reference, at = waiting.pop()
            keyword, key = self._place(reference, at)
            if (keyword, key) in seen:
                continue
            seen.add((keyword, key))
            found.setdefault(keyword, {})[key] = self._root[keyword][key]
            if (keyword, key) not in self._references:
                self._references[keyword, key] = list(references(self._root[keyword][key]))
                self._sizes[keyword, key] = len(json.dumps(self._root[keyword][key])) + len(key)
            size += self._sizes[keyword, key]
            waiting += [(one, f"/{keyword}/{key}") for one in self._references[keyword, key]]
        return found, size

    def _place(self, reference: str, at: str) -> tuple[str, str]:
        parts = reference.split("/", 3)
        if len(parts) < 3 or parts[0] != "#" or parts[1] not in _DEFINITIONS:
            shown = json.dumps(reference, ensure_ascii=False)
            raise UnsupportedSchemaError(f"{at}: the reference {shown} does not lead to $defs or definitions")
        group = self._root.get(parts[1])
        if not isinstance(group, Mapping) or parts[2] not in group:
            raise UnsupportedSchemaError(f"{at}: there is nothing at {json.dumps(reference, ensure_ascii=False)}")
        return parts[1], parts[2]


def references(schema: Any) -> Iterator[str]:
    """Yield every $ref in a schema."""
    waiting = [schema]
    while waiting:
        one = waiting.pop()
        if isinstance(one, list):
            waiting += one
        elif isinstance(one, Mapping):
            if isinstance(one.get("$ref"), str):
                yield one["$ref"]
            for key, value in one.items():
                if key in _BY_NAME and isinstance(value, Mapping):
                    waiting += value.values()
                elif key not in _VALUES:
                    waiting.append(value)


def without_characters(schema: Any, characters: str) -> Any:
    """Return a copy of the schema that forbids some ASCII characters in strings and in property names. The
    names, values, patterns and formats in the schema do not change: the caller checks them."""
    pattern = f"^[^{re.escape(characters)}]*$"
    needs_any = False

    def changed(one: Any) -> Any:
        nonlocal needs_any
        if not isinstance(one, Mapping):
            needs_any |= one is True
            return {"$ref": _ANY_REFERENCE} if one is True else one
        out = dict(one)
        for key, value in one.items():
            if key in _BY_NAME and isinstance(value, Mapping):
                out[key] = {name: changed(inner) for name, inner in value.items()}
            elif key in ("anyOf", "oneOf", "allOf", "prefixItems") and isinstance(value, list):
                out[key] = [changed(inner) for inner in value]
            elif key in ("items", "additionalProperties"):
                out[key] = changed(value)
        kinds = out.get("type")
        kinds = {kinds} if isinstance(kinds, str) else set(kinds) if isinstance(kinds, list) else None
        if kinds is None and not any(key in out for key in ("$ref", "anyOf", "oneOf", "allOf", "const", "enum")):
            needs_any = True
            return {**out, "$ref": _ANY_REFERENCE}
        kinds = kinds or set()
        if "string" in kinds and not any(key in out for key in ("pattern", "const", "enum", "format")):
            out["pattern"] = pattern
        if "array" in kinds:
            out.setdefault("items", changed(True))
        if "object" in kinds and "properties" not in out and "patternProperties" not in out:
            out["patternProperties"] = {pattern: out.get("additionalProperties", changed(True))}
            out["additionalProperties"] = False
        return out

    made = changed(schema)
    if needs_any:
        reference = {"$ref": _ANY_REFERENCE}
        options = [
            {"type": ["null", "boolean", "number"]},
            {"type": "string", "pattern": pattern},
            {"type": "array", "items": reference},
            {"type": "object", "patternProperties": {pattern: reference}, "additionalProperties": False},
        ]
        made["$defs"] = {**made.get("$defs", {}), _ANY: {"anyOf": options}}
    return made
