"""Structured output: OpenAI's `response_format`, and vLLM's `structured_outputs`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from charonia_client import Guide
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

from charonia_gateway.schemas.fields import refused, wrong

MAX_CHOICES = 10_000


def _object_or_text(value: Any) -> Any:
    if value is not None and not isinstance(value, str | dict):
        raise wrong("send a JSON object, or its text")
    return value


# Names of fields that constrain a response in other routes and servers.
_GUIDES = (
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "guided_decoding_guide",
    "guided_decoding_guide_type",
    "json_schema",
    "regex",
    "ebnf",
    "grammar",
    "structural_tag",
    "format",
    "output_format",
)
# Fields whose `format` may constrain the response.
_HOLDERS = ("text", "output_config")


def refuse_guides(extra: Mapping[str, Any] | None, remedy: str) -> None:
    """Raise an error for a constraint that would be ignored. extra: the fields that a route does not know. remedy: what
    to send instead."""
    for name in _GUIDES:
        if extra and extra.get(name) not in (None, "", {"type": "text"}):
            raise wrong(f"{name} is not a field of this route, so the response would not be constrained: {remedy}")
    for name in _HOLDERS:
        holder = extra.get(name) if extra else None
        if isinstance(holder, dict) and holder.get("format") not in (None, {"type": "text"}):
            raise wrong(
                f"{name}.format is not a field of this route, so the response would not be constrained: {remedy}"
            )


class _Closed(BaseModel):
    """Rejects unknown fields: they could be constraints."""

    model_config = ConfigDict(extra="forbid", strict=True)
    remedy: ClassVar[str]

    @model_validator(mode="before")
    @classmethod
    def _known(cls, value: Any) -> Any:
        known = {field.alias or name for name, field in cls.model_fields.items()}
        if isinstance(value, dict) and (others := [repr(key) for key in value if key not in known]):
            shown = ", ".join(others[:3])[:200]
            raise wrong(f"{shown} is not a field of it; its fields are {', '.join(sorted(known))}: {cls.remedy}")
        return value


ObjectOrText = Annotated[str | dict[str, Any] | None, BeforeValidator(_object_or_text)]


class JsonSchema(_Closed):
    remedy = 'send {"name": ..., "schema": {...}, "strict": true}, with the whole JSON schema in schema'

    name: str = Field(description="taken, without effect")
    description: str | None = Field(None, description="taken, without effect")
    schema_: dict[str, Any] | None = Field(None, alias="schema", description="if missing: any JSON object")
    strict: bool | None = Field(None, description="accepted; the schema is always enforced strictly")


class ResponseFormat(_Closed):
    """The engine enforces the JSON. The prompt should also ask for it."""

    remedy = (
        'to give a schema, send {"type": "json_schema", "json_schema": {"name": ..., "schema": {...}, "strict": true}}'
    )

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _consistent(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise wrong(
                'type "json_schema" and the field json_schema need each other: '
                '{"type": "json_schema", "json_schema": {"name": ..., "schema": {...}}}'
            )
        return self

    def guide(self) -> Guide | None:
        if self.type == "text":
            return None
        schema = self.json_schema.schema_ if self.json_schema else None
        return Guide("json") if schema is None else Guide("json_schema", _json(schema))


class StructuredOutputs(BaseModel):
    """A constraint; exactly one field is set."""

    model_config = ConfigDict(extra="forbid", strict=True)

    json_: ObjectOrText = Field(None, alias="json", description="a JSON schema, or its text")
    regex: str | None = Field(None, min_length=1, description="a regular expression that the whole response matches")
    choice: list[str] | None = Field(
        None, fail_fast=True, min_length=1, max_length=MAX_CHOICES, description="the response is one of these texts"
    )
    grammar: str | None = Field(
        None, min_length=1, description="a grammar in Lark with the rule `start`, or in EBNF with the rule `root`"
    )
    json_object: bool | None = Field(None, description="any JSON object")
    structural_tag: ObjectOrText = Field(None, description="a structural tag of xgrammar, or its text")

    @model_validator(mode="after")
    def _one(self) -> StructuredOutputs:
        given = [name.rstrip("_") for name in type(self).model_fields if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise wrong(
                "send exactly one of json, regex, choice, grammar, json_object and structural_tag, and not "
                + (" and ".join(given) or "none")
            )
        return self

    def guide(self) -> Guide:
        if self.json_ is not None:
            return Guide("json_schema", _json(self.json_))
        if self.structural_tag is not None:
            return Guide("structural_tag", _json(self.structural_tag))
        if self.choice is not None:
            return Guide("choice", _json(self.choice))
        if self.regex is not None:
            return Guide("regex", self.regex)
        return Guide("json") if self.grammar is None else Guide("ebnf_grammar", self.grammar)


def _older(name: str) -> Any:
    """The check of a field that vLLM had in older versions."""
    why = refused(f'structured_outputs has replaced it: send {{"{name}": ...}} there')
    return Annotated[None, why, WithJsonSchema({"type": "null"})]


GuidedJson = _older("json")
GuidedRegex = _older("regex")
GuidedChoice = _older("choice")
GuidedGrammar = _older("grammar")


def _json(value: Any) -> str:
    """Return the value as JSON. A string already is JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
