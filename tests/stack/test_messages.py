"""Anthropic's own client, unchanged, against the gateway."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import httpx
import openai
import pytest
from anthropic.types import Message, MessageTokensCount, RawMessageStreamEvent
from pydantic import TypeAdapter
from stack import HANG_S, Stack

QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY: dict[str, Any] = {"extra_body": {"temperature": 0}}  # newer versions of the client do not have this field
EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


@pytest.fixture
async def api(stack: Stack) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=stack.gateway, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
async def web(stack: Stack) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=stack.gateway, timeout=HANG_S) as client:
        yield client


@pytest.fixture
async def expected(stack: Stack, model: str) -> str:
    """The greedy response of OpenAI's route."""
    async with openai.AsyncOpenAI(base_url=f"{stack.gateway}/v1", api_key="none", max_retries=0) as client:
        answer = await client.chat.completions.create(model=model, messages=QUESTION, temperature=0)
    return answer.choices[0].message.content or ""


def strict(kind: Any, value: Any) -> Any:
    """The value as anthropic's type. Strict, because the client itself accepts invalid values."""
    return TypeAdapter(kind).validate_python(value, strict=True)


async def test_response_matches_anthropic_type(web: httpx.AsyncClient, model: str, expected: str) -> None:
    body = {"model": model, "max_tokens": 200, "messages": QUESTION, "temperature": 0}
    answer = await web.post("/v1/messages", json=body, headers={"x-api-key": "any", "anthropic-version": "2023-06-01"})
    message = strict(Message, answer.json())
    assert (
        message.id.startswith("msg_") and answer.headers["request-id"] == answer.headers["x-request-id"] == message.id
    )
    (block,) = message.content
    assert (block.type, block.text) == ("text", expected)
    assert (message.stop_reason, message.stop_sequence, message.role) == ("end_turn", None, "assistant")
    assert message.usage.input_tokens + message.usage.cache_read_input_tokens > 5 and message.usage.output_tokens > 1


async def test_stream_events_match_anthropic_types_and_order(web: httpx.AsyncClient, model: str, expected: str) -> None:
    body = {"model": model, "max_tokens": 200, "messages": QUESTION, "temperature": 0, "stream": True}
    answer = await web.post("/v1/messages", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    names, texts = [], []
    for written in answer.text.removesuffix("\n\n").split("\n\n"):
        first, second = written.split("\n")
        data = json.loads(second.removeprefix("data: "))
        assert first == f"event: {data['type']}"
        names.append(data["type"])
        if data["type"] != "ping":
            event = EVENT.validate_python(data, strict=True)
            if event.type == "content_block_delta":
                texts.append(event.delta.text)
            if event.type == "message_start":
                assert event.message.content == [] and event.message.stop_reason is None
    assert names[:3] == ["message_start", "content_block_start", "ping"]
    # At least one delta: the number depends on the engine's speed. A slow response has more pings.
    assert set(names[3:-3]) - {"ping"} == {"content_block_delta"}
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert "".join(texts) == expected


async def test_client_stream_collects_response(api: anthropic.AsyncAnthropic, model: str, expected: str) -> None:
    fields: dict[str, Any] = {"model": model, "max_tokens": 200, "messages": QUESTION, **GREEDY}
    whole = await api.messages.create(**fields)
    async with api.messages.stream(**fields) as stream:
        text = "".join([piece async for piece in stream.text_stream])
        final = await stream.get_final_message()
    assert text == expected and [block.to_dict()["text"] for block in final.content] == [expected]
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
    prompt = [one.usage.input_tokens + (one.usage.cache_read_input_tokens or 0) for one in (whole, final)]
    assert prompt[0] == prompt[1]


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_sequence_ends_text_and_is_named(
    api: anthropic.AsyncAnthropic, model: str, expected: str, stream: bool
) -> None:
    stop = expected[len(expected) // 2 : len(expected) // 2 + 3]
    fields: dict[str, Any] = {"model": model, "max_tokens": 200, "messages": QUESTION, **GREEDY}
    fields["stop_sequences"] = ["never said", stop]
    if stream:
        async with api.messages.stream(**fields) as parts:
            answer = await parts.get_final_message()
    else:
        answer = await api.messages.create(**fields)
    assert answer.content[0].to_dict()["text"] == expected[: expected.index(stop)]
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", stop)
    fields["stop_sequences"] = ["never said"]
    assert (await api.messages.create(**fields)).stop_reason == "end_turn"


async def test_max_tokens_may_exceed_context(api: anthropic.AsyncAnthropic, model: str) -> None:
    answer = await api.messages.create(model=model, max_tokens=10**6, messages=QUESTION, timeout=HANG_S, **GREEDY)
    assert answer.stop_reason == "end_turn"


async def test_max_tokens_and_context_end_have_different_reasons(api: anthropic.AsyncAnthropic, model: str) -> None:
    short = await api.messages.create(model=model, max_tokens=2, messages=QUESTION, **GREEDY)
    assert (short.stop_reason, short.usage.output_tokens) == ("max_tokens", 2)
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: .*does not fit"):
        await api.messages.create(model=model, max_tokens=2, messages=[{"role": "user", "content": "a b " * 5000}])


async def test_system_and_turns_reach_the_model_and_are_counted(
    api: anthropic.AsyncAnthropic, stack: Stack, model: str
) -> None:
    turns: list[Any] = [
        {"role": "user", "content": [{"type": "text", "text": "Hel", "cache_control": {"type": "ephemeral"}}]},
        {"role": "user", "content": "again"},
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": [{"type": "text", "text": "Who"}, {"type": "text", "text": " are you?"}]},
    ]
    system: Any = [{"type": "text", "text": "Be brief."}]
    answer = await api.messages.create(model=model, max_tokens=24, system=system, messages=turns, **GREEDY)
    same = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hel\n\nagain"},
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": "Who\n are you?"},
    ]
    async with httpx.AsyncClient(base_url=stack.gateway, timeout=HANG_S) as web:
        body = {"model": model, "messages": same, "max_tokens": 24, "temperature": 0}
        other = (await web.post("/v1/chat/completions", json=body)).json()
    assert answer.content[0].to_dict()["text"] == other["choices"][0]["message"]["content"]
    counted = await api.messages.count_tokens(model=model, system=system, messages=turns)
    assert strict(MessageTokensCount, counted.to_dict()).input_tokens == other["usage"]["prompt_tokens"]
    assert answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0) == counted.input_tokens


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools: tool 0 is of type 'web_search"),
        ({"tool_choice": {"type": "any"}}, "tool_choice needs tools"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1}}, "thinking: budget_tokens"),
        ({"messages": [*QUESTION, {"role": "assistant", "content": "The "}]}, "must not end with white space"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "part 0 is of type 'image'"),
        ({"max_tokens": 0}, "max_tokens = 0"),
        ({"stop_sequences": ["a"] * 65}, "at most 64 strings"),
        ({"extra_body": {"mcp_servers": []}}, "mcp_servers: this server calls no MCP servers"),
        ({"extra_body": {"output_config": {"effort": "some"}}}, "output_config: effort"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}},
            "output_config.format: the JSON",
        ),
    ],
)
async def test_unsupported_fields_are_rejected_by_name(
    api: anthropic.AsyncAnthropic, model: str, fields: dict[str, Any], said: str
) -> None:
    with pytest.raises(anthropic.BadRequestError) as error:
        await api.messages.create(**{"model": model, "max_tokens": 2, "messages": QUESTION, **fields})
    assert error.value.type == "invalid_request_error" and said in str(error.value.api_message)
    assert error.value.request_id


async def test_errors_have_anthropic_format(api: anthropic.AsyncAnthropic, web: httpx.AsyncClient, model: str) -> None:
    with pytest.raises(anthropic.NotFoundError) as unknown:
        await api.messages.create(model="other", max_tokens=2, messages=QUESTION)
    assert unknown.value.type == "not_found_error"
    foreign = await web.post("/v1/messages", json={}, headers={"Origin": "https://elsewhere.example"})
    broken = await web.post("/v1/messages", content=b"{", headers={"content-type": "application/json"})
    absent = await web.get("/v1/messages/nothing")
    kinds = {403: "permission_error", 400: "invalid_request_error", 404: "not_found_error"}
    for answer in (foreign, broken, absent):
        error = answer.json()
        assert error["type"] == "error" and error["error"]["type"] == kinds[answer.status_code]
        assert error["request_id"] == answer.headers["request-id"]
    assert (await web.post("/v1/nothing")).json()["error"]["param"] is None  # other routes use OpenAI's format


@pytest.mark.parametrize("stream", [False, True])
async def test_begun_response_is_continued(
    api: anthropic.AsyncAnthropic, model: str, expected: str, stream: bool
) -> None:
    begun = expected[: expected.index(" ", len(expected) // 3)]
    turns: list[Any] = [*QUESTION, {"role": "assistant", "content": begun}]
    fields: dict[str, Any] = {"model": model, "max_tokens": 200, "messages": turns, **GREEDY}
    if stream:
        async with api.messages.stream(**fields) as events:
            answer: Message = await events.get_final_message()
    else:
        answer = await api.messages.create(**fields)
    assert [block.text for block in answer.content if block.type == "text"] == [expected[len(begun) :]]
    counted = await api.messages.count_tokens(model=model, messages=turns)
    whole = await api.messages.count_tokens(model=model, messages=QUESTION)
    assert whole.input_tokens < counted.input_tokens
    assert counted.input_tokens == answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)
