"""Structured output: the required format of a response."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from charonia.errors import InvalidRequestError

GuideType = Literal["json", "json_schema", "regex", "ebnf_grammar", "structural_tag", "choice"]


@dataclass(frozen=True)
class Guide:
    """The required format of a text; see docs/structured_output.md. Use the class methods to create one.

        engine.generate("A pet, as JSON:", guide=Guide.json_schema({"type": "object", "properties": ...}))

    A request with an invalid guide raises InvalidRequestError.
    """

    type: GuideType
    text: str = ""

    @classmethod
    def json(cls) -> Guide:
        """Require any JSON object."""
        return cls("json")

    @classmethod
    def json_schema(cls, schema: str | bool | Mapping[str, Any]) -> Guide:
        """Require a JSON value that is valid under the schema, a mapping or its JSON text."""
        return cls("json_schema", schema if isinstance(schema, str) else _json("json_schema", schema))

    @classmethod
    def regex(cls, expression: str) -> Guide:
        """Require a text that the regular expression matches completely."""
        return cls("regex", expression)

    @classmethod
    def grammar(cls, text: str) -> Guide:
        """A text of a grammar in Lark, from its rule `start`; a server takes EBNF too, from its rule `root`."""
        return cls("ebnf_grammar", text)

    @classmethod
    def structural_tag(cls, tag: str | Mapping[str, Any]) -> Guide:
        """Tagged parts in free text, as xgrammar's structural tags describe them. A server takes it, and not an Engine
        in this process."""
        return cls("structural_tag", tag if isinstance(tag, str) else _json("structural_tag", tag))

    @classmethod
    def choice(cls, texts: Sequence[str]) -> Guide:
        """Require a text from this list."""
        return cls("choice", _json("choice", _texts(texts)))


def _texts(texts: Sequence[str]) -> list[str]:
    listed = list(texts)
    if isinstance(texts, str) or not all(isinstance(text, str) for text in listed):
        raise TypeError(f"choice = {texts!r} is not valid: it must be a list of texts")
    return listed


def _json(name: str, value: Any) -> str:
    try:
        return json.dumps(dict(value) if isinstance(value, Mapping) else value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{name} is not valid: it cannot be written as JSON: {error}") from None
