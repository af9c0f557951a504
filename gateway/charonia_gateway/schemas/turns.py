"""Converts conversations of other APIs (content blocks, items) to the messages of chat templates."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from charonia_gateway.json_values import has_too_many_values
from charonia_gateway.schemas.fields import MAX_DEPTH

INVALID = "INVALID_JSON"  # Anthropic's name
# In a request, arguments are nested in a list of messages, a message, a list of calls, a call and its function.
MAX_ARGUMENTS_DEPTH = MAX_DEPTH - 5


def arguments_object(text: str) -> dict[str, Any]:
    """Parse a call's arguments. Arguments that are not a JSON object, or that no request accepts, are returned as text
    under the key INVALID_JSON. The response may have been truncated, or the model wrote invalid JSON."""
    if has_too_many_values([text.encode("utf-8", "surrogatepass")]):
        return {INVALID: text}
    try:
        value = json.loads(text or "{}")
        # Values that JSON cannot represent: infinite numbers and lone surrogates.
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return {INVALID: text}
    return value if isinstance(value, dict) and not _is_too_deep(value) else {INVALID: text}


def _is_too_deep(value: dict[str, Any]) -> bool:
    level: list[Any] = [value]
    for _ in range(MAX_ARGUMENTS_DEPTH):
        level = [inner for outer in level for inner in _inner(outer)]
        if not level:
            return False
    return True


def _inner(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


@dataclass
class _Turn:
    """One message. fields: other fields of the template's message."""

    role: str
    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    fields: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, message: Mapping[str, Any]) -> _Turn:
        """The turn of an assistant's message, which can be extended."""
        texts, thoughts = ([text] if text else [] for text in (message["content"], message.get("reasoning_content")))
        return cls(message["role"], texts, thoughts, [*message.get("tool_calls", ())])

    def message(self) -> dict[str, Any]:
        content = "\n\n".join(text for text in self.texts if text)
        made: dict[str, Any] = {"role": self.role, "content": content, **self.fields}
        if self.thoughts:
            made["reasoning_content"] = "\n\n".join(self.thoughts)
        if self.calls:
            made["tool_calls"] = self.calls
        return made


class Turns:
    """Joins consecutive turns of one role to one message, because some chat templates require alternating roles. The
    result of a call is a separate message. before: the earlier messages. names: the names of the functions called in
    them, by call id."""

    def __init__(self, before: Sequence[dict[str, Any]] = ()) -> None:
        calls = (call for message in before for call in message.get("tool_calls", ()))
        self.names = {call["id"]: call["function"]["name"] for call in calls}
        self._before = list(before)
        self._turns: list[_Turn] = []
        if before and before[-1]["role"] == "assistant":
            self._turns.append(_Turn.of(self._before.pop()))

    def messages(self) -> list[dict[str, Any]]:
        return [*self._before, *(turn.message() for turn in self._turns)]

    def say(self, role: str, text: str) -> None:
        self._of(role).texts.append(text)

    def think(self, text: str) -> None:
        self._of("assistant").thoughts.append(text)

    def call(self, id: str, name: str, arguments: dict[str, Any]) -> None:
        self.names[id] = name
        function = {"name": name, "arguments": arguments}
        self._of("assistant").calls.append({"id": id, "type": "function", "function": function})

    def result(self, id: str, text: str) -> None:
        """Add a call's result. Some templates need the function's name."""
        name = {"name": self.names[id]} if id in self.names else {}
        self._turns.append(_Turn("tool", [text], fields={"tool_call_id": id, **name}))

    def _of(self, role: str) -> _Turn:
        if not self._turns or self._turns[-1].role != role:
            self._turns.append(_Turn(role))
        return self._turns[-1]
