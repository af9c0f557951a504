"""The demo model calls the example's two tools and responds in JSON, through the whole stack."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest
from charonia_client import Tools
from load_file import load_file

EXAMPLE = Path(__file__).resolve().parents[2] / "client" / "examples" / "tools.py"


@pytest.fixture(scope="module")
def example() -> Any:
    return load_file(EXAMPLE)


async def test_call_is_run_and_its_result_answered(api: openai.AsyncOpenAI, model: str, example: Any) -> None:
    tools: Any = Tools([example.get_weather, example.calculate]).described
    for question, name, arguments in (
        ("What is the weather in Paris?", "get_weather", {"place": "Paris"}),
        ("What is 73 * 58?", "calculate", {"expression": "73 * 58"}),
    ):
        messages: list[Any] = [{"role": "user", "content": question}]
        asked = await api.chat.completions.create(model=model, messages=messages, tools=tools, temperature=0)
        assert asked.choices[0].finish_reason == "tool_calls"
        (call,) = asked.choices[0].message.tool_calls or ()
        assert call.type == "function" and call.function.name == name
        assert json.loads(call.function.arguments) == arguments
        result = getattr(example, name)(**arguments)
        messages += [
            asked.choices[0].message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": call.id, "content": json.dumps(result)},
        ]
        answer = await api.chat.completions.create(model=model, messages=messages, tools=tools, temperature=0)
        assert answer.choices[0].finish_reason == "stop"
        for value in result.values():
            assert str(value) in (answer.choices[0].message.content or "")
