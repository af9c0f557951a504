"""Anthropic's own client, unchanged, against the gateway."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import anthropic
import httpx
import openai
import pytest
from anthropic.types import Message
from stack import HANG_S, Stack

QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY: dict[str, Any] = {"extra_body": {"temperature": 0}}  # newer versions of the client do not have this field


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


async def test_max_tokens_and_context_end_have_different_reasons(api: anthropic.AsyncAnthropic, model: str) -> None:
    short = await api.messages.create(model=model, max_tokens=2, messages=QUESTION, **GREEDY)
    assert (short.stop_reason, short.usage.output_tokens) == ("max_tokens", 2)
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: .*does not fit"):
        await api.messages.create(model=model, max_tokens=2, messages=[{"role": "user", "content": "a b " * 5000}])


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
