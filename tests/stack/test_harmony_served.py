"""GPT-OSS' format harmony through the whole stack, with its released tokenizer and template. The model is tiny and
random, so grammars write the responses."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletion
from released_templates import released_templates
from released_tokenizers import write_released_tokenizer
from safetensors.numpy import save_file
from stack import HANG_S, Stack, running
from tiny_models import llama_weights, write_model

pytestmark = pytest.mark.slow  # downloads packages

END, CHANNEL, ANALYSIS = 200007, 200005, 35644  # <|end|>, <|channel|> and the word after it
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION: dict[str, Any] = {"name": "get_weather", "description": "The weather.", "parameters": CITY, "strict": True}
TOOLS = [{"type": "function", "function": FUNCTION}]
ASKED = {"role": "user", "content": "What is the weather in Paris?"}
# With these biases, most responses have several messages of reasoning, each of a few random tokens.
BIASES = {str(END): 11, str(CHANNEL): 5, str(ANALYSIS): 5}
SAMPLED: dict[str, Any] = {"model": "oss", "temperature": 1.0, "seed": 1, "logit_bias": BIASES}
FORCED: dict[str, Any] = {"messages": [ASKED], "tools": TOOLS, "tool_choice": "required", "n": 8}


@pytest.fixture(scope="module")
def oss(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("harmony")
    model = folder / "oss"
    write_model(model, "byte_level", "babbler", hidden=128, positions=4096)
    config = json.loads((model / "config.json").read_text())
    config |= {"vocab_size": 201_088, "eos_token_id": [200002, 199999, 200012]}
    (model / "config.json").write_text(json.dumps(config))
    write_released_tokenizer("gptoss", model)
    template = released_templates()["trl/gptoss"]
    today = 'strftime_now("%Y-%m-%d")'
    assert today in template
    (model / "chat_template.jinja").write_text(
        template.replace(today, '"2026-11-30"')
    )  # else each day has other tokens
    save_file(llama_weights(config, None), model / "model.safetensors", metadata={"format": "pt"})
    with running(Stack(model, folder / "run", {"CHARONIA_STREAM_INTERVAL_MS": "0"})) as served:
        yield served


@pytest.fixture
async def api(oss: Stack) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{oss.gateway}/v1", api_key="none", max_retries=0, timeout=HANG_S) as api:
        yield api


def reasoning_of(message: Any) -> str:
    return (message.model_extra or {}).get("reasoning_content") or ""


async def test_chat_calls_a_function_and_then_follows_a_schema(api: openai.AsyncOpenAI) -> None:
    fields = {**FORCED, "max_tokens": 2000}  # the client's stream allows no response that reaches the limit
    answer: ChatCompletion = await api.chat.completions.create(**SAMPLED, **fields)
    ended = [choice for choice in answer.choices if choice.finish_reason != "length"]
    assert ended
    for choice in ended:
        (call,) = choice.message.tool_calls or []
        assert call.type == "function" and choice.finish_reason == "tool_calls" and not choice.message.content
        assert call.function.name == "get_weather" and json.loads(call.function.arguments)["city"] in ("Paris", "Rome")
    assert any(reasoning_of(choice.message) for choice in ended)

    async with api.chat.completions.stream(**SAMPLED, **fields) as stream:
        streamed = await stream.get_final_completion()
    for one, other in zip(answer.choices, streamed.choices, strict=True):
        assert one.finish_reason == other.finish_reason
        assert reasoning_of(one.message) == reasoning_of(other.message)
        assert [call.function.arguments for call in one.message.tool_calls or []] == [
            call.function.arguments for call in other.message.tool_calls or []
        ]

    said = ended[0].message
    history = [ASKED, said.model_dump(exclude_none=True)]
    history.append({"role": "tool", "tool_call_id": (said.tool_calls or [])[0].id, "content": "sunny"})
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
    more: dict[str, Any] = {"messages": history, "response_format": form, "n": 8, "max_tokens": 300}
    answer = await api.chat.completions.create(**SAMPLED, **more)
    contents = [choice.message.content for choice in answer.choices if choice.finish_reason == "stop"]
    assert contents and all(json.loads(content or "")["city"] in ("Paris", "Rome") for content in contents)


async def test_truncated_response_has_the_beginning_of_the_reasoning(api: openai.AsyncOpenAI) -> None:
    whole = await api.chat.completions.create(**SAMPLED, **FORCED, max_tokens=40)
    for size in (1, 2, 3, 4, 6, 12):
        answer = await api.chat.completions.create(**SAMPLED, **FORCED, max_tokens=size)
        for one, other in zip(answer.choices, whole.choices, strict=True):
            assert one.finish_reason == "length" and not one.message.content
            begun = reasoning_of(one.message).rstrip("\ufffd")  # the last character may be incomplete
            assert reasoning_of(other.message).startswith(begun)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (
            "/v1/responses",
            {
                "tools": [{"type": "function", **FUNCTION}],
                "tool_choice": "required",
                "max_output_tokens": 60,
            },
        ),
        (
            "/v1/messages",
            {
                "thinking": {"type": "adaptive"},
                "tools": [{"name": "get_weather", "input_schema": CITY, "strict": True}],
                "tool_choice": {"type": "any"},
                "max_tokens": 60,
            },
        ),
    ],
)
async def test_other_apis_return_the_call(oss: Stack, path: str, fields: dict[str, Any]) -> None:
    async with httpx.AsyncClient(base_url=oss.gateway, timeout=HANG_S) as http:
        for number in range(20):  # most responses are random reasoning up to max_tokens
            asked = [{"role": "user", "content": f"{ASKED['content']} {number}"}]
            named = {"input": asked} if path == "/v1/responses" else {"messages": asked}
            answer = await http.post(path, json={"model": "oss", "temperature": 0, **fields, **named})
            assert answer.status_code == 200, answer.text
            parts = answer.json().get("output") or answer.json()["content"]
            kinds = [part["type"] for part in parts]
            assert "message" not in kinds and "text" not in kinds
            if {"function_call", "tool_use"}.intersection(kinds):
                break
    arguments = parts[-1].get("input") or json.loads(parts[-1]["arguments"])
    assert (parts[-1]["name"], arguments["city"] in ("Paris", "Rome")) == ("get_weather", True)
