"""Guides beside tools, of a model whose marks are plain text: what a guide makes must not be read as a call. Whether it
can be is told from the characters that it can make, so a guide that never makes a mark may be refused as well."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from .tag_parts import NoTagError

_CLASS = r"\[(?:\\.|[^\]\\])*\]"
_IN_REGEX = re.compile(rf"{_CLASS}|\\.|.", re.DOTALL)
_IN_EBNF = re.compile(rf'"(?:\\.|[^"\\])*"|{_CLASS}|#[^\n]*', re.DOTALL)
_CODES = tuple("\\" + letter for letter in "xuUpPcNk0123456789")  # escapes of more than one character
_WIDE_FORMATS = ("email", "uri", "uri-reference", "uri-template")


def check(kind: str, guide: str, marks: Sequence[str]) -> None:
    """Raises NoTagError for a guide, not of JSON, whose texts can have a mark in them."""
    for mark in marks:
        if kind == "choice":
            found = any(mark in one for one in json.loads(guide))
        elif kind == "regex":
            found = _can_make(_regex_parts(guide), mark)
        else:
            macros = re.search("Token|TagDispatch", guide)
            found = bool(macros) or _can_make(_ebnf_parts(guide), mark)
        if found:
            raise NoTagError(f"beside tools no text may have {mark} in it, which begins a call, and this one can")


def check_bare(kind: str, guide: str) -> None:
    """Raises NoTagError for a guide whose texts can be objects with a `name`, as calls without marks are."""
    if kind in ("regex", "ebnf_grammar"):
        found = bool(re.search("Token|TagDispatch", guide)) or _can_make(
            _regex_parts(guide) if kind == "regex" else _ebnf_parts(guide), '{"name"'
        )
    elif kind == "choice":
        found = any(one.lstrip().startswith("{") for one in json.loads(guide))
    else:
        found = kind == "json" or _has_name(json.loads(guide))
    if found:
        raise NoTagError(
            "the model's calls have no marks, and JSON with a name may be one, which a strict function does not allow: "
            "give an object whose properties are all named, without name"
        )


def _has_name(schema: Any) -> bool:
    """Whether what follows a JSON schema may be an object with a `name`, as far as its own keywords say."""
    if not isinstance(schema, Mapping):
        return True
    types = schema.get("type")
    if types is not None and "object" not in ([types] if isinstance(types, str) else types):
        return False
    named = schema.get("properties")
    combined = any(one in schema for one in ("$ref", "anyOf", "oneOf", "allOf", "const", "enum"))
    return combined or not isinstance(named, Mapping) or not named or "name" in named


def check_json(schema: Any, marks: Sequence[str], why: str = "which begins a call") -> None:
    """The same for a JSON schema. The grammar keeps marks out of strings, but not where they follow a pattern. why:
    what errors say of a mark."""
    for mark in marks:
        if mark in json.dumps(schema, ensure_ascii=False):
            raise NoTagError(f"the JSON schema has {mark} in it, {why}")
        waiting = [schema]
        while waiting:
            one = waiting.pop()
            if isinstance(one, list):
                waiting += one
            elif isinstance(one, Mapping):
                keyword = _keyword(one, mark)
                if keyword:
                    raise NoTagError(f"the JSON schema: the keyword {keyword} allows {mark} in texts, {why}")
                waiting += one.values()


def _keyword(schema: Mapping[str, Any], mark: str) -> str:
    """The keyword by which a string can have a mark in it; "": none."""
    pattern = schema.get("pattern")
    if isinstance(pattern, str):
        return "pattern" if _can_make(_regex_parts(pattern), mark) else ""
    if schema.get("format") in _WIDE_FORMATS:
        return "format"
    names = schema.get("patternProperties")
    if isinstance(names, Mapping) and any(_can_make(_regex_parts(one), mark) for one in names):
        return "patternProperties"
    return ""


def _can_make(parts: Sequence[str], mark: str) -> bool:
    return all(any(_makes(part, char) for part in parts) for char in set(mark))


def _makes(part: str, char: str) -> bool:
    """Whether a part of a regular expression makes a character."""
    if part.startswith(_CODES) or re.search(r"\\[xuUpPcN]", part):
        return True
    if len(part) == 1 and part != ".":
        return part == char
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return re.fullmatch(part, char, re.DOTALL) is not None
    except re.error:
        return True


def _regex_parts(pattern: str) -> list[str]:
    return sorted(set(_IN_REGEX.findall(pattern)))


def _ebnf_parts(grammar: str) -> list[str]:
    found = [one for one in _IN_EBNF.findall(grammar) if not one.startswith("#")]
    parts = {one for one in found if one[0] == "["}
    for text in found:
        if text[0] == '"':
            parts |= {"[.]" if one == "." else one for one in re.findall(r"\\.|.", text[1:-1], re.DOTALL)}
    return sorted(parts)
