"""Converts the items of OpenAI's Responses to the messages of chat templates."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from charonia_gateway.schemas.fields import MAX_MESSAGES, MAX_PARTS, check_arguments, join_parts, wrong
from charonia_gateway.schemas.media import name_media
from charonia_gateway.schemas.turns import Turns, arguments_object

_ROLES = ("user", "assistant", "system", "developer")
_TEXT_PARTS = ("input_text", "output_text", "text")


def offered_name(namespace: str, name: str) -> str:
    """Return the name under which the model sees a function. namespace: empty for a function without one."""
    return f"{namespace.removesuffix('__')}__{name}" if namespace else name


def input_items(value: Any) -> list[dict[str, Any]]:
    """Check the new part of the conversation. A plain text is the user's message. Keep only the fields of an item that
    are used."""
    if isinstance(value, str) and value:
        return [{"type": "message", "role": "user", "text": value}]
    if not isinstance(value, list) or not value:
        raise wrong("send a text or a list of items, which must not be empty")
    if len(value) > MAX_MESSAGES:
        raise wrong(f"{len(value)} items are too many: send at most {MAX_MESSAGES}")
    arguments = [item.get("arguments") for item in value if isinstance(item, dict)]
    check_arguments(text for text in arguments if isinstance(text, str))
    named, media = name_media(value)
    items = [
        _item(number, item) | ({"media": kinds} if kinds else {})
        for number, (item, kinds) in enumerate(zip(named, media, strict=True))
    ]
    if all(item["type"] == "ignored" for item in items):
        raise wrong(f"this server supports none of the items, such as {items[0]['ignored'][:40]!r}")
    return items


def _item(number: int, item: Any) -> dict[str, Any]:
    kind = item.get("type", "message") if isinstance(item, dict) else None
    match kind:
        case "message":
            return _message_item(number, item)
        case "function_call":
            return _call(number, item)
        case "function_call_output":
            text = _text(number, "output", item.get("output") or "", "tool")
            return {"type": kind, "id": _required(number, item, "call_id"), "text": text}
        case "reasoning":
            return _reasoning(number, item)
    if not isinstance(kind, str):
        raise wrong(f"item {number} is not an object with a type")
    # OpenAI's output of the local shell has no call_id. Its id is the id of the call.
    id = item.get("call_id") or (item.get("id") if kind == "local_shell_call_output" else None)
    if isinstance(id, str) and id:
        # A call of another kind of tool, from another model: the text tells this model what happened.
        if kind.endswith("_call_output"):
            output = item.get("output")
            text = output if isinstance(output, str) else json.dumps(output, ensure_ascii=False)
            return {"type": "function_call_output", "id": id, "text": text}
        if kind.endswith("_call"):
            rest = {
                name: value for name, value in item.items() if name not in ("type", "id", "call_id", "status", "name")
            }
            name = item.get("name") if isinstance(item.get("name"), str) else kind.removesuffix("_call")
            return {"type": "function_call", "id": id, "name": name, "arguments": arguments_object(json.dumps(rest))}
    return {"type": "ignored", "ignored": kind}


def _message_item(number: int, item: Mapping[str, Any]) -> dict[str, Any]:
    role = item.get("role")
    if role not in _ROLES:
        raise wrong(f"item {number}: its role is not one of {', '.join(_ROLES)}")
    content = item.get("content")
    text = _text(number, "content", "" if content is None and role == "assistant" else content, role)
    # Only a system message is joined with `instructions`.
    return {"type": "message", "role": "system" if role == "developer" else role, "text": text}


def _text(number: int, field: str, value: Any, role: str) -> str:
    parts = [{"type": "input_text", "text": value}] if isinstance(value, str) else value
    if not isinstance(parts, list) or len(parts) > MAX_PARTS:
        raise wrong(f"item {number}: its {field} is neither a text nor a list of at most {MAX_PARTS} parts")
    texts = []
    for part in parts:
        named = part.get("type") if isinstance(part, dict) else None
        if named not in _TEXT_PARTS or not isinstance(part.get("text"), str):
            raise wrong(f"item {number} has a part of type {str(named)[:40]!r}: this model takes texts only")
        texts.append(part["text"])
    return join_parts(texts, role)


def _required(number: int, item: Mapping[str, Any], field: str) -> str:
    value = item.get(field)
    if not isinstance(value, str) or not value:
        raise wrong(f"item {number}: its {field} is missing, or is not a string")
    return value


def _call(number: int, item: Mapping[str, Any]) -> dict[str, Any]:
    text = item.get("arguments") or ""
    if not isinstance(text, str):
        text = json.dumps(text, ensure_ascii=False)
    # The model may have written invalid JSON. The conversation still continues.
    name, id = _required(number, item, "name"), _required(number, item, "call_id")
    namespace = _required(number, item, "namespace") if item.get("namespace") else ""
    return {
        "type": "function_call",
        "id": id,
        "name": offered_name(namespace, name),
        "arguments": arguments_object(text),
    }


def _reasoning(number: int, item: Mapping[str, Any]) -> dict[str, Any]:
    """The text of a reasoning item, or its summary if it has no text."""
    found = []
    for field in ("content", "summary"):
        parts = item.get(field) or []
        if not isinstance(parts, list) or len(parts) > MAX_PARTS:
            raise wrong(f"item {number}: its {field} is not a list of at most {MAX_PARTS} parts")
        texts = [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]
        if len(texts) < len(parts):
            raise wrong(f"item {number}: its {field} has a part without a text")
        found.append("\n\n".join(texts))
    return {"type": "reasoning", "text": found[0] or found[1]}


def conversation(before: Sequence[dict[str, Any]], items: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages for the chat template: the messages of `before`, and the checked items. Raises KeyError with the
    call's id for the output of an unknown call."""
    turns = Turns(before)
    for item in items:
        match item["type"]:
            case "message":
                turns.say(item["role"], item["text"])
            case "reasoning" if item["text"]:
                turns.think(item["text"])
            case "function_call":
                turns.call(item["id"], item["name"], item["arguments"])
            case "function_call_output":
                if item["id"] not in turns.names:
                    raise KeyError(item["id"])
                turns.result(item["id"], item["text"])
    return turns.messages()
