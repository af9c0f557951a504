"""Structural tags, of which the engine makes a grammar: for calls that are forced, for arguments that follow a schema,
and for a text that follows reasoning. They are made of the same descriptions by which the parser reads the answer.

A tag is xgrammar's, with a few words of the engine's own: `called` and `name` say what errors call the tag or a schema
in it, and `"space": "free"` that white space at the beginning means nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from . import gemma
from .ebnf import literal
from .formats import CallFormat, Frame, ReasoningFormat
from .parser import MAX_NAME

Format = dict[str, Any]
# What the prompt says of reasoning: the answer may have some, goes on with it, or has none.
ReasoningState = Literal["possible", "open", "none"]

ANY_TEXT: Format = {"type": "any_text"}
# White space as models like it, and no more: small ones go on with it for ever.
_JSON = {"type": "json_schema", "max_whitespace_cnt": 1}
ANY_OBJECT: Format = {**_JSON, "json_schema": {"type": "object"}}
_SPACE_AFTER_TOKEN: Format = {"type": "regex", "pattern": " ?"}  # SentencePiece's, after a special token
_SPACE_AFTER_REASONING: Format = {"type": "regex", "pattern": "[ \\n]{0,4}"}
_NO_NAME = re.compile(r"[\s\[{\"]")  # in a name that stands without quotes


class NoTagError(ValueError):
    """What cannot be forced, and why."""


@dataclass(frozen=True)
class Function:
    """parameters: the JSON schema that its arguments follow; None: they are any JSON object."""

    name: str
    parameters: Mapping[str, Any] | None = None


def check_name(calls: CallFormat, name: str) -> None:
    """NoTagError for a name that the parser would not read in this format."""
    shown = calls.frame(name).name
    if not name or len(shown) > MAX_NAME:
        raise NoTagError(f"a call's name has 1 to {MAX_NAME} characters")
    if calls.syntax != "json" and _NO_NAME.search(name):
        raise NoTagError(f"in the format {calls.name} a name has no white space, quotes or brackets")


class Tags:
    """The tags of one model.

    tokens: ids of its special tokens. Where markup consists of them, tokens are forced, and no text that spells them.
    """

    def __init__(self, calls: CallFormat | None, reasoning: ReasoningFormat | None, tokens: Mapping[str, int]) -> None:
        self._calls = calls
        self._reasoning = reasoning
        self._tokens = tokens
        names = sorted((name for name in tokens if name), key=len, reverse=True)
        markup = "\n".join((*(calls.markup if calls else ()), *(reasoning.markup if reasoning else ())))
        self._special = re.compile("|".join(re.escape(name) for name in names if name in markup) or "(?!)")

    def forced(self, functions: Sequence[Function], *, several: bool) -> Format:
        """Calls and nothing else. several: more than one may come."""
        assert self._calls is not None
        frame = self._calls.frame("")
        calls = self._separated(functions, frame, several)
        return _sequence([*self._markup(frame.opening), calls, *self._markup(frame.closing)])

    def free(self, functions: Sequence[Function], *, several: bool) -> Format:
        """Text, in which calls may stand. What begins like a call is one."""
        assert self._calls is not None
        frames = [self._calls.frame("", begin) for begin in self._calls.begin]
        if self._calls.in_list:
            opening = either([_sequence(self._markup(frame.opening)) for frame in frames])
            block = [opening, self._separated(functions, frames[0], several), *self._markup(frames[0].closing)]
        else:
            before = either([_sequence(self._markup(frame.before)) for frame in frames])
            block = [before, self._named(functions, frames[0]), *self._markup(frames[0].after)]
        marks = [begin for begin in self._calls.begin if not self._special.search(begin)]
        text: Format = {**ANY_TEXT, "excludes": marks} if marks else ANY_TEXT
        rest = {"type": "star", "content": _sequence([*block, text])} if several else _optional(_sequence(block))
        if not self._calls.bare:
            return _sequence([text, rest])
        # A text that begins with a bracket is a call; and one that begins like markup is that.
        first = "".join(re.escape(char) for char in sorted({"{", *(mark[0] for mark in marks)}))
        begun = _sequence([{"type": "regex", "pattern": f"[ \\t\\r\\n]*[^{first} \\t\\r\\n]"}, text])
        return either([self.forced(functions, several=several), _sequence([_optional(begun), rest])])

    def after_reasoning(self, format: Format, state: ReasoningState) -> Format:
        """The format, where reasoning may come before it, or does."""
        if self._reasoning is None or state == "none":
            return format
        begin, end = self._markup(self._reasoning.begin), self._markup(self._reasoning.end)
        text: Format = {**ANY_TEXT, "excludes": [end[0]["value"]]} if end[0]["type"] == "const_string" else ANY_TEXT
        thought = [text, *end, _SPACE_AFTER_REASONING]
        if state == "open":
            return _sequence([*thought, format])
        return _sequence([_optional(_sequence([*begin, *thought])), format])

    def _separated(self, functions: Sequence[Function], frame: Frame, several: bool) -> Format:
        """One call or, if `several` may follow each other, some."""
        first, *more = self._markup(frame.before)
        content = _sequence([*more, self._named(functions, frame), *self._markup(frame.after)])
        begin = first["value"] if first["type"] == "const_string" else first
        return {
            "type": "tags_with_separator",
            "tags": [{"begin": begin, "content": content, "end": ""}],
            "separator": frame.separator,
            "at_least_one": True,
            "stop_after_first": not several,
        }

    def _named(self, functions: Sequence[Function], frame: Frame) -> Format:
        """Name and arguments of one of the functions."""
        assert self._calls is not None
        middle = self._markup(frame.middle)
        free = [self._calls.frame(one.name).name for one in functions if one.parameters is None]
        # As a grammar: there may be many of them, and so they are shortest.
        names = {"type": "grammar", "grammar": f"root ::= {' | '.join(map(literal, free))}"}
        options = [_sequence([names, *middle, self._arguments(None)])] if free else []
        for one in functions:
            if one.parameters is not None:
                shown = self._calls.frame(one.name).name
                options.append(_sequence([_text(shown), *middle, self._arguments(one)]))
        return either(options)

    def _arguments(self, function: Function | None) -> Format:
        """Those of a strict function; without one any object."""
        assert self._calls is not None
        schema = function.parameters if function else None
        if self._calls.syntax == "gemma":
            quote = self._calls.quote, self._tokens.get(self._calls.quote)
            if schema is None:
                return {"type": "grammar", "grammar": gemma.any_object(*quote)}
            try:
                return {"type": "grammar", "grammar": gemma.object_of(schema, *quote)}
            except gemma.UnsupportedSchemaError as error:
                assert function is not None
                place = f"the parameters of function {_shown(function.name)}: the JSON schema, {error}"
                raise NoTagError(f"{place} in the format {self._calls.name}") from None
        if function is None or schema is None:
            return ANY_OBJECT
        return _schema(schema, f"tools: the parameters of function {_shown(function.name)}")

    def _markup(self, text: str) -> list[Format]:
        """The tokens and texts of which markup consists."""
        parts: list[Format] = []
        at = 0
        for found in self._special.finditer(text):
            if found.start() > at:
                parts.append(_text(text[at : found.start()]))
            parts.append({"type": "token", "token": self._tokens[found.group()]})
            at = found.end()
        if at and at < len(text):
            parts.append(_SPACE_AFTER_TOKEN)
        if at < len(text):
            parts.append(_text(text[at:]))
        return parts


def tag(format: Format, called: str) -> str:
    """The structural tag as the engine takes it. called: what errors call it."""
    return json.dumps(
        {"type": "structural_tag", "called": called, "space": "free", "format": format},
        ensure_ascii=False,
        separators=(",", ":"),
    )


def guide_format(kind: str, guide: str, called: str) -> Format | None:
    """The format of a guide, as tensors of `guided_decoding` have it; None for one that is wrong, which the engine says
    best. called: what errors call a schema."""
    if (kind == "json") == bool(guide):
        return None
    if kind == "json":
        return ANY_OBJECT
    if kind == "regex":
        return {"type": "regex", "pattern": guide}
    if kind == "ebnf_grammar":
        return {"type": "grammar", "grammar": guide}
    try:
        value = json.loads(guide, parse_constant=_no_json)
    except (ValueError, RecursionError):
        return None
    if kind == "json_schema" and isinstance(value, dict | bool):
        return _schema(value, called)
    if kind == "choice" and isinstance(value, list) and value and all(isinstance(one, str) for one in value):
        return either([_text(one) for one in value])
    if kind == "structural_tag" and isinstance(value, dict) and isinstance(value.get("format"), dict):
        format: Format = value["format"]
        return format
    return None


def _no_json(name: str) -> None:
    raise ValueError(name)


def _shown(name: str) -> str:
    return json.dumps(name, ensure_ascii=False)


def _text(value: str) -> Format:
    return {"type": "const_string", "value": value}


def _schema(schema: Any, name: str) -> Format:
    return {**_JSON, "name": name, "json_schema": schema}


def _optional(format: Format) -> Format:
    return {"type": "optional", "content": format}


def _sequence(parts: Iterable[Format]) -> Format:
    """Texts that follow each other are one."""
    joined: list[Format] = []
    for part in parts:
        inner = part["elements"] if part["type"] == "sequence" else [part]
        for one in inner:
            if joined and one["type"] == joined[-1]["type"] == "const_string":
                joined[-1] = _text(joined[-1]["value"] + one["value"])
            else:
                joined.append(one)
    return joined[0] if len(joined) == 1 else {"type": "sequence", "elements": joined}


def either(options: Sequence[Format]) -> Format:
    """One of them."""
    return options[0] if len(options) == 1 else {"type": "or", "elements": list(options)}
