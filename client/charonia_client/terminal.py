"""Where the chat's messages come from: a terminal (edited, with history) or a pipe."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Protocol

from prompt_toolkit import PromptSession
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

LEAVE = "exit"
# Of C0 a text has line ends and tabs; the rest, DEL and C1 tell a terminal what to do.
_CONTROLS = dict.fromkeys(code for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t")


def plain(text: str) -> str:
    """`text` without control characters: no model or server moves the cursor or sets the clipboard."""
    return text.translate(_CONTROLS)


class Reader(Protocol):
    """Gives one message after another."""

    hint: str

    async def read(self) -> str | None:
        """The next message, or None at the end of the input. KeyboardInterrupt when the user drops what is typed."""
        ...


def messages_of(lines: Iterable[str], enter_sends: bool) -> Iterator[str]:
    """Cuts lines into messages: at blank lines, or each line is one. `exit` alone on a line is always one."""
    held: list[str] = []
    for raw in lines:
        line = raw.rstrip("\r\n")
        if line.strip() and not enter_sends and not (line.strip() == LEAVE and not held):
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
    """Messages from standard input that is no terminal."""

    hint = ""

    def __init__(self, enter_sends: bool) -> None:
        self._messages = messages_of(sys.stdin, enter_sends)

    async def read(self) -> str | None:
        # Blocks the loop: between two answers there is nothing else to do.
        return next(self._messages, None)


class TerminalReader:
    """Messages typed at a terminal."""

    def __init__(self, enter_sends: bool) -> None:
        self.hint = (
            f"{'Enter' if enter_sends else 'Enter twice'} sends, Alt-Enter starts a line, Ctrl-C interrupts an answer, "
            f"'{LEAVE}' leaves"
        )
        keys = KeyBindings()

        @keys.add("enter")
        def _enter(event: KeyPressEvent) -> None:
            buffer = event.current_buffer
            done = enter_sends or not buffer.document.current_line.strip() or buffer.text.strip() == LEAVE
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
