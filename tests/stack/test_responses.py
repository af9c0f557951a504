"""A conversation of stored responses with OpenAI's own client, compared with chat completions."""

from __future__ import annotations

from typing import Any

import openai
import pytest

QUESTION = "What is the capital of France?"


@pytest.fixture
async def expected(api: openai.AsyncOpenAI, model: str) -> str:
    """The greedy response to QUESTION as a chat completion."""
    return await chat(api, model, {"role": "user", "content": QUESTION})


async def chat(api: openai.AsyncOpenAI, model: str, *messages: Any) -> str:
    answer = await api.chat.completions.create(model=model, messages=list(messages), temperature=0)
    return answer.choices[0].message.content or ""


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
