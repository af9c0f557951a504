"""Parsed answers in OpenAI's form: reasoning, content and calls of tools, of one response as deltas, or whole."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from charonia_client import GenerateResponse


def deltas(part: GenerateResponse) -> Iterator[dict[str, Any]]:
    """What a response adds to an answer that was asked for with `parsed`. A call's name comes before its arguments."""
    if part.reasoning:
        yield {"reasoning_content": part.reasoning}
    if part.content:
        yield {"content": part.content}
    for call in part.tool_calls:
        if call.name is not None:
            function = {"name": call.name, "arguments": ""}
            yield {"tool_calls": [{"index": call.index, "id": call.id, "type": "function", "function": function}]}
        if call.arguments:
            yield {"tool_calls": [{"index": call.index, "function": {"arguments": call.arguments}}]}


def message(answer: GenerateResponse) -> dict[str, Any]:
    """The message of an answer that came in one response and was asked for with `parsed`."""
    made: dict[str, Any] = {"role": "assistant", "content": answer.content, "refusal": None}
    if answer.reasoning:
        made["reasoning_content"] = answer.reasoning
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in answer.tool_calls
    ]
    if calls:
        made["tool_calls"] = calls
        made["content"] = answer.content or None
    return made


def finish_reason(reason: str | None, calls: bool) -> str | None:
    """OpenAI's, of the engine's. calls: the answer has some. What was cut off says so, also within a call."""
    return "tool_calls" if reason == "stop" and calls else reason
