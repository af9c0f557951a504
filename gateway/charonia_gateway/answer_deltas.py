"""Convert parsed responses to OpenAI's chat form (deltas or a whole message), and to ordered parts for other routes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from charonia_client import GenerateResponse
from charonia_client.types import ToolCallDelta


def deltas(part: GenerateResponse) -> Iterator[dict[str, Any]]:
    """The deltas of one part of a response that was requested with `parsed`. A call's name comes before its
    arguments."""
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


@dataclass(frozen=True, slots=True)
class Text:
    kind: Literal["reasoning", "content"]
    text: str


def in_order(part: GenerateResponse, *, parsed: bool, open_call: int | None = None) -> Iterator[Text | ToolCallDelta]:
    """The texts of one part of a response, in an order in which each item ends before the next begins. parsed: the
    response was requested with `parsed`. open_call: the index of the call that the earlier parts ended with."""
    if not parsed:
        if part.text:
            yield Text("content", part.text)
        return
    goes_on = [call for call in part.tool_calls if call.index == open_call]
    yield from goes_on
    if part.reasoning:
        yield Text("reasoning", part.reasoning)
    if part.content:
        yield Text("content", part.content)
    yield from part.tool_calls[len(goes_on) :]


def message(answer: GenerateResponse) -> dict[str, Any]:
    """The message of a complete response that was requested with `parsed`."""
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
    """Map the engine's finish reason to OpenAI's. calls: whether the response contains tool calls. A truncated call has
    the reason "length"."""
    return "tool_calls" if reason == "stop" and calls else reason
