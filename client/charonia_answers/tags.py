"""Builds formats of responses, which become grammars: for forced calls, for arguments that follow a schema, and for a
text after reasoning. The parser uses the same descriptions (`formats`).

A format is one of xgrammar's structural tags. Its `name` is the name of a schema in errors.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from . import beside_calls, gemma, xml
from .formats import CallFormat, Frame, ReasoningFormat
from .lark import grammars_of
from .parser import MAX_NAME, PYTHON_NAME
from .schemas import UnsupportedSchemaError
from .tag_parts import (
    ANY_OBJECT,
    Format,
    NoTagError,
    any_text,
    choice,
    const,
    either,
    json_of,
    optional,
    sequence,
    star,
)

# The state at the end of the prompt. possible: the response may begin with reasoning. open: the prompt has begun the
# reasoning. none: the response has no reasoning.
ReasoningState = Literal["possible", "open", "none"]

SPACE_AFTER_TOKEN = optional(const(" "))  # SentencePiece adds it after a special token
_SPACE_AFTER_REASONING = optional({"type": "regex", "pattern": "[ \\n]{1,4}"})
# Characters that a name without quotes cannot contain.
_NO_NAME = {
    "named": re.compile(r"[\s\[{\"]"),
    "gemma": re.compile(r"[\s\[{\"]"),
    "xml": re.compile(r"[\s<>]"),
    "harmony": re.compile(r"[\s<]"),
}
_NUMBER: Format = {"type": "regex", "pattern": "[0-9]{1,4}"}


@dataclass(frozen=True)
class Function:
    """parameters: the JSON schema of the arguments; None: they are any JSON object."""

    name: str
    parameters: Mapping[str, Any] | None = None


def check_name(calls: CallFormat, name: str) -> None:
    """Raise NoTagError for a name that the parser would not accept in this format."""
    shown = calls.frame(name).name
    if not name or len(shown) > MAX_NAME:
        raise NoTagError(f"a function's name must have 1 to {MAX_NAME} characters")
    wrong = bool(calls.syntax in _NO_NAME and _NO_NAME[calls.syntax].search(name))
    wrong |= calls.syntax == "pythonic" and not PYTHON_NAME.fullmatch(name)
    if wrong or (calls.each[0] and re.search("[<`]", name)):
        raise NoTagError(f"in the format {calls.name} a name must not contain white space, quotes or brackets")


class Tags:
    """Builds the formats of one model.

    tokens: ids of its special tokens. If markup contains such a token, the grammar requires the token, not a text that
    spells it.
    """

    def __init__(self, calls: CallFormat | None, reasoning: ReasoningFormat | None, tokens: Mapping[str, int]) -> None:
        self._calls = calls
        self._reasoning = reasoning
        self._tokens = tokens
        names = sorted((name for name in tokens if name), key=len, reverse=True)
        markup = "\n".join((*(calls.markup if calls else ()), *(reasoning.markup if reasoning else ())))
        self._special = re.compile("|".join(re.escape(name) for name in names if name in markup) or "(?!)")

    @property
    def text_marks(self) -> list[str]:
        """The marks that begin calls and are plain text, without special tokens."""
        assert self._calls is not None
        return [begin for begin in self._calls.begin if not self._special.search(begin)]

    def answer(self, kind: str, guide: str, called: str, *, strict: bool) -> Format | None:
        """Return `guide_format` of a guide in a request with tools. Its texts are never parsed as calls, with one
        exception: JSON, if calls have no marks. strict: a function is strict, so there is no exception. Raises
        NoTagError."""
        assert self._calls is not None
        marks = self.text_marks
        made = self.content(kind, guide, called)
        if made is not None and strict and self._calls.bare:
            beside_calls.check_bare(kind, guide, self._calls.bracket)
        if made is None or not marks:
            return made
        if not kind.startswith("json"):
            beside_calls.check(kind, guide, marks)
            return made
        if self._calls.syntax == "json":  # its calls contain quotes, which are escaped in JSON strings
            return made
        schema = json.loads(guide) if guide else ANY_OBJECT["json_schema"]
        beside_calls.check_json(schema, marks)
        return json_of(schema, called, marks)

    def content(self, kind: str, guide: str, called: str) -> Format | None:
        """Return the format of a response whose content follows a guide; None for a wrong guide."""
        return guide_format(kind, guide, called)

    def forced(self, functions: Sequence[Function], *, several: bool) -> Format:
        """Return the format of a response that consists of calls. several: more than one call is allowed."""
        assert self._calls is not None
        frame = self._calls.frame("")
        calls = self._separated(functions, frame, several)
        return sequence([*self._markup(frame.opening), calls, *self._markup(frame.closing)])

    def free(self, functions: Sequence[Function], *, several: bool, continued: bool = False) -> Format:
        """Return the format of text that may contain calls. A text that begins like a call must be a call. continued:
        the response continues a text."""
        assert self._calls is not None
        frames = [self._calls.frame("", begin) for begin in self._calls.begin if begin != self._calls.each[0]]
        if frames[0].opening:
            opening = either([sequence(self._markup(frame.opening)) for frame in frames])
            block = [opening, self._separated(functions, frames[0], several), *self._markup(frames[0].closing)]
        else:
            before = either([sequence(self._markup(frame.before)) for frame in frames])
            block = [before, self._named(functions, self._middle(frames[0])), *self._markup(frames[0].after)]
        marks = self.text_marks
        text = any_text(*marks)
        rest = star(sequence([*block, text])) if several else optional(sequence(block))
        if not self._calls.bare or continued:
            return sequence([text, rest])
        # A response that begins with the bracket is a call. One that begins with the first character of a mark begins
        # with markup.
        first = "".join(re.escape(char) for char in sorted({self._calls.bracket, *(mark[0] for mark in marks)}))
        begun: Format = {"type": "regex", "pattern": f"[ \\t\\r\\n]*[^{first} \\t\\r\\n]"}
        return either([self.forced(functions, several=several), sequence([begun, text, rest]), rest])

    def guide(self, format: Format, called: str) -> str:
        """Convert the format to the engine's grammars. called: the name of the format in errors."""
        return grammars_of(format, called, self._tokens)

    def after_reasoning(self, format: Format, state: ReasoningState) -> Format:
        """Add the reasoning that may or must come before the format."""
        if self._reasoning is None or state == "none":
            return format
        begin, end = self._markup(self._reasoning.begin), self._markup(self._reasoning.end)
        thought = [self._text_before(end), *end, _SPACE_AFTER_REASONING]
        if state == "open":
            return sequence([*thought, format])
        return sequence([optional(sequence([*begin, *thought])), format])

    def _separated(self, functions: Sequence[Function], frame: Frame, several: bool) -> Format:
        """Return the format of one call or, if `several`, of one or more calls."""
        if not frame.before:
            call = sequence([self._named(functions, self._middle(frame)), *self._markup(frame.after)])
            return sequence([call, star(sequence([const(frame.separator), call]))]) if several else call
        first, *more = self._markup(frame.before)
        *after, last = self._markup(frame.after) or [const("")]
        content = sequence([*more, self._named(functions, self._middle(frame)), *after])
        begin, end = (one["value"] if one["type"] == "const_string" else one for one in (first, last))
        return {
            "type": "tags_with_separator",
            "tags": [{"begin": begin, "content": content, "end": end}],
            "separator": frame.separator,
            "at_least_one": True,
            "stop_after_first": not several,
        }

    def _middle(self, frame: Frame) -> list[Format]:
        """Return the formats between the name and the arguments of a call."""
        return [*([const(":"), _NUMBER] if frame.numbered else []), *self._markup(frame.middle)]

    def _named(self, functions: Sequence[Function], middle: Sequence[Format]) -> Format:
        """Return the format of the name and the arguments of a call. Each function is an option."""
        assert self._calls is not None
        free = [self._calls.frame(one.name).name for one in functions if one.parameters is None]
        options = [sequence([choice(free), *middle, self._arguments(None)])] if free else []
        copies = xml.Copies()
        for one in functions:
            if one.parameters is not None:
                shown = self._calls.frame(one.name).name
                options.append(sequence([const(shown), *middle, self._arguments(one, copies)]))
        return either(options)

    def _arguments(self, function: Function | None, copies: xml.Copies | None = None) -> Format:
        """Return the format of the arguments. Without a function, or without its parameters: any object."""
        assert self._calls is not None
        schema = function.parameters if function else None
        if self._calls.syntax == "gemma":
            quote = self._calls.quote, self._tokens.get(self._calls.quote)
            if schema is None:
                return {"type": "grammar", "grammar": gemma.any_object(*quote)}
            try:
                return {"type": "grammar", "grammar": gemma.object_of(schema, *quote)}
            except UnsupportedSchemaError as error:
                assert function is not None
                place = f"the parameters of function {_shown(function.name)}: the JSON schema, {error}"
                raise NoTagError(f"{place} in the format {self._calls.name}") from None
        if self._calls.syntax == "pythonic":
            if function is None or schema is None:
                return xml.any_keywords()
            return xml.keywords_of(
                schema, f"the parameters of function {_shown(function.name)}", copies or xml.Copies()
            )
        if self._calls.xml:
            return self._xml_arguments(self._calls.xml, function, copies or xml.Copies())
        if function is None or schema is None:
            return ANY_OBJECT
        return json_of(schema, f"tools: the parameters of function {_shown(function.name)}")

    def _xml_arguments(self, marks: xml.Xml, function: Function | None, copies: xml.Copies) -> Format:
        def parameter(key: Format, value: Format | None) -> Format:
            end = self._markup(marks.value[1].strip("\n"))
            return sequence(
                [
                    *self._markup(marks.key[0]),
                    key,
                    *self._markup(marks.key[1] + marks.value[0]),
                    value or self._text_before(end),
                    *self._markup(marks.value[1]),
                ]
            )

        if function is None or function.parameters is None:
            return xml.any_parameters(parameter)
        name = f"the parameters of function {_shown(function.name)}"
        end = marks.value[1].strip("\n")
        end = "" if self._special.search(end) else end
        return xml.parameters_of(function.parameters, parameter, name, end, copies)

    def _text_before(self, end: Sequence[Format]) -> Format:
        """Return the format of any text before the mark `end`."""
        return any_text(end[0]["value"]) if end[0]["type"] == "const_string" else any_text()

    def _markup(self, text: str) -> list[Format]:
        """Split markup into formats of tokens and texts."""
        parts: list[Format] = []
        at = 0
        for found in self._special.finditer(text):
            if found.start() > at:
                parts.append(const(text[at : found.start()]))
            parts.append({"type": "token", "token": self._tokens[found.group()]})
            at = found.end()
        if at and at < len(text):
            parts.append(SPACE_AFTER_TOKEN)
        if at < len(text):
            parts.append(const(text[at:]))
        return parts


def guide_format(kind: str, guide: str, called: str) -> Format | None:
    """Return the format of a guide. kind, guide: the tensors guided_decoding_guide_type and guided_decoding_guide.
    Returns None for a wrong guide: the engine reports the error. called: the name of a schema in errors."""
    if (kind == "json") == bool(guide):
        return None
    if kind == "json":
        return ANY_OBJECT
    if kind == "regex":
        return {"type": "regex", "pattern": guide, "name": called}
    if kind == "ebnf_grammar":
        return {"type": "grammar", "grammar": guide, "name": called}
    try:
        value = json.loads(guide, parse_constant=_no_json)
    except (ValueError, RecursionError):
        return None
    if kind == "json_schema" and isinstance(value, dict | bool):
        return json_of(value, called)
    if kind == "choice" and isinstance(value, list) and value and all(isinstance(one, str) for one in value):
        return choice(value)
    if kind == "structural_tag" and isinstance(value, dict):
        return value["format"] if isinstance(value.get("format"), dict) else _of_structures(value)
    return None


def _of_structures(tag: Mapping[str, Any]) -> Format | None:
    """Return the format of a structural tag in its older form; None if it is not valid."""
    structures, triggers = tag.get("structures"), tag.get("triggers")
    if not isinstance(structures, list) or not isinstance(triggers, list):
        return None
    tags = []
    for one in structures:
        if not isinstance(one, dict) or not {"begin", "schema", "end"} <= one.keys():
            return None
        content = {"type": "json_schema", "json_schema": one["schema"]}
        tags.append({"type": "tag", "begin": one["begin"], "content": content, "end": one["end"]})
    return {"type": "triggered_tags", "triggers": triggers, "tags": tags}


def _no_json(name: str) -> None:
    raise ValueError(name)


def _shown(name: str) -> str:
    return json.dumps(name, ensure_ascii=False)
