"""Answers and streams fit the types of the clients that people use, and the clients' own helpers work with them.

The model says what it is made to say: a parrot of tiny_models.py, which answers `<|text0|>` with TEXTS[0], and so on.
What a grammar forces it to say it says all the same.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest
from anthropic.types import Message, MessageTokensCount, RawMessageStreamEvent
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter
from stack import HANG_S, Stack, running
from tiny_models import write_model

MODEL = "caller"
TEXTS = [
    "<think>\nThey want the weather of Paris.\n</think>\n\nI look.\n\n"
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}\n</tool_call>\n'
    '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
    "It is sunny.",
    '<tool_call>\n{"name": "add", "arguments": {"a": 7}}\n</tool_call>',
]
REASONING, CONTENT = "They want the weather of Paris.", "I look."
CALLS = [("get_weather", {"city": "Paris", "days": 3}), ("add", {"a": 1})]
# The marks of the formats; what of a history is to reach the model; and what makes it answer, at the end.
TEMPLATE = (
    "{# <think> <tool_call> #}{% if tools %}tools:{{ tools | tojson }}{% endif %}"
    "{% for message in messages %}{% for call in message.tool_calls or [] %}"
    "call:{{ call.function.name }}={{ call.function.arguments.a }}{% endfor %}{{ message.content }}{% endfor %}"
)
CITY = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]}
A = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
SCHEMAS = {"get_weather": CITY, "add": A}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()
]
FUNCTIONS: list[Any] = [
    {"type": "function", "name": name, "parameters": schema, "strict": False} for name, schema in SCHEMAS.items()
]
ANTHROPICS: list[Any] = [{"name": name, "input_schema": schema} for name, schema in SCHEMAS.items()]
THINKING = {"type": "enabled", "budget_tokens": 1024}
GREEDY: dict[str, Any] = {"temperature": 0}


def ask(index: int) -> list[Any]:
    return [{"role": "user", "content": f"<|text{index}|>"}]


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("clients")
    write_model(folder / MODEL, "byte_level", "parrot", texts=TEXTS, chat_template=TEMPLATE)
    with running(Stack(folder / MODEL, folder / "run", {"CHARONIA_STREAM_INTERVAL_MS": "0"})) as served:
        yield served


@pytest.fixture
async def web(caller: Stack) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=caller.gateway, timeout=HANG_S) as client:
        yield client


@pytest.fixture
async def openai_client(caller: Stack) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{caller.gateway}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
async def anthropic_client(caller: Stack) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=caller.gateway, api_key="none", max_retries=0) as client:
        yield client


# --- every answer and event, as it is written


def extras(value: Any, at: str = "") -> Iterator[str]:
    """The fields of a client's type that it does not know: the clients take any."""
    if isinstance(value, BaseModel):
        for name in value.model_extra or {}:
            yield f"{at}.{name}"
        for name in type(value).model_fields:
            yield from extras(getattr(value, name), f"{at}.{name}")
    elif isinstance(value, list):
        for number, one in enumerate(value):
            yield from extras(one, f"{at}[{number}]")


def strict(kind: Any, value: Any, *, beside: tuple[str, ...] = ()) -> Any:
    """The value as the client's type, of which nothing is missing and beside which there is nothing else than fields
    whose names end in one of `beside`."""
    found = TypeAdapter(kind).validate_json(json.dumps(value), strict=True)
    more = [name for name in extras(found) if not name.endswith(beside or "?")]
    assert not more, f"{kind} has no {more}"
    return found


async def events(web: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The data of a stream's events."""
    answer = await web.post(path, json={**body, "stream": True})
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


# What of this server's own OpenAI's types do not have.
OWN = (".reasoning_content", ".store")


async def test_chat_completions_fit_openais_types(web: httpx.AsyncClient) -> None:
    body: dict[str, Any] = {"model": MODEL, "messages": ask(0), "tools": TOOLS, **GREEDY, "logprobs": True}
    answer = strict(ChatCompletion, (await web.post("/v1/chat/completions", json=body)).json(), beside=OWN)
    assert [call.function.name for call in answer.choices[0].message.tool_calls] == [name for name, _ in CALLS]
    with_usage = {**body, "stream_options": {"include_usage": True}}
    chunks = await events(web, "/v1/chat/completions", with_usage)
    found = [strict(ChatCompletionChunk, chunk, beside=OWN) for chunk in chunks]
    assert found[-1].usage is not None and found[-2].choices[0].finish_reason == "tool_calls"


async def test_messages_fit_anthropics_types(web: httpx.AsyncClient) -> None:
    body = {"model": MODEL, "max_tokens": 1500, "messages": ask(0), "tools": ANTHROPICS, "thinking": THINKING, **GREEDY}
    answer = strict(Message, (await web.post("/v1/messages", json=body)).json())
    thought, text, *calls = answer.content
    assert (thought.thinking, text.text, answer.stop_reason) == (REASONING, CONTENT, "tool_use")
    assert [(call.name, call.input) for call in calls] == CALLS and len({call.id for call in calls}) == 2
    written = [event for event in await events(web, "/v1/messages", body) if event["type"] != "ping"]
    found = [strict(RawMessageStreamEvent, event) for event in written]
    kinds = [event.content_block.type for event in found if event.type == "content_block_start"]
    assert kinds == ["thinking", "text", "tool_use", "tool_use"]
    pieces = [event for event in found if event.type == "content_block_delta" and event.index == 2]
    assert len(pieces) > 1 and json.loads("".join(piece.delta.partial_json for piece in pieces)) == CALLS[0][1]
    assert found[-2].delta.stop_reason == "tool_use"
    count = {name: body[name] for name in ("model", "messages", "tools", "thinking")}
    counted = strict(MessageTokensCount, (await web.post("/v1/messages/count_tokens", json=count)).json())
    used = answer.usage
    assert counted.input_tokens == used.input_tokens + used.cache_read_input_tokens
    assert 0 < used.output_tokens_details.thinking_tokens < used.output_tokens


async def test_responses_fit_openais_types(web: httpx.AsyncClient) -> None:
    body: dict[str, Any] = {"model": MODEL, "input": ask(0), "tools": FUNCTIONS, **GREEDY}
    body |= {"reasoning": {"effort": "low"}, "include": ["reasoning.encrypted_content"]}
    answer = strict(Response, (await web.post("/v1/responses", json=body)).json(), beside=OWN)
    thought, text, *calls = answer.output
    assert thought.content[0].text == REASONING and text.content[0].text == answer.output_text == CONTENT
    assert [(call.name, json.loads(call.arguments)) for call in calls] == CALLS
    assert answer.usage.output_tokens_details.reasoning_tokens > 0 and answer.reasoning.effort == "low"
    found = [strict(ResponseStreamEvent, event, beside=OWN) for event in await events(web, "/v1/responses", body)]
    for kind, text in (("reasoning_text", REASONING), ("output_text", CONTENT)):
        assert "".join(event.delta for event in found if event.type == f"response.{kind}.delta") == text
        assert [event.text for event in found if event.type == f"response.{kind}.done"] == [text]
    done = [event for event in found if event.type == "response.function_call_arguments.done"]
    assert [json.loads(event.arguments) for event in done] == [arguments for _, arguments in CALLS]
    assert [item.type for item in found[-1].response.output] == ["reasoning", "message", *["function_call"] * 2]
