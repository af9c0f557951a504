"""Commands of the terminal chat: messages that are not sent to the model."""

from __future__ import annotations

import re
from typing import Any

COMMANDS = {
    "/help": "lists the commands",
    "/clear": "begins a new conversation; the system message stays",
    "/system TEXT": "sets the system message; without a text it removes it",
    "/regen": "generates the last response again",
}
_FORM = re.compile(r"(/[a-z]+)(?:[ \t]+(.*))?\s*")


def parse(message: str) -> tuple[str, str] | None:
    """Name and text of a command. None: it is a message for the model."""
    found = _FORM.fullmatch(message)
    return (found[1], (found[2] or "").strip()) if found else None


def help_text() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"{name:<{width}}  {text}" for name, text in COMMANDS.items()]
    return "\n".join([*lines, "A space before a text that begins with / sends it to the model."])


def unknown(name: str) -> str:
    return f"{name} is not a command: /help lists them; a space before it sends it to the model"


def set_system(history: list[dict[str, Any]], text: str) -> None:
    """Replace the system message of a conversation, or remove it if the text is empty."""
    if history and history[0]["role"] == "system":
        del history[0]
    if text:
        history.insert(0, {"role": "system", "content": text})


def clear(history: list[dict[str, Any]]) -> None:
    history[:] = [message for message in history[:1] if message["role"] == "system"]


def after_last_question(history: list[dict[str, Any]]) -> int | None:
    """The place of the messages after the user's last message. None: there is no message of the user."""
    return next((at + 1 for at in reversed(range(len(history))) if history[at]["role"] == "user"), None)
