"""Parts of a conversation that are not text, such as images. A tool returned them, or an earlier turn has them. A text
that names the part replaces it, so that the conversation goes on. Such a part in a new message of the user is left, and
the check of the message rejects it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import ValidatorFunctionWrapHandler, WrapValidator

from charonia_gateway.schemas.fields import unsupported

# Types of all APIs: images, sound, files and documents.
_MEDIA = ("image_url", "input_audio", "file", "image", "document", "input_image", "input_file")
_TEXTS = ("text", "input_text", "output_text", "refusal")


def name_media(messages: Sequence[Any]) -> tuple[list[Any], list[list[str]]]:
    """Return the unchecked messages or items with texts for their media, and the types of the replaced parts of each.
    A tool's result keeps only its parts of text."""
    new = len(messages)
    while new and not _is_of_model(messages[new - 1]):
        new -= 1
    # A client also sends what a tool returned as a message of the user after the tool's result.
    old = len(messages) if any(_is_result(message) for message in messages[new:]) else new
    named = [_named(message) if at < old else (message, []) for at, message in enumerate(messages)]
    return [message for message, _ in named], [kinds for _, kinds in named]


def _is_of_model(message: Any) -> bool:
    return isinstance(message, dict) and (
        message.get("role") == "assistant" or _kind(message).endswith(("_call", "reasoning"))
    )


def _kind(part: dict[str, Any]) -> str:
    kind = part.get("type")
    return kind if isinstance(kind, str) else ""


def _is_result(message: Any) -> bool:
    if not isinstance(message, dict):
        return False
    kind, content = _kind(message), message.get("content")
    return (
        message.get("role") in ("tool", "function")
        or kind == "tool_result"
        or kind.endswith("_output")
        or (isinstance(content, list) and any(_is_result(part) for part in content))
    )


def _named(message: Any) -> tuple[Any, list[str]]:
    """Return a message, item or result with texts for its media, and their types."""
    if not isinstance(message, dict):
        return message, []
    kinds: list[str] = []
    returned = message.get("role") in ("tool", "function") or _kind(message).endswith(("_output", "_result"))
    for field in ("content", "output"):
        if isinstance(message.get(field), list):
            parts = [_named_part(part, kinds, returned=returned) for part in message[field]]
            message = {**message, field: parts}
    return message, kinds


def _named_part(part: Any, kinds: list[str], *, returned: bool) -> Any:
    """Return a part, or the text for it. Add its type to `kinds` if it is replaced."""
    kind = _kind(part) if isinstance(part, dict) else ""
    if kind == "tool_result":
        part, inner = _named(part)
        kinds += inner
    elif kind in _MEDIA or (returned and kind and kind not in _TEXTS):
        kinds.append(kind[:64])
        return {"type": "text", "text": f"[{kind[:64]}: this model reads only text]"}
    return part


class _Named(list[Any]):
    """Messages, and the types of the replaced parts of each. A private attribute of each message costs more time."""

    media: list[list[str]]


def _check(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    if not isinstance(value, list):
        return handler(value)
    named, media = name_media(value)
    messages = _Named(handler(named))
    messages.media = media
    return messages


NAME_MEDIA = WrapValidator(_check)


def media_of(messages: list[Any]) -> list[list[str]]:
    """The types of the replaced parts of each message. messages: a list with the check NAME_MEDIA."""
    return messages.media if isinstance(messages, _Named) else []


def name_replaced(field: str, media: Iterable[Sequence[str]]) -> list[str]:
    """Name the messages or items with replaced parts, for a header and the log."""
    return unsupported(field, ("+".join(kinds) for kinds in media), ("",))
