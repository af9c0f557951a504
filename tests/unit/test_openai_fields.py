"""docs/openai_fields.md lists every request field of OpenAI's API once, with its effect in the gateway."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, get_args

import pytest
from charonia_gateway.body import ignored_fields, parse
from charonia_gateway.errors import ApiError
from charonia_gateway.schemas.openai_responses import ResponsesRequest
from charonia_gateway.schemas.pooling import EmbeddingRequest
from charonia_gateway.schemas.requests import ChatRequest, CompletionRequest
from openai.types import completion_create_params as completion_params
from openai.types import embedding_create_params as embedding_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params as response_params
from openai.types.shared import ReasoningEffort
from pydantic import BaseModel

PAGE = Path(__file__).resolve().parents[2] / "docs" / "openai_fields.md"
USER = {"role": "user", "content": "Hello"}
# The gateway's type, OpenAI's, and the fields that a request must have.
ROUTES: dict[str, tuple[type[BaseModel], Any, dict[str, Any]]] = {
    "/v1/embeddings": (EmbeddingRequest, embedding_params.EmbeddingCreateParams, {"input": "Hello"}),
    "/v1/chat/completions": (ChatRequest, chat_params.CompletionCreateParamsStreaming, {"messages": [USER]}),
    "/v1/completions": (CompletionRequest, completion_params.CompletionCreateParamsStreaming, {"prompt": "Hello"}),
    "/v1/responses": (ResponsesRequest, response_params.ResponseCreateParamsStreaming, {"input": "Hello"}),
}
# A value for each OpenAI field that the page lists as rejected.
REFUSED: dict[str, list[dict[str, Any]]] = {
    "/v1/embeddings": [
        {"input": []},
        {"input": [1, "two"]},
        {"input": ["a"] * 2049},
        {"dimensions": 0},
        {"encoding_format": "int8"},
    ],
    "/v1/chat/completions": [
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}},
        {"functions": [{"name": "f"}]},
        {"function_call": "auto"},
        {"modalities": ["text", "audio"]},
        {"audio": {"voice": "alloy", "format": "wav"}},
        {"response_format": {"type": "json_schema"}},
        {"stop": ["a", "b", "c", "d", "e"]},
        {"n": 129},
        {"messages": [USER] * 10_001},
    ],
    "/v1/completions": [
        {"prompt": [1, "two"]},
        {"suffix": "the end"},
        {"max_tokens": 0},
        {"logprobs": 21},
        {"best_of": 2, "n": 1, "stream": True},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"tool_choice": "required"},
        {"functions": [{"name": "f"}]},
        {"function_call": "auto"},
    ],
    "/v1/responses": [
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "name": "f"}},
        {"tool_choice": {"type": "web_search"}, "tools": [{"type": "function", "name": "f"}]},
        {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}},
        {"text": {"format": {"type": "grammar"}}},
        {"text": {"format": {"type": "json_schema", "name": "n"}}},
        {"include": ["file_search_call.results"]},
        {"background": True, "store": False},
        {"conversation": "c"},
        {"prompt": {"id": "p"}},
        {"reasoning": {"effort": "some"}},
        {"reasoning": {"summary": "some"}},
        {"truncation": "auto"},
        {"top_logprobs": 2},
        {"top_logprobs": 21, "include": ["message.output_text.logprobs"]},
        {"context_management": []},
        {"moderation": {}},
        {"max_tool_calls": 1},
        {"messages": [USER]},
        {"max_tokens": 3},
        {"max_completion_tokens": 3},
        {"stop": ["a"]},
        {"metadata": {"a": "b" * 513}},
        {"metadata": {str(number): "" for number in range(17)}},
        {"input": []},
        {"input": ""},
        {"input": [{"type": "function_call_output", "call_id": "c", "output": 7}]},
        {"input": [{"type": "function_call_output", "output": "o"}]},
        {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}]},
        {"input": [{"type": "item_reference", "id": "x"}]},
        {"input": [{"type": "reasoning", "content": [7]}]},
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        {"input": [{"role": "tool", "content": "x"}]},
        {"input": [{"role": "assistant", "content": "The"}]},
    ],
}


def rows(route: str) -> dict[str, str]:
    """Return field -> effect."""
    section = re.split(r"^## ", PAGE.read_text().partition(f"## {route}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]
    found = re.findall(r"^\| `(\w+)` \| (\w+) \|", section, re.MULTILINE)
    assert len(dict(found)) == len(found), "a field has two rows"
    return dict(found)


def body(route: str, **fields: Any) -> bytes:
    return json.dumps({"model": "m", **ROUTES[route][2], **fields}).encode()


@pytest.mark.parametrize("route", ROUTES)
def test_the_table_has_the_fields_of_the_openai_package(route: str) -> None:
    assert set(rows(route)) == set(ROUTES[route][1].__annotations__), "write down what becomes of the field"


@pytest.mark.parametrize("route", ROUTES)
def test_fields_are_accepted_or_ignored_as_the_docs_list_them(route: str) -> None:
    schema = ROUTES[route][0]
    without_effect = set()
    for name, kind in rows(route).items():
        field = schema.model_fields.get(name)
        if kind == "ignored" and field is None:
            assert ignored_fields(parse(schema, body(route, **{name: "x"}))) == [name]
        elif kind == "ignored":
            without_effect.add(name)
        else:
            assert field is not None, f"{name} is {kind} and unknown to the gateway"
    assert without_effect == {
        name
        for name, field in schema.model_fields.items()
        if re.match("(accepted|taken)[,;]", field.description or "") and name in rows(route)
    }


@pytest.mark.parametrize("effort", get_args(get_args(ReasoningEffort)[0]))
def test_each_effort_of_openais_is_taken(effort: str) -> None:
    chat = parse(ChatRequest, body("/v1/chat/completions", reasoning_effort=effort))
    response = parse(ResponsesRequest, body("/v1/responses", reasoning={"effort": effort}))
    for variables in (chat.template_variables(), response.template_variables()):
        assert variables is not None and variables["reasoning_effort"] == effort


@pytest.mark.parametrize(("route", "fields"), [(route, fields) for route in REFUSED for fields in REFUSED[route]])
def test_fields_that_the_docs_call_rejected_are_rejected(route: str, fields: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as error:
        parse(ROUTES[route][0], body(route, **fields))
    assert error.value.status == 400 and error.value.param is not None


def test_a_field_that_is_refused_outright_has_its_case() -> None:
    for route, cases in REFUSED.items():
        refused = {name for name, kind in rows(route).items() if kind == "rejected"}
        assert refused <= {name for fields in cases for name in fields}


def test_the_page_names_the_fields_that_openai_does_not_have() -> None:
    text = PAGE.read_text()
    own = {name for route in ROUTES for name in set(ROUTES[route][0].model_fields) - set(rows(route))}
    # OpenAI's fields of the other route
    own -= {"metadata", "store", "service_tier", "tools", "tool_choice", "functions", "function_call"}
    (listed,) = re.findall(r"does not have \((.*?)\)", text, re.DOTALL)
    assert set(re.findall(r"`(\w+)`", listed)) == own
