"""OpenAI's Responses with its own client, unchanged: all responses and events match the client's types."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from gateway_process import gateway
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from stack import HANG_S, Stack

QUESTION = "What is the capital of France?"
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


@pytest.fixture
async def expected(api: openai.AsyncOpenAI, model: str) -> str:
    """The greedy response to QUESTION as a chat completion."""
    return await chat(api, model, {"role": "user", "content": QUESTION})


async def chat(api: openai.AsyncOpenAI, model: str, *messages: Any) -> str:
    answer = await api.chat.completions.create(model=model, messages=list(messages), temperature=0)
    return answer.choices[0].message.content or ""


async def test_response_matches_openai_type(api: openai.AsyncOpenAI, stack: Stack, model: str, expected: str) -> None:
    body = {"model": model, "input": QUESTION, "temperature": 0, "metadata": {"a": "b"}}
    async with httpx.AsyncClient(base_url=stack.gateway, timeout=HANG_S) as web:
        written = (await web.post("/v1/responses", json=body)).json()
    answer = TypeAdapter(Response).validate_python(written)
    assert answer.id.startswith("resp_") and answer.output_text == expected
    assert (answer.status, answer.error, answer.incomplete_details) == ("completed", None, None)
    assert answer.metadata == {"a": "b"} and written["store"] is False
    assert answer.usage is not None and answer.usage.total_tokens > answer.usage.input_tokens > 5
    short = await api.responses.create(model=model, input=QUESTION, max_output_tokens=2)
    assert short.status == "incomplete" and short.incomplete_details is not None
    assert short.incomplete_details.reason == "max_output_tokens"


async def test_stream_events_match_openai_types(stack: Stack, model: str, expected: str) -> None:
    body = {"model": model, "input": QUESTION, "temperature": 0, "stream": True}
    async with httpx.AsyncClient(base_url=stack.gateway, timeout=HANG_S) as web:
        written = await web.post("/v1/responses", json=body)
    kinds, texts = [], []
    for number, event in enumerate(written.text.removesuffix("\n\n").split("\n\n")):
        first, second = event.split("\n")
        data = json.loads(second.removeprefix("data: "))
        assert first == f"event: {data['type']}" and data["sequence_number"] == number
        parsed = EVENT.validate_python(data)
        kinds.append(parsed.type)
        if parsed.type == "response.output_text.delta":
            texts.append(parsed.delta)
        if parsed.type == "response.output_text.done":
            assert parsed.text == expected
    begin = ["response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"]
    end = ["response.output_text.done", "response.content_part.done", "response.output_item.done", "response.completed"]
    assert kinds[:4] == begin and kinds[-4:] == end
    # At least one delta: the number depends on the engine's speed.
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert "".join(texts) == expected


async def test_client_stream_collects_response(api: openai.AsyncOpenAI, model: str, expected: str) -> None:
    async with api.responses.stream(model=model, input=QUESTION, temperature=0, store=True) as stream:
        text = "".join([event.delta async for event in stream if event.type == "response.output_text.delta"])
        final = await stream.get_final_response()
    assert text == final.output_text == expected
    stored = await api.responses.retrieve(final.id)
    assert stored.output_text == expected and stored.usage == final.usage


async def test_conversation_continues_from_stored_response(api: openai.AsyncOpenAI, model: str, expected: str) -> None:
    first = await api.responses.create(model=model, input=QUESTION, temperature=0, store=True)
    asked: dict[str, Any] = {"model": model, "input": "And of Italy?", "temperature": 0}
    second = await api.responses.create(**asked, previous_response_id=first.id, instructions="Be brief.", store=True)
    turns = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": expected},
        {"role": "user", "content": "And of Italy?"},
    ]
    system = {"role": "system", "content": "Be brief."}
    assert second.output_text == await chat(api, model, system, *turns)
    assert second.previous_response_id == first.id
    # The instructions applied to one response only. Two conversations may continue the same response.
    other = await api.responses.create(**asked, previous_response_id=first.id)
    assert other.output_text == await chat(api, model, *turns)
    await api.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError) as gone:
        await api.responses.retrieve(first.id)
    assert gone.value.code == "response_not_found"
    with pytest.raises(openai.BadRequestError) as unknown:
        await api.responses.create(**asked, previous_response_id=first.id)
    assert unknown.value.code == "previous_response_not_found" and unknown.value.param == "previous_response_id"
    assert (await api.responses.retrieve(second.id)).output_text == second.output_text


async def test_responses_are_stored_only_on_request(api: openai.AsyncOpenAI, model: str) -> None:
    answer = await api.responses.create(model=model, input="Hello", max_output_tokens=2)
    with pytest.raises(openai.NotFoundError):
        await api.responses.retrieve(answer.id)


async def test_messages_of_every_form_are_accepted(api: openai.AsyncOpenAI, model: str, expected: str) -> None:
    items: Any = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "message", "id": "m", "status": "completed", "role": "assistant", "content": [
            {"type": "output_text", "text": "Hello.", "annotations": []}
        ]},
        {"role": "user", "content": QUESTION},
    ]  # fmt: skip
    answer = await api.responses.create(model=model, input=items, temperature=0)
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    turns += [{"role": "assistant", "content": "Hello."}, {"role": "user", "content": QUESTION}]
    assert answer.output_text == await chat(api, model, *turns)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools: tool 0 is of type 'web_search'"),
        ({"tool_choice": "required"}, "tool_choice needs tools"),
        ({"text": {"format": {"type": "grammar"}}}, "text: format: send"),
        (
            {"text": {"format": {"type": "json_schema", "name": "n", "schema": {"not": {}}}}},
            "text.format: the JSON schema, at /not: the keyword not is not supported",
        ),
        ({"include": ["file_search_call.results"]}, "include: nothing more"),
        ({"background": True}, "background: responses are not generated in the background"),
        ({"conversation": "c"}, "conversation: there are no conversations"),
        ({"prompt": {"id": "p"}}, "prompt: there are no stored prompts"),
        ({"reasoning": {"effort": "some"}}, "reasoning: effort: send one of"),
        ({"truncation": "auto"}, "truncation: a conversation that does not fit is rejected"),
        ({"top_logprobs": 2}, "top_logprobs: this route has no log probabilities"),
        ({"metadata": {"a": "b" * 513}}, "metadata: send at most 16 keys"),
        ({"input": []}, "input: send a text or a list of items"),
        ({"input": [{"type": "item_reference", "id": "i"}]}, "'item_reference'"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": "o"}]}, "function_call_output of 'c'"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "'input_image'"),
        ({"input": [{"role": "assistant", "content": "The"}]}, "this route does not continue it"),
    ],
)
async def test_unsupported_fields_are_rejected_by_name(
    api: openai.AsyncOpenAI, model: str, fields: dict[str, Any], said: str
) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        await api.responses.create(**{"model": model, "input": QUESTION, **fields})
    assert said in str(error.value), error.value
    assert error.value.param in (next(iter(fields)), "input", "text.format")


async def test_gateway_limits_stored_responses(stack: Stack, tmp_path: Path) -> None:
    for limit, kept in (("0", 0), ("2", 2)):
        log = tmp_path / f"{limit}.log"
        with gateway(stack.grpc, log, CHARONIA_GATEWAY_MAX_RESPONSES=limit) as process:
            async with httpx.AsyncClient(base_url=process.url, timeout=HANG_S) as web:
                body = {"model": "model", "input": "Hello", "max_output_tokens": 1, "store": True}
                answers = [await web.post("/v1/responses", json=body) for _ in range(3)]
                if not kept:
                    assert [answer.status_code for answer in answers] == [400] * 3
                    continue
                found = [await web.get(f"/v1/responses/{answer.json()['id']}") for answer in answers]
        assert [answer.status_code for answer in found] == [404, 200, 200]
