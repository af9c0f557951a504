"""LangChain's chat models: structured output with each of its methods, and tools, complete and streamed.

with_langchain.py GATEWAY MODEL: the model is the parrot of test_clients.py.
"""

from __future__ import annotations

import sys
from typing import Any

from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

GATEWAY, MODEL = sys.argv[1:]
CALL, ANSWER, JSON = "<|text2|>", "<|text1|>", "<|text3|>"


class Sum(BaseModel):
    """The arguments of an addition."""

    a: int


Sum.__name__ = "add"  # the function's result


@tool
def add(a: int) -> str:
    """Adds."""
    return f"{ANSWER}"


@tool
def get_weather(city: str, days: int) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


def loop_with_reasoning(chat: Any) -> None:
    """Two calls after reasoning; the client sends the reasoning back with them."""
    bound = chat.bind_tools([get_weather, add])
    history: list[Any] = [HumanMessage("<|text0|>")]
    chunks = list(bound.stream(history))
    joined = chunks[0]
    for chunk in chunks[1:]:
        joined += chunk
    for answer in (bound.invoke(history), joined):
        assert [call["name"] for call in answer.tool_calls] == ["get_weather", "add"], answer
        assert answer.text == "I look.", answer
        tools = {"get_weather": get_weather, "add": add}
        results = [
            ToolMessage(tools[call["name"]].invoke(call["args"]), tool_call_id=call["id"]) for call in answer.tool_calls
        ]
        assert bound.invoke([*history, answer, *results]).text == "It is sunny."


def loop(chat: Any) -> None:
    """A call, the function's result, and the model's response."""
    bound = chat.bind_tools([add])
    history: list[Any] = [HumanMessage(CALL)]
    whole = bound.invoke(history)
    (call,) = whole.tool_calls
    assert (call["name"], call["args"]) == ("add", {"a": 7}), call
    chunks = list(bound.stream(history))
    joined = chunks[0]
    for chunk in chunks[1:]:
        joined += chunk
    assert [(one["name"], one["args"]) for one in joined.tool_calls] == [("add", {"a": 7})], joined
    for answer in (whole, joined):
        results = [ToolMessage(add.invoke(one["args"]), tool_call_id=one["id"]) for one in answer.tool_calls]
        last = bound.invoke([*history, answer, *results])
        assert last.text == "It is sunny." and not last.tool_calls, last
    (call,) = chat.bind_tools([add], tool_choice="add").invoke(CALL).tool_calls
    assert call["args"] == {"a": 7}


def goes_on(chat: Any) -> None:
    """Continues a stored response: earlier messages are not sent again."""
    question = HumanMessage(CALL)
    first = chat.bind_tools([add]).invoke([question])
    (call,) = first.tool_calls
    result = ToolMessage(add.invoke(call["args"]), tool_call_id=call["id"])
    last = chat.bind_tools([add]).invoke([question, first, result])
    stored = chat.root_client.responses.retrieve(last.response_metadata["id"])
    assert last.text == "It is sunny." and stored.previous_response_id == first.response_metadata["id"], last


def structured(chat: Any, methods: dict[str, str]) -> None:
    for method, prompt in methods.items():
        found = chat.with_structured_output(Sum, method=method).invoke(prompt)
        assert found == Sum(a=7), (method, found)


openai = {"base_url": f"{GATEWAY}/v1", "api_key": "none", "model": MODEL, "temperature": 0, "max_retries": 0}
completions = ChatOpenAI(**openai, use_responses_api=False)
responses = ChatOpenAI(**openai, use_responses_api=True)
anthropic = ChatAnthropic(base_url=GATEWAY, api_key="none", model=MODEL, max_tokens=500, max_retries=0)
for chat in (completions, responses):
    structured(chat, {"function_calling": CALL, "json_mode": JSON, "json_schema": JSON})
structured(anthropic, {"function_calling": CALL, "json_schema": JSON})
for chat in (completions, responses, anthropic):
    loop(chat)
goes_on(ChatOpenAI(**openai, use_responses_api=True, use_previous_response_id=True, store=True))
thinking = {"type": "enabled", "budget_tokens": 1024}
thinks = ChatAnthropic(base_url=GATEWAY, api_key="none", model=MODEL, max_tokens=2000, max_retries=0, thinking=thinking)
for chat in (completions, responses, thinks):
    loop_with_reasoning(chat)
print("done")
