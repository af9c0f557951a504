"""Structured output: OpenAI's `response_format`, and vLLM's `structured_outputs`."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from charonia_client import Guide
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

from charonia_gateway.schemas.fields import refused, wrong

MAX_CHOICES = 10_000


def _object_or_text(value: Any) -> Any:
    if value is not None and not isinstance(value, str | dict):
        raise wrong("send a JSON object, or its text")
    return value


class _Closed(BaseModel):
    """What constrains an answer is not ignored."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _known(cls, value: Any) -> Any:
        known = {field.alias or name for name, field in cls.model_fields.items()}
        if isinstance(value, dict) and (others := [repr(key) for key in value if key not in known]):
            raise wrong(f"{', '.join(others[:3])[:200]} is no field of it; it has {', '.join(sorted(known))}")
        return value


ObjectOrText = Annotated[str | dict[str, Any] | None, BeforeValidator(_object_or_text)]


class JsonSchema(_Closed):
    name: str = Field(description="taken, without effect")
    description: str | None = Field(None, description="taken, without effect")
    schema_: dict[str, Any] | None = Field(None, alias="schema", description="without it: any JSON object")
    strict: bool | None = Field(None, description="taken; the schema is always kept to the letter")


class ResponseFormat(_Closed):
    """The JSON is enforced; that it is wanted should be said in the prompt as well."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _consistent(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise wrong(
                'json_schema belongs to type "json_schema", and that needs it: '
                '{"type": "json_schema", "json_schema": {"name": ..., "schema": {...}}}'
            )
        return self

    def guide(self) -> Guide | None:
        if self.type == "text":
            return None
        schema = self.json_schema.schema_ if self.json_schema else None
        return Guide("json") if schema is None else Guide("json_schema", _json(schema))


class StructuredOutputs(BaseModel):
    """Exactly one of them."""

    model_config = ConfigDict(extra="forbid", strict=True)

    json_: ObjectOrText = Field(None, alias="json", description="a JSON schema, or its text")
    regex: str | None = Field(None, min_length=1, description="the whole answer matches it")
    choice: list[str] | None = Field(
        None, fail_fast=True, min_length=1, max_length=MAX_CHOICES, description="the answer is one of these"
    )
    grammar: str | None = Field(None, min_length=1, description="EBNF, from its rule `root`")
    json_object: bool | None = Field(None, description="any JSON object")
    structural_tag: ObjectOrText = Field(None, description="xgrammar's, or its text")

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
    """A field that vLLM had before."""
    why = refused(f'structured_outputs has taken its place: send {{"{name}": ...}} there')
    return Annotated[None, why, WithJsonSchema({"type": "null"})]


GuidedJson = _older("json")
GuidedRegex = _older("regex")
GuidedChoice = _older("choice")
GuidedGrammar = _older("grammar")


def _json(value: Any) -> str:
    """A text is JSON already."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
