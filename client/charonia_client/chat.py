"""The terminal chat: history, streamed responses, interruption, and the cost of each response."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import uuid
from contextlib import aclosing
from typing import Any

from rich.console import Console

from charonia_client import commands
from charonia_client.client import Client
from charonia_client.errors import BadRequest, CharoniaError, Overloaded, TooManyRounds
from charonia_client.terminal import LEAVE, Reader, plain
from charonia_client.tools import ToolResult, Tools, converse
from charonia_client.types import GenerateRequest, GenerateResponse

_INTERRUPTED = "(interrupted)"
_SHOWN = 200  # characters of a call or result that are shown


class Chat:
    """A terminal chat over `client`; `sampling` are fields of GenerateRequest for every turn. The model may call
    `tools`, which run immediately. lora: the name of a LoRA adapter that computes the responses."""

    def __init__(
        self,
        client: Client,
        reader: Reader,
        *,
        system: str | None = None,
        sampling: dict[str, int | float],
        tools: Tools | None = None,
        lora: str | None = None,
    ) -> None:
        self._client = client
        self._reader = reader
        self._sampling: dict[str, Any] = dict(sampling)
        self._tools = tools or Tools(())
        self._lora = lora
        self._history: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        # The name of this conversation at the server. It is a hint: every turn sends the whole conversation, so the
        # response is the same if the server does not know the session.
        self._session_id = f"chat-{uuid.uuid4()}"
        self._console = Console(highlight=False, soft_wrap=True)
        self._failed = False

    async def run(self) -> int:
        """Run until the user leaves. Returns the exit code: 1 if a piped message had an error, else 0."""
        if self._reader.hint:
            self._console.print(self._reader.hint, style="dim", markup=False)
        while True:
            try:
                message = await self._reader.read()
            except KeyboardInterrupt:
                self._console.print(f"('{LEAVE}' leaves)", style="dim", markup=False)
                continue
            if message is None or message.strip() == LEAVE:
                with contextlib.suppress(CharoniaError):
                    await self._client.end_session(self._session_id)
                return 1 if self._failed and not self._reader.hint else 0
            if command := commands.parse(message):
                await self._obey(*command)
                continue
            before = len(self._history)
            self._history.append({"role": "user", "content": message})
            if not await self._interruptible_answer():
                del self._history[before:]

    async def _obey(self, name: str, text: str) -> None:
        """Run a command."""
        before = len(self._history)
        result = commands.run(self._history, name, text)
        if isinstance(result, str):
            self._console.print(plain(result), style="dim", markup=False)
        elif not await self._interruptible_answer():
            self._history[before - len(result) :] = result

    async def _interruptible_answer(self) -> bool:
        """Prints the response while it arrives. Ctrl-C ends it and keeps the text so far. Returns False after an error,
        and if there is no text.

        The first Ctrl-C stops the request, and its response then ends by itself. The second Ctrl-C does not wait for
        that.
        """
        loop = asyncio.get_running_loop()
        parts: list[str] = []  # ids of the running response
        ids: list[str] = []
        before = len(self._history)
        task = asyncio.ensure_future(self._answer(ids, parts))
        stops: list[asyncio.Task[None]] = []

        def interrupt() -> None:
            if stops or not ids:
                task.cancel()
            else:
                stops.append(loop.create_task(self._client.stop(ids[-1])))

        loop.add_signal_handler(signal.SIGINT, interrupt)
        try:
            await task
        except asyncio.CancelledError:
            if not task.cancelled():
                raise
            self._console.print(f"\n{_INTERRUPTED}", style="dim", markup=False)
        except CharoniaError as error:
            self._failed = True
            self._console.print(
                f"{chr(10) if parts else ''}error: {plain(_explained(error))}", style="red", markup=False
            )
            return False
        finally:
            loop.remove_signal_handler(signal.SIGINT)
            # An error of the stop request is also an error of the response.
            await asyncio.gather(*stops, return_exceptions=True)
        if parts:  # text of a response that has not ended
            self._history.append({"role": "assistant", "content": "".join(parts)})
        return len(self._history) > before

    async def _answer(self, ids: list[str], parts: list[str]) -> None:
        """ids: receives the ids of the requests. parts: receives the texts of the current response."""

        def new_id() -> str:
            ids.append(str(uuid.uuid4()))
            return ids[-1]

        request = GenerateRequest(
            messages=self._history, session_id=self._session_id, lora_name=self._lora, **self._sampling
        )
        part: GenerateResponse | None = None
        dim = False
        rounds = converse(self._client, request, self._tools, self._history, request_id=new_id)
        try:
            async with aclosing(rounds) as answer:
                async for item in answer:
                    if isinstance(item, ToolResult):
                        parts.clear()
                        self._console.print(f"\n{_shown(item)}", style="dim", markup=False)
                        continue
                    part = item
                    parts.append(part.content)
                    if part.reasoning:
                        self._console.print(plain(part.reasoning), style="dim italic", end="", markup=False)
                        dim = True
                    if dim and part.content:
                        self._console.print("\n")
                        dim = False
                    self._console.out(plain(part.content), end="", highlight=False)
                    self._console.file.flush()
        except TooManyRounds as error:
            self._console.print(f"({error}: send a message to continue)", style="dim", markup=False, end="")
        parts.clear()  # it is in the history
        if part is not None and part.finish_reason == "cancelled":
            self._console.print(f"\n{_INTERRUPTED}", style="dim", markup=False, end="")
        if part is not None:
            self._console.print(f"\n{_cost(part)}", style="dim", markup=False)


def _shown(result: ToolResult) -> str:
    """A call and its result on one line each, truncated if they are long."""
    lines = (f"{result.name}({result.arguments})", f"= {result.text}")
    return "\n".join(plain(line if len(line) <= _SHOWN else f"{line[: _SHOWN - 3]}...") for line in lines)


def _cost(last: GenerateResponse) -> str:
    """The cost of a response, by the server's clock. The speed is that of decoding: the tokens after the first."""
    tokens, timings = last.num_output_tokens, last.timings
    text = f"{tokens} tokens"
    if timings and tokens > 1 and timings.total_ms > timings.first_token_ms:
        text += f", {(tokens - 1) * 1e3 / (timings.total_ms - timings.first_token_ms):.1f} tokens/s"
    text += f", prompt {last.num_input_tokens} tokens"
    if last.num_cached_tokens:
        text += f" ({last.num_cached_tokens} cached)"
    if timings:
        text += f", first after {timings.first_token_ms:.0f} ms"
    return f"[{text}, {last.finish_reason}]"


def _explained(error: CharoniaError) -> str:
    match error:
        case Overloaded(retry_after=seconds):
            return f"the server is busy, try again in {seconds:g} s ({error})"
        case BadRequest():
            return f"{error} (your message was not added to the conversation)"
    return str(error)
