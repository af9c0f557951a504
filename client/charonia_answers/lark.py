"""Converts formats of responses to the engine's grammars: a list, in which the first grammar refers to the others.

A format is one of xgrammar's structural tags. llguidance reads free text as one lexeme, which does not end by itself.
So text is joined with the format that follows it: the lexeme ends with the first text of that format.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from .ebnf import EbnfError, is_lark, to_lark
from .tag_parts import Format, NoTagError, const, either, sequence

_ANY = "/(?s:.*)/"
# A format that may follow a text in several ways is written once for each, so nested formats can grow exponentially.
# The grammar may have this many characters for each character of the format, and in addition:
_REPEATS = 20
_REPEATED = 100_000


def grammars_of(format: Format, called: str, tokens: Mapping[str, int]) -> str:
    """Return the text of a guide of type structural_tag. called: the name of the guide in errors. tokens: ids of
    special tokens, by name. Raises NoTagError."""
    writer = _Writer(tokens, _REPEATS * len(json.dumps(format)) + _REPEATED)
    try:
        start = writer.write(format)
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise NoTagError(f"the structural tag is not valid ({problem})") from None
    grammar = "\n".join([f"start: {start}", *writer.rules])
    whole = {"called": called, "grammars": [{"lark_grammar": grammar}, *writer.grammars]}
    return json.dumps(whole, ensure_ascii=False, separators=(",", ":"))


class _Writer:
    def __init__(self, tokens: Mapping[str, int], limit: int) -> None:
        self._tokens = tokens
        self._left = limit  # characters that may still be written
        self._names: dict[str, str] = {}  # names of rules and grammars, by their contents
        self.rules: list[str] = []
        self.grammars: list[dict[str, Any]] = []

    def _count(self, written: str) -> str:
        self._left -= len(written) + 20
        if self._left < 0:
            raise NoTagError("the structural tag is too large: nested formats repeat what follows them too often")
        return written

    def write(self, format: Format) -> str:
        """Return the expression of a format: one atom, or a sequence of atoms."""
        return self._count(self._write(format))

    def _write(self, format: Format) -> str:
        kind = format["type"]
        if kind == "sequence":
            return self._sequence(list(format["elements"]))
        if kind in ("star", "plus", "optional"):
            content = format["content"]
            if kind == "star" and _ends_with_text(content):
                return self._sequence([format])
            return f"({self.write(content)}){'*+?'[('star', 'plus', 'optional').index(kind)]}"
        if kind == "or":
            return self._rule("r", " | ".join(self.write(one) for one in format["elements"]))
        if kind == "any_text":
            return self._text(format)
        if kind == "const_string":
            return json.dumps(format["value"], ensure_ascii=False)
        if kind == "choice":
            return self._rule("C", " | ".join(json.dumps(one, ensure_ascii=False) for one in format["values"]))
        if kind == "token":
            return f"<[{self._token(format['token'])}]>"
        if kind == "json_schema":
            return self._grammar(format, "json_schema", format["json_schema"])
        if kind == "regex":
            return self._grammar(format, "regex", format["pattern"])
        if kind == "grammar":
            return self._grammar(format, "lark_grammar", lark_of(format["grammar"]))
        if kind == "tag":
            return self.write(sequence(self._tag(format)))
        if kind == "tags_with_separator":
            return self.write(self._separated(format))
        if kind == "triggered_tags":
            return self.write(self._triggered(format))
        raise NoTagError(f"the structural tag's type {json.dumps(kind)} is not supported")

    def _sequence(self, parts: list[Format]) -> str:
        out = []
        while parts:
            first = parts.pop(0)
            if first["type"] == "star" and _ends_with_text(first["content"]):
                # (block text)* is (block (text block)* text)?
                *block, text = first["content"]["elements"]
                rest = self._sequence([*block, text, first, *parts])
                out.append(f"({rest} | {self._sequence(parts)})" if parts else f"({rest})?")
                break
            if first["type"] == "any_text" and parts:
                out.append(self._text_before(first, parts))
                break
            out.append(self.write(first))
        return self._count(" ".join(one for one in out if one) or '""')

    def _text_before(self, text: Format, parts: list[Format]) -> str:
        """Return the expression of a text and the formats after it."""
        following, *rest = parts
        kind = following["type"]
        if kind == "sequence":
            return self._sequence([text, *following["elements"], *rest])
        if kind in ("tag", "tags_with_separator", "triggered_tags"):
            expand = {"tag": lambda one: sequence(self._tag(one)), "triggered_tags": self._triggered}
            return self._sequence([text, expand.get(kind, self._separated)(following), *rest])
        if kind == "any_text":
            return self._sequence([text, *rest])
        if kind == "or":
            options = [self._sequence([text, one]) for one in following["elements"]]
            return " ".join([f"({' | '.join(options)})", *([self._sequence(rest)] if rest else [])])
        if kind == "optional":
            return f"({self._sequence([text, following['content'], *rest])} | {self._sequence([text, *rest])})"
        if kind == "star" and not rest and _ends_with_text(following["content"]):
            # text (block text)* is (text block)* text
            *block, _ = following["content"]["elements"]
            return f"({self._sequence([text, *block])})* {self.write(text)}"
        if kind == "const_string" and following["value"]:
            head = self._rule("h", f"{self._text(text)} {self.write(following)}", lazy=True)
        elif kind == "token":
            head = f"{self._text(text)} {self.write(following)}"
        else:
            raise NoTagError(f"in a structural tag any_text must be followed by a text or a token, and not by {kind}")
        return f"{head} {self._sequence(rest)}" if rest else head

    def _text(self, format: Format) -> str:
        """Return a terminal for any text that contains none of the excluded texts."""
        without = [one for one in format.get("excludes") or () if one]
        if not without:
            return self._rule("X", _ANY)
        marks = " | ".join(json.dumps(one, ensure_ascii=False) for one in without)
        return self._rule("X", f"{_ANY} & ~({_ANY} ({marks}) {_ANY})")

    def _token(self, token: Any) -> int:
        if isinstance(token, int) and not isinstance(token, bool):
            return token
        if not isinstance(token, str) or token not in self._tokens:
            raise NoTagError(f"the structural tag names the token {json.dumps(token)}, which the model does not have")
        return self._tokens[token]

    def _rule(self, kind: str, body: str, *, lazy: bool = False) -> str:
        """Return the name of a rule, which is added if needed. If `kind` is an upper-case letter, it is a terminal."""
        key = self._count(f"{kind}:{body}")
        if key not in self._names:
            self._names[key] = f"{kind}{len(self._names)}"
            self.rules.append(f"{self._names[key]}{'[lazy]' if lazy else ''}: {body}")
        return self._names[key]

    def _grammar(self, format: Format, kind: str, value: Any) -> str:
        entry: dict[str, Any] = {kind: value}
        if isinstance(format.get("name"), str):
            entry["called"] = format["name"]
        key = self._count(json.dumps(entry))
        if key not in self._names:
            self._names[key] = f"g{len(self.grammars)}"
            self.grammars.append({"name": self._names[key], **entry})
        return f"@{self._names[key]}"

    def _tag(self, format: Format) -> list[Format]:
        """Return the formats of begin, content and end. Each mark is a text or a token."""
        begin, end = (
            one if isinstance(one, dict) else const(one) for one in (format["begin"], format.get("end") or const(""))
        )
        if not isinstance(end, dict):
            raise NoTagError("the end of a tag is a text or a token")
        return [begin, format["content"], end]

    def _separated(self, format: Format) -> Format:
        tags = either([sequence(self._tag(one)) for one in format["tags"]])
        several = sequence([tags, {"type": "star", "content": sequence([const(format["separator"]), tags])}])
        calls = tags if format.get("stop_after_first") else several
        return calls if format.get("at_least_one") else {"type": "optional", "content": calls}

    def _triggered(self, format: Format) -> Format:
        """Return the format of free text that contains tags. A text that begins with a trigger must be a tag."""
        tags = format["tags"]
        for one in tags:
            if not any(isinstance(one["begin"], str) and one["begin"].startswith(t) for t in format["triggers"]):
                raise NoTagError("each tag of triggered_tags begins with one of its triggers")
        text: Format = {"type": "any_text", "excludes": [*format["triggers"], *(format.get("excludes") or ())]}
        block = either([sequence(self._tag(one)) for one in tags])
        kind = "optional" if format.get("stop_after_first") else "star"
        rest: Format = {"type": kind, "content": sequence([block, text])}
        if format.get("at_least_one"):
            return sequence([block, text] if kind == "optional" else [block, text, rest])
        return sequence([text, rest])


def _ends_with_text(format: Format) -> bool:
    return bool(format["type"] == "sequence" and format["elements"] and format["elements"][-1]["type"] == "any_text")


def lark_of(grammar: str) -> str:
    """Return a grammar in Lark: an EBNF grammar is converted, another grammar is not changed. Raises NoTagError."""
    if is_lark(grammar):
        return grammar
    try:
        return to_lark(grammar)
    except EbnfError as error:
        raise NoTagError(f'{error}. (Lark is taken too: start: "a" item+)') from None
