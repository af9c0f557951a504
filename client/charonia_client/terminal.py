"""Reads the chat's messages from a terminal (with editing and history) or a pipe."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Protocol

from prompt_toolkit import PromptSession
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

from charonia_client.commands import parse

LEAVE = "exit"
# Control characters except line ends and tabs: the rest of C0, DEL and C1 can control a terminal.
_CONTROLS = dict.fromkeys(code for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t")


def plain(text: str) -> str:
    """Remove control characters, so that no model or server can move the cursor or set the clipboard."""
    return text.translate(_CONTROLS)


class Reader(Protocol):
    """Reads one message at a time."""

    hint: str

    async def read(self) -> str | None:
        """The next message, or None at the end of the input. Raises KeyboardInterrupt if the user discards the typed
        text."""
        ...


def is_order(line: str) -> bool:
    """Whether a line is for the chat, not for the model: a command, or the word that leaves."""
    return line.strip() == LEAVE or parse(line) is not None


def messages_of(lines: Iterable[str], enter_sends: bool) -> Iterator[str]:
    """Split lines into messages: at blank lines, or one per line. A command at the beginning of a message is always a
    message."""
    held: list[str] = []
    for raw in lines:
        line = raw.rstrip("\r\n")
        if line.strip() and not enter_sends and not (is_order(line) and not held):
            held.append(line)
            continue
        if line.strip():
            held.append(line)
        if held:
            yield "\n".join(held)
            held = []
    if held:
        yield "\n".join(held)


class PipeReader:
    """Reads messages from standard input that is not a terminal."""

    hint = ""

    def __init__(self, enter_sends: bool) -> None:
        self._messages = messages_of(sys.stdin, enter_sends)

    async def read(self) -> str | None:
        # Blocks the event loop, which has no other work between two responses.
        return next(self._messages, None)


class TerminalReader:
    """Reads messages that are typed at a terminal."""

    def __init__(self, enter_sends: bool) -> None:
        self.hint = (
            f"{'Enter' if enter_sends else 'Enter twice'} sends, Alt-Enter starts a line, Ctrl-C interrupts, "
            f"/help lists commands, '{LEAVE}' leaves"
        )
        keys = KeyBindings()

        @keys.add("enter")
        def _enter(event: KeyPressEvent) -> None:
            buffer = event.current_buffer
            done = enter_sends or not buffer.document.current_line.strip() or is_order(buffer.text)
            if done and buffer.text.strip():
                buffer.validate_and_handle()
            elif not enter_sends:
                buffer.insert_text("\n")

        @keys.add("escape", "enter")
        def _newline(event: KeyPressEvent) -> None:
            event.current_buffer.insert_text("\n")

        self._session: PromptSession[str] = PromptSession(multiline=True, key_bindings=keys)

    async def read(self) -> str | None:
        try:
            text: str = await self._session.prompt_async("> ")
        except EOFError:
            return None
        return text.strip("\n")


def make_reader(enter_sends: bool) -> Reader:
    return TerminalReader(enter_sends) if sys.stdin.isatty() else PipeReader(enter_sends)
