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
_FORM = re.compile(r"(/[a-z]+)(?:[ \t]+(\S.*)?)?\s*")


def parse(message: str) -> tuple[str, str] | None:
    """Name and text of a command. None: it is a message for the model."""
    found = _FORM.fullmatch(message)
    return (found[1], (found[2] or "").strip()) if found else None


def run(history: list[dict[str, Any]], name: str, text: str) -> str | list[dict[str, Any]]:
    """Run a command of parse() on a conversation. Returns the text to print. /regen removes the last response and
    returns its messages: generate a response, and put them back if that fails."""
    match name:
        case "/help":
            return _help_text()
        case "/clear":
            history[:] = [message for message in history[:1] if message["role"] == "system"]
        case "/system":
            _set_system(history, text)
        case "/regen":
            at = _after_last_question(history)
            if at is None:
                return "there is no response yet"
            removed = history[at:]
            del history[at:]
            return removed
        case _:
            return f"{name} is not a command: /help lists them; a space before it sends it to the model"
    return "done"


def _help_text() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"{name:<{width}}  {text}" for name, text in COMMANDS.items()]
    return "\n".join([*lines, "A space before a text that begins with / sends it to the model."])


def _set_system(history: list[dict[str, Any]], text: str) -> None:
    """Replace the system message of a conversation, or remove it if the text is empty."""
    if history and history[0]["role"] == "system":
        del history[0]
    if text:
        history.insert(0, {"role": "system", "content": text})


def _after_last_question(history: list[dict[str, Any]]) -> int | None:
    """The place of the messages after the user's last message. None: there is no message of the user."""
    return next((at + 1 for at in reversed(range(len(history))) if history[at]["role"] == "user"), None)
