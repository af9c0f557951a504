"""Arguments with marks around each parameter, where texts have no quotes: which parameters are texts, by a function's
schema, and what a grammar of them is made of."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from .formats import Xml
from .parser import MAX_NAME, XML_NAME
from .tag_parts import Format, NoTagError, const, either, json_of, optional, sequence

__all__ = ["Xml", "any_parameters", "parameters_of", "text_parameters"]

# Makes the format of a parameter, of those of its name and of its value; None: any text.
Parameter = Callable[[Format, Format | None], Format]

_ANY_KEY: Format = {"type": "regex", "pattern": "[A-Za-z_][A-Za-z0-9_]{0,63}"}
_DEFINITIONS = ("$defs", "definitions")
_OF_OBJECT = ("type", "properties", "required", "additionalProperties", *_DEFINITIONS, "$schema", "$id")
_OF_TEXT = ("type", "enum", "const", "anyOf", "oneOf", "$ref", "title", "description", "default")
_MAX_DEPTH = 64


def text_parameters(schema: Any) -> dict[str, bool]:
    """The parameters that are texts; True: a text or null. Whatever the schema is."""
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    found = {}
    for name, inner in properties.items() if isinstance(properties, Mapping) else ():
        kinds = _kinds(schema, inner)
        if kinds and "string" in kinds and kinds <= {"string", "null"}:
            found[name] = "null" in kinds
    return found


def any_parameters(parameter: Parameter) -> Format:
    return {"type": "star", "content": parameter(_ANY_KEY, None)}


def parameters_of(schema: Mapping[str, Any], parameter: Parameter, name: str, end: str) -> Format:
    """What follows the schema of an object. name: what errors call it. end: what ends a value, where that is a text; no
    value holds it. Raises NoTagError."""
    if end and end in json.dumps(schema, ensure_ascii=False):
        raise NoTagError(f"{name}: the JSON schema has {end}, which ends a value in this format")
    for keyword in schema:
        if keyword not in _OF_OBJECT:
            raise _unsupported(name, f"/{keyword}", keyword)
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        raise NoTagError(f"{name}: properties are an object of schemas, and required is a list of names")
    for key in required:
        if key not in properties:
            raise NoTagError(f"{name}, at /required: {json.dumps(key)} is not among properties")
    texts = text_parameters(schema)
    parts = []
    for key, inner in properties.items():
        at = f"/properties/{key}"
        if not XML_NAME.fullmatch(key) or len(key) > MAX_NAME:
            raise NoTagError(f"{name}, at {at}: a name has no white space or angle brackets in this format")
        if key in texts:
            value = _text(schema, inner, name, at, null=texts[key])
        else:
            shared = {one: schema[one] for one in _DEFINITIONS if one in schema}
            whole = {**shared, **inner} if isinstance(inner, Mapping) else inner
            value = json_of(whole, f"tools: {name}, at {at}", end)
        part = parameter(const(key), value)
        parts.append(part if key in required else optional(part))
    return sequence(parts) if parts else const("")


def _unsupported(name: str, at: str, keyword: str) -> NoTagError:
    return NoTagError(f"{name}: the JSON schema, at {at}: the keyword {keyword} is not supported in this format")


def _text(root: Mapping[str, Any], schema: Any, name: str, at: str, *, null: bool) -> Format | None:
    """A text without quotes; None: any."""
    values: list[str] = []
    for inner in _alternatives(root, schema):
        for keyword in inner:
            if keyword not in _OF_TEXT:
                raise _unsupported(name, f"{at}/{keyword}", keyword)
        if "enum" in inner or "const" in inner:
            given = inner.get("enum", [inner.get("const")])
            values += [value for value in given if isinstance(value, str)]
        elif inner.get("type") not in ("null", ["null"]):
            return None
    if any(re.search("[<\n]", value) or value in ("null", "None") for value in values):
        raise NoTagError(f"{name}, at {at}: texts of an enum are one line without < in this format")
    return either([const(value) for value in [*values, *(["null"] if null else [])]])


def _resolved(root: Mapping[str, Any], schema: Any) -> Any:
    for _ in range(_MAX_DEPTH):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str):
            return schema
        schema = root
        for key in reference.split("/")[1:]:
            schema = schema.get(key) if isinstance(schema, Mapping) else None
    return None


def _alternatives(root: Mapping[str, Any], schema: Any, depth: int = 0) -> list[Mapping[str, Any]]:
    """The schemas of which a value follows one."""
    schema = _resolved(root, schema)
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return [{}]
    for keyword in ("anyOf", "oneOf"):
        if isinstance(schema.get(keyword), list):
            return [one for inner in schema[keyword] for one in _alternatives(root, inner, depth + 1)]
    return [schema]


def _kinds(root: Mapping[str, Any], schema: Any) -> set[str] | None:
    """The types that its values have; None: any."""
    kinds: set[str] = set()
    for inner in _alternatives(root, schema):
        if "enum" in inner or "const" in inner:
            given = inner["enum"] if isinstance(inner.get("enum"), list) else [inner.get("const")]
            kinds |= {"string" if isinstance(value, str) else "null" if value is None else "other" for value in given}
        elif isinstance(inner.get("type"), str):
            kinds.add(inner["type"])
        elif isinstance(inner.get("type"), list):
            kinds |= {str(kind) for kind in inner["type"]}
        else:
            return None
    return kinds
