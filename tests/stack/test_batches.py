"""Batches, and responses in the background, with OpenAI's own client and the demo model."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
from waiting import until

PROMPTS = [f"{number} plus {number} is" for number in range(20)]


async def test_batch_has_the_answers_of_single_requests(api: openai.AsyncOpenAI, model: str) -> None:
    asked = {"model": model, "max_tokens": 8, "temperature": 0}
    expected = await asyncio.gather(*(api.completions.create(**asked, prompt=prompt) for prompt in PROMPTS))  # type: ignore[call-overload]
    lines = [
        {"custom_id": prompt, "method": "POST", "url": "/v1/completions", "body": {**asked, "prompt": prompt}}
        for prompt in PROMPTS
    ]
    text = "\n".join(map(json.dumps, lines)).encode()
    file = await api.files.create(file=("requests.jsonl", text), purpose="batch")
    begun = await api.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")

    async def ended() -> Any:
        batch = await api.batches.retrieve(begun.id)
        return batch if batch.status in ("completed", "failed") else None

    batch = await until(ended)
    assert batch.status == "completed" and batch.request_counts.completed == len(PROMPTS), batch
    answers = [json.loads(line) for line in (await api.files.content(batch.output_file_id)).text.splitlines()]
    texts = {one["custom_id"]: one["response"]["body"]["choices"][0]["text"] for one in answers}
    assert texts == {prompt: one.choices[0].text for prompt, one in zip(PROMPTS, expected, strict=True)}


async def test_background_response_is_that_of_a_waiting_client(api: openai.AsyncOpenAI, model: str) -> None:
    asked: dict[str, Any] = {"model": model, "input": "What is the capital of France?", "temperature": 0}
    asked |= {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    expected = await api.responses.create(**asked)
    stream = await api.responses.create(**asked, background=True, stream=True)
    first = [await anext(aiter(stream)), await anext(aiter(stream))]
    await stream.close()  # the response goes on
    rest = [event async for event in await api.responses.retrieve(first[0].response.id, stream=True, starting_after=1)]
    assert [event.sequence_number for event in first + rest] == list(range(2 + len(rest)))
    response = await api.responses.retrieve(first[0].response.id)
    assert (response.status, response.output_text) == ("completed", expected.output_text)
    logprobs: Any = response.output[0].content[0].logprobs  # type: ignore[union-attr]
    assert "".join(one.token for one in logprobs) == response.output_text
    assert logprobs == expected.output[0].content[0].logprobs  # type: ignore[union-attr]


async def test_allowed_tools_limit_the_calls(api: openai.AsyncOpenAI, model: str) -> None:
    """The demo model would ask for the weather."""
    tools: Any = [
        {"type": "function", "name": name, "parameters": {"type": "object", "properties": {}}}
        for name in ("get_weather", "get_time")
    ]
    for mode in ("auto", "required"):
        choice: Any = {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": "get_time"}]}
        response = await api.responses.create(
            model=model, input="What is the weather in Paris?", tools=tools, tool_choice=choice, temperature=0
        )
        names = [item.name for item in response.output if item.type == "function_call"]
        assert names == ["get_time"] if mode == "required" else "get_weather" not in names, response.output
