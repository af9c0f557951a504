"""Terminal chat with a model in this process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from charonia_client import commands
from charonia_client.terminal import messages_of, plain
from prompt_toolkit import PromptSession
from prompt_toolkit.history import InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from rich.console import Console

from charonia.api.engine import Engine
from charonia.api.results import Chunk, SamplingParams
from charonia.errors import InvalidRequestError

_EXIT = ("exit", "quit")

# Reads one message; returns None if the user exits.
ReadMessage = Callable[[], str | None]


def run(engine: Engine, sampling: SamplingParams, *, system: str | None = None, enter_sends: bool = False) -> None:
    """Chat on the terminal, or with piped input. In both, an empty line ends a message.

    Raises InvalidRequestError if the model has no chat template.
    """
    if (task := engine.info.model_task) != "generate":
        raise InvalidRequestError(
            f"model {engine.info.model_name} is for task = {task}, so it cannot chat; use Engine.{task} or the server"
        )
    if engine.tokenizer.chat_template is None:
        raise InvalidRequestError(
            f"model {engine.info.model_name} has no chat template, so it cannot chat; "
            "use Engine.generate or the server's /v1/completions to continue texts with it"
        )
    adapters = [one.name for one in engine.adapters()]
    if len(adapters) > 1:
        raise InvalidRequestError(f"a chat uses one LoRA adapter: leave one of {', '.join(adapters)} in lora_adapters")
    notes = Console(stderr=True, highlight=False)
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    for warning in engine.info.warnings:
        notes.print(f"warning: {warning}", style="yellow", markup=False)
    read = _terminal_reader(enter_sends) if interactive else _pipe_reader(enter_sends)
    if interactive:
        sends = "Enter sends, Alt-Enter starts a new line" if enter_sends else "an empty line (double Enter) sends"
        notes.print(
            f"{engine.info.model_name}: {sends}, /help lists commands, exit quits, Ctrl-C interrupts", style="dim"
        )
    conversation = Conversation(engine, sampling, system, notes)
    while (message := read()) is not None:
        try:
            conversation.ask(message)
        except KeyboardInterrupt:  # just before or after the response
            notes.print("(interrupted)", style="dim")


class Conversation:
    """The history of a chat, and its next turns."""

    def __init__(self, engine: Engine, sampling: SamplingParams, system: str | None, notes: Console) -> None:
        self._engine = engine
        self._sampling = sampling
        self._notes = notes
        self._lora = next((one.name for one in engine.adapters()), "")
        self._history: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []

    def ask(self, message: str) -> None:
        """Send a message and print the response as it arrives. Ctrl-C ends the response and keeps its text. A command
        is not sent."""
        if self._obey(message):
            return
        self._history.append({"role": "user", "content": message})
        if not self._answer():
            self._history.pop()

    def _obey(self, message: str) -> bool:
        """Run a command. Returns whether the message is one."""
        command = commands.parse(message)
        if command is None:
            return False
        result = commands.run(self._history, *command)
        if isinstance(result, str):
            self._notes.print(result, style="dim", markup=False)
        elif not self._answer():
            self._history += result
        return True

    def _answer(self) -> bool:
        """Generate the response to the last message. Returns False if it is rejected, or if nothing arrived."""
        try:
            self._make_room()
            stream = self._engine.stream(self._history, self._sampling, lora=self._lora)
        except InvalidRequestError as error:
            self._notes.print(f"error: {error}", style="red", markup=False)
            return False
        answer: list[str] = []
        last: Chunk | None = None
        try:
            with stream:
                for last in stream:
                    answer.append(last.text)
                    sys.stdout.write(plain(last.text))
                    sys.stdout.flush()
        except KeyboardInterrupt:
            self._notes.print("\n(interrupted)", style="dim", end="")
        print(flush=True)
        if last is None:
            return False
        self._history.append({"role": "assistant", "content": "".join(answer)})
        self._notes.print(_figures(last), style="dim", markup=False)
        return True

    def _make_room(self) -> None:
        """Remove the oldest turns until the prompt and a part of the response fit."""
        limit = self._engine.info.session_len
        wanted = self._sampling.max_tokens or min(256, limit // 4)
        dropped, head = 0, int(self._history[0]["role"] == "system")
        while len(self._history) > head + 1 and len(self._engine.encode(self._history)) + wanted > limit:
            del self._history[head : head + 2]
            dropped += 2
        if dropped:
            self._notes.print(
                f"(the context holds {limit} tokens: the oldest {dropped} messages are removed)", style="dim"
            )


def _figures(last: Chunk) -> str:
    seconds = (last.timings.total_ms - last.timings.first_token_ms) / 1000
    rate = (
        f", {(last.num_output_tokens - 1) / seconds:.1f} tokens/s" if last.num_output_tokens > 1 and seconds > 0 else ""
    )
    return f"[{last.num_output_tokens} tokens{rate}, first after {last.timings.first_token_ms:.0f} ms]"


def _pipe_reader(enter_sends: bool) -> ReadMessage:
    messages = messages_of(sys.stdin, enter_sends)

    def read() -> str | None:
        message = next(messages, None)
        return None if message is None or message.strip() in _EXIT else message

    return read


def _terminal_reader(enter_sends: bool) -> ReadMessage:
    keys = KeyBindings()

    @keys.add("enter")
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        on_empty_line = not buffer.document.current_line.strip() and buffer.document.is_cursor_at_the_end
        if enter_sends or on_empty_line or buffer.text.strip() in _EXIT or commands.parse(buffer.text):
            buffer.validate_and_handle()
        else:
            buffer.insert_text("\n")

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    session: PromptSession[str] = PromptSession(
        history=InMemoryHistory(), multiline=True, key_bindings=keys, prompt_continuation="  "
    )

    def read() -> str | None:
        while True:
            try:
                text = session.prompt("> ").rstrip().lstrip("\n")
            except KeyboardInterrupt:
                continue  # Ctrl-C clears the line
            except EOFError:
                return None
            if text.strip() in _EXIT:
                return None
            if text:
                return text

    return read
