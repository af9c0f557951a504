"""Checks guides in requests with tools, for models whose marks are plain text: a text of the guide must not be parsed
as a call. The check uses only the characters that the guide allows, so it may also reject a guide that never allows a
mark."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from .ebnf import is_lark
from .tag_parts import NoTagError

# A class or a string without an end extends to the end of the guide, so no part is searched twice: time is linear.
_CLASS = r"\[[^\]\\]*(?:\\.[^\]\\]*)*(?:\]|(?P<open_class>\\?\Z))"
_TEXT = r'"[^"\\]*(?:\\.[^"\\]*)*(?:"|(?P<open_text>\\?\Z))'
_CHARS = re.compile(r"\\.|.", re.DOTALL)
_IN_REGEX = re.compile(rf"{_CLASS}|{_CHARS.pattern}", re.DOTALL)
_IN_EBNF = re.compile(rf"{_TEXT}|{_CLASS}|#[^\n]*", re.DOTALL)
_IN_LARK = re.compile(rf"{_TEXT}|//[^\n]*|/(?P<regex>[^/\\]*(?:\\.[^/\\]*)*)/?", re.DOTALL)
_ANY_CASE = re.compile(r'\(\?[a-zA-Z]*i|["/][a-zA-Z]*i')  # the flag i of a regular expression or of a text in Lark
_CODES = tuple("\\" + letter for letter in "xuUpPcNk0123456789")  # escapes of more than one character
_WIDE_FORMATS = ("email", "uri", "uri-reference", "uri-template")


def check(kind: str, guide: str, marks: Sequence[str]) -> None:
    """Raise NoTagError for a guide whose texts can contain a mark. kind: not a kind of JSON."""
    for mark in marks:
        if kind == "choice":
            found = any(mark in one for one in json.loads(guide))
        elif kind == "regex":
            found = _can_make(_regex_parts(guide), mark)
        else:
            found = _grammar_can_make(guide, mark)
        if found:
            raise NoTagError(f"beside tools no text may have {mark} in it, which begins a call, and this one can")


def check_bare(kind: str, guide: str, bracket: str) -> None:
    """Raise NoTagError for a guide whose texts can be calls without marks: JSON objects with a `name` or, if `bracket`
    is "[", Python lists."""
    if bracket == "[":
        if kind in ("regex", "ebnf_grammar"):
            found = _can_make(_regex_parts(guide), "[(=") if kind == "regex" else _grammar_can_make(guide, "[(=")
        else:
            found = kind == "choice" and any(one.lstrip().startswith("[") for one in json.loads(guide))
        if found:
            raise NoTagError(
                "the model's calls have no marks, and a list of calls in Python may be one, which a strict function "
                "does not allow: give a guide that cannot begin with a bracket"
            )
        return
    if kind in ("regex", "ebnf_grammar"):
        mark = '{"name"'
        found = _can_make(_regex_parts(guide), mark) if kind == "regex" else _grammar_can_make(guide, mark)
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
    """Whether a value that follows a JSON schema may be an object with a `name`. Considers only the keywords at the
    root of the schema."""
    if not isinstance(schema, Mapping):
        return True
    types = schema.get("type")
    if types is not None and "object" not in ([types] if isinstance(types, str) else types):
        return False
    named = schema.get("properties")
    combined = any(one in schema for one in ("$ref", "anyOf", "oneOf", "allOf", "const", "enum"))
    return combined or not isinstance(named, Mapping) or not named or "name" in named


def check_json(schema: Any, marks: Sequence[str], why: str = "which begins a call") -> None:
    """Raise NoTagError for a JSON schema whose strings can contain a mark. The grammar excludes marks from strings, but
    not from strings with a pattern. why: the effect of a mark, for errors."""
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
    """Return the keyword that allows a mark in strings; "" if there is none."""
    pattern = schema.get("pattern")
    if isinstance(pattern, str):
        return "pattern" if _can_make(_regex_parts(pattern), mark) else ""
    if schema.get("format") in _WIDE_FORMATS:
        return "format"
    names = schema.get("patternProperties")
    if isinstance(names, Mapping) and any(_can_make(_regex_parts(one), mark) for one in names):
        return "patternProperties"
    return ""


def _grammar_can_make(grammar: str, mark: str) -> bool:
    """Whether a grammar in EBNF or Lark can make all characters of a mark."""
    parts = _ebnf_parts(grammar)
    if is_lark(grammar):
        if re.search(r"%(json|regex|import|override|extend)|[~&]|\.\.|<\[", grammar) or _ANY_CASE.search(grammar):
            return True
        for found in _IN_LARK.finditer(grammar):
            parts |= _regex_parts(found["regex"] or "")
    return "Token(" in grammar or _can_make(parts, mark)


def _can_make(parts: Collection[str], mark: str) -> bool:
    """Whether parts of a regular expression can make all characters of a mark."""
    plain = {part for part in parts if len(part) == 1 and part != "."}
    others = [part for part in parts if part not in plain]
    # For Python, a bracket at the beginning of a class is a character of the class.
    if any(one.startswith((*_CODES, "[]", "[^]")) or re.search(r"\\[xuUpPcN]", one) for one in others):
        return True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = re.compile("|".join(others) or "(?!)", re.DOTALL)
    except re.error:
        return True
    return all(char in plain or made.fullmatch(char) for char in set(mark))


def _regex_parts(pattern: str) -> set[str]:
    parts = {"\\p"} if _ANY_CASE.search(pattern) else set()  # with this flag, any character counts as possible
    for found in _IN_REGEX.finditer(pattern):
        parts |= {*_CHARS.findall(found.group())} if found.lastgroup else {found.group()}
    return parts


def _ebnf_parts(grammar: str) -> set[str]:
    parts: set[str] = set()
    for found in _IN_EBNF.finditer(grammar):
        text = found.group()
        if text.startswith("[") and not found.lastgroup:
            parts.add(text)
        elif not text.startswith("#"):
            inner = text[1:] if found.lastgroup else text[1:-1]
            parts |= {"[.]" if one == "." else one for one in _CHARS.findall(inner)}
    return parts
