"""Responses and streams match the types of common clients, and the clients' own helpers work with them.

The model is that of caller.py.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from anthropic.types import Message, MessageTokensCount, RawMessageStreamEvent
from caller import CALLS, CONTENT, MODEL, REASONING, SCHEMAS, TEXTS, TOOLS, A
from missing_tools import missing_tool
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter
from stack import HANG_S, Stack

ROOT = Path(__file__).resolve().parents[2]
FUNCTIONS: list[Any] = [
    {"type": "function", "name": name, "parameters": schema, "strict": False} for name, schema in SCHEMAS.items()
]
ANTHROPICS: list[Any] = [{"name": name, "input_schema": schema} for name, schema in SCHEMAS.items()]
THINKING = {"type": "enabled", "budget_tokens": 1024}
GREEDY: dict[str, Any] = {"temperature": 0}


def ask(index: int) -> list[Any]:
    return [{"role": "user", "content": f"<|text{index}|>"}]


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


# --- every response and event in its raw form


def extras(value: Any, at: str = "") -> Iterator[str]:
    """Fields that a client's type does not define: the clients accept unknown fields."""
    if isinstance(value, BaseModel):
        for name in value.model_extra or {}:
            yield f"{at}.{name}"
        for name in type(value).model_fields:
            yield from extras(getattr(value, name), f"{at}.{name}")
    elif isinstance(value, list):
        for number, one in enumerate(value):
            yield from extras(one, f"{at}[{number}]")


def strict(kind: Any, value: Any, *, extra: tuple[str, ...] = ()) -> Any:
    """The value as the client's type. No field may be missing, and additional fields must have names that end in one of
    `extra`."""
    found = TypeAdapter(kind).validate_json(json.dumps(value), strict=True)
    more = [name for name in extras(found) if not name.endswith(extra or "?")]
    assert not more, f"{kind} has no {more}"
    return found


async def events(web: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The data of a stream's events."""
    answer = await web.post(path, json={**body, "stream": True})
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


# Fields of this server that OpenAI's types do not have.
OWN = (".reasoning_content", ".store")


async def test_chat_completions_match_openai_types(web: httpx.AsyncClient) -> None:
    body: dict[str, Any] = {"model": MODEL, "messages": ask(0), "tools": TOOLS, **GREEDY, "logprobs": True}
    answer = strict(ChatCompletion, (await web.post("/v1/chat/completions", json=body)).json(), extra=OWN)
    assert [call.function.name for call in answer.choices[0].message.tool_calls] == [name for name, _ in CALLS]
    with_usage = {**body, "stream_options": {"include_usage": True}}
    chunks = await events(web, "/v1/chat/completions", with_usage)
    found = [strict(ChatCompletionChunk, chunk, extra=OWN) for chunk in chunks]
    assert found[-1].usage is not None and found[-2].choices[0].finish_reason == "tool_calls"


async def test_messages_match_anthropic_types(web: httpx.AsyncClient) -> None:
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
    assert json.loads("".join(piece.delta.partial_json for piece in pieces)) == CALLS[0][1]
    assert found[-2].delta.stop_reason == "tool_use"
    count = {name: body[name] for name in ("model", "messages", "tools", "thinking")}
    counted = strict(MessageTokensCount, (await web.post("/v1/messages/count_tokens", json=count)).json())
    used = answer.usage
    assert counted.input_tokens == used.input_tokens + used.cache_read_input_tokens
    assert 0 < used.output_tokens_details.thinking_tokens < used.output_tokens


async def test_responses_match_openai_types(web: httpx.AsyncClient) -> None:
    body: dict[str, Any] = {"model": MODEL, "input": ask(0), "tools": FUNCTIONS, **GREEDY}
    body |= {"reasoning": {"effort": "low"}, "include": ["reasoning.encrypted_content"]}
    answer = strict(Response, (await web.post("/v1/responses", json=body)).json(), extra=OWN)
    thought, text, *calls = answer.output
    assert thought.content[0].text == REASONING and text.content[0].text == answer.output_text == CONTENT
    assert [(call.name, json.loads(call.arguments)) for call in calls] == CALLS
    assert answer.usage.output_tokens_details.reasoning_tokens > 0 and answer.reasoning.effort == "low"
    found = [strict(ResponseStreamEvent, event, extra=OWN) for event in await events(web, "/v1/responses", body)]
    for kind, text in (("reasoning_text", REASONING), ("output_text", CONTENT)):
        assert "".join(event.delta for event in found if event.type == f"response.{kind}.delta") == text
        assert [event.text for event in found if event.type == f"response.{kind}.done"] == [text]
    done = [event for event in found if event.type == "response.function_call_arguments.done"]
    assert [json.loads(event.arguments) for event in done] == [arguments for _, arguments in CALLS]
    assert [item.type for item in found[-1].response.output] == ["reasoning", "message", *["function_call"] * 2]


# --- the openai package's own helpers


class add(BaseModel):
    a: int


async def test_openai_chat_helpers_parse_response(openai_client: openai.AsyncOpenAI) -> None:
    fields: dict[str, Any] = {"model": MODEL, "messages": ask(3), "response_format": add, **GREEDY}
    parsed = (await openai_client.chat.completions.parse(**fields)).choices[0].message.parsed
    async with openai_client.chat.completions.stream(**fields) as stream:
        streamed = (await stream.get_final_completion()).choices[0].message.parsed
    assert parsed == streamed == add(a=7)


async def test_openai_responses_helpers_parse_response(openai_client: openai.AsyncOpenAI) -> None:
    fields: dict[str, Any] = {"model": MODEL, "input": ask(3), "text_format": add, **GREEDY}
    parsed = await openai_client.responses.parse(**fields)
    async with openai_client.responses.stream(**fields) as stream:
        kinds = {event.type async for event in stream}
        streamed = await stream.get_final_response()
    assert parsed.output_parsed == streamed.output_parsed == add(a=7)
    assert {"response.output_text.delta", "response.output_text.done", "response.completed"} <= kinds
    tool = {"type": "function", "name": "add", "parameters": A, "strict": True}
    for choice in ("required", {"type": "function", "name": "add"}):
        forced = {**fields, "input": ask(2), "tools": [tool], "tool_choice": choice, "parallel_tool_calls": False}
        del forced["text_format"]
        (call,) = (await openai_client.responses.parse(**forced)).output
        assert (call.type, call.parsed_arguments) == ("function_call", {"a": 7})
        async with openai_client.responses.stream(**forced) as stream:
            (call,) = (await stream.get_final_response()).output
        assert (call.type, call.parsed_arguments) == ("function_call", {"a": 7})


async def test_stored_response_continues_with_output_of_call(openai_client: openai.AsyncOpenAI) -> None:
    fields: dict[str, Any] = {"model": MODEL, "tools": FUNCTIONS, "store": True, **GREEDY}
    first = await openai_client.responses.create(**fields, input=ask(0))
    calls = [item for item in first.output if item.type == "function_call"]
    outputs: list[Any] = [
        {"type": "function_call_output", "call_id": call.call_id, "output": text}
        for call, text in zip(calls, ("sunny", "<|text1|>"), strict=True)
    ]
    second = await openai_client.responses.create(**fields, input=outputs, previous_response_id=first.id)
    assert second.output_text == TEXTS[1]
    # The same without a stored response: the client sends the output items back.
    items: list[Any] = [*ask(0), *(item.to_dict() for item in first.output), *outputs]
    again = await openai_client.responses.create(**{**fields, "store": False}, input=items)
    assert again.output_text == TEXTS[1]
    assert again.usage is not None and second.usage is not None
    assert again.usage.input_tokens == second.usage.input_tokens
    assert (await openai_client.responses.retrieve(first.id)).output == first.output


# --- the anthropic package's own helpers


async def test_anthropic_helpers_parse_response(anthropic_client: anthropic.AsyncAnthropic) -> None:
    fields: dict[str, Any] = {"model": MODEL, "max_tokens": 100, "messages": ask(3), "output_format": add}
    parsed = await anthropic_client.messages.parse(**fields)
    assert parsed.parsed_output == add(a=7)
    async with anthropic_client.messages.stream(**fields) as stream:
        assert (await stream.get_final_message()).parsed_output == add(a=7)


@pytest.mark.parametrize(
    "choice", [{"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "add"}]
)
async def test_anthropic_client_gets_forced_call(
    anthropic_client: anthropic.AsyncAnthropic, choice: dict[str, Any]
) -> None:
    tool = {**ANTHROPICS[1], "strict": True}
    fields: dict[str, Any] = {"model": MODEL, "max_tokens": 100, "messages": ask(2), "tools": [tool]}
    whole = await anthropic_client.messages.create(**fields, tool_choice=choice)
    async with anthropic_client.messages.stream(**fields, tool_choice=choice) as stream:
        streamed = await stream.get_final_message()
    for answer in (whole, streamed):
        (block,) = answer.content
        assert block.type == "tool_use" and (block.name, block.input) == ("add", {"a": 7})
        assert answer.stop_reason == "tool_use"


@pytest.mark.parametrize("stream", [False, True])
async def test_anthropic_tool_runner_runs_functions(anthropic_client: anthropic.AsyncAnthropic, stream: bool) -> None:
    ran = []

    @anthropic.beta_async_tool
    async def add(a: int) -> str:
        """Adds."""
        ran.append(a)
        return "<|text1|>"

    runner: Any = anthropic_client.beta.messages.tool_runner(
        model=MODEL, max_tokens=500, tools=[add], messages=ask(2), stream=stream
    )
    final = await runner.until_done()
    assert ran == [7] and final.content[0].text == TEXTS[1]


# --- a coding agent


def agents_request(turns: list[Any], nonce: str) -> dict[str, Any]:
    """A request like Claude Code's."""
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {
            "file_path": {"type": "string", "description": "The absolute path to the file"},
            "limit": {"type": "integer", "exclusiveMinimum": 0},
            "options": {"type": "array", "items": {"anyOf": [{"type": "string"}, {"type": "null"}]}, "minItems": 1},
        },
        "required": ["file_path"],
        "additionalProperties": False,
    }
    names = ["get_weather", "add", *(f"mcp__a-rather-long-name-of-a-server__with_a_tool_{at}" for at in range(12))]
    return {
        "model": MODEL,
        "max_tokens": 32000,
        "system": [
            {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1; cch={nonce};"},
            {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "\n\nUse the tools.", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
        ],
        "messages": turns,
        "tools": [{"name": name, "description": f"Does {name}.", "input_schema": schema} for name in names],
        "tool_choice": {"type": "auto"},
        "thinking": {"type": "adaptive"},
        "metadata": {"user_id": "user_0_account__session_1"},
        "extra_body": {
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "output_config": {"effort": "medium"},
            "temperature": 1,
        },
    }


async def test_coding_agent_runs_its_loop(anthropic_client: anthropic.AsyncAnthropic) -> None:
    betas = ["claude-code-20250219", "interleaved-thinking-2025-05-14", "context-management-2025-06-27"]
    reminder = {"type": "text", "text": "<system-reminder>Be brief.</system-reminder>"}
    turns: list[Any] = [{"role": "user", "content": [reminder, {"type": "text", "text": "<|text0|>"}]}]
    for number in range(2):
        body = agents_request(turns, f"{number}")
        async with anthropic_client.beta.messages.stream(**body, betas=betas) as stream:
            final = await stream.get_final_message()
            assert stream.response.headers["charonia-ignored-fields"] == "context_management"
        turns.append({"role": "assistant", "content": [block.to_dict() for block in final.content]})
        if final.stop_reason != "tool_use":
            break
        # The template shows the last message, which contains the start token of the response.
        calls = [block for block in final.content if block.type == "tool_use"]
        results: list[Any] = [{"type": "tool_result", "tool_use_id": call.id, "content": "<|text1|>"} for call in calls]
        results[0] |= {"content": [{"type": "text", "text": "No such file"}], "is_error": True}
        turns.append({"role": "user", "content": results})
    assert [block["type"] for block in turns[1]["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    assert turns[1]["content"][0]["signature"] and final.stop_reason == "end_turn"
    assert [block.text for block in final.content] == [TEXTS[1]]
    cached = final.usage.cache_read_input_tokens or 0
    assert cached > final.usage.input_tokens, "the prompt begins as the one before"
    count = {name: body[name] for name in ("model", "system", "tools", "thinking", "extra_body")}
    counted = await anthropic_client.beta.messages.count_tokens(**count, messages=turns[:-1], betas=betas)
    assert counted.input_tokens == final.usage.input_tokens + cached > 5000


# --- libraries with separate environments


@pytest.mark.parametrize("library", ["langchain", "instructor", "agents"])
def test_library_works_with_gateway(caller: Stack, library: str) -> None:
    found = subprocess.run([ROOT / "scripts" / "get_clients.sh", "--there"], capture_output=True, text=True)
    if found.returncode:
        missing_tool("libraries of scripts/requirements-clients.txt are missing: `scripts/get_clients.sh` gets them")
    program = Path(__file__).parent / "clients" / f"with_{library}.py"
    command = [found.stdout.strip(), str(program), caller.gateway, MODEL]
    # Disables their telemetry.
    env = {name: value for name, value in os.environ.items() if not name.startswith(("OPENAI", "ANTHROPIC", "LANG"))}
    env |= {"LANGSMITH_TRACING": "false", "OPENAI_AGENTS_DISABLE_TRACING": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=HANG_S)
    assert (done.returncode, done.stdout.strip()) == (0, "done"), done.stderr
