"""The conversation: history, streamed answers, interruption, and what each answer cost."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import uuid
from contextlib import aclosing
from typing import Any

from rich.console import Console

from charonia_client.client import Client
from charonia_client.errors import BadRequest, CharoniaError, Overloaded
from charonia_client.terminal import LEAVE, Reader, plain
from charonia_client.types import GenerateRequest, GenerateResponse

_INTERRUPTED = "(interrupted)"


class Chat:
    """A terminal chat over `client`; `sampling` are fields of GenerateRequest for every turn."""

    def __init__(
        self, client: Client, reader: Reader, *, system: str | None = None, sampling: dict[str, int | float]
    ) -> None:
        self._client = client
        self._reader = reader
        self._sampling: dict[str, Any] = dict(sampling)
        self._history: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
        # A name for what the server keeps of this conversation. It is a hint: every turn sends the whole of it, so a
        # server that has forgotten, or never knew, answers the same.
        self._session_id = f"chat-{uuid.uuid4()}"
        self._console = Console(highlight=False, soft_wrap=True)
        self._failed = False

    async def run(self) -> int:
        """Until the user leaves. Returns the exit code: 1 when piped messages had an error, else 0."""
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
            self._history.append({"role": "user", "content": message})
            text = await self._interruptible_answer()
            if text:
                self._history.append({"role": "assistant", "content": text})
            else:
                self._history.pop()

    async def _interruptible_answer(self) -> str:
        """Prints the answer while it comes; Ctrl-C ends it and keeps what has come. Empty after an error.

        The first Ctrl-C stops the request, whose answer then ends by itself; the next one does not wait for that.
        """
        loop = asyncio.get_running_loop()
        parts: list[str] = []
        request_id = str(uuid.uuid4())
        task = asyncio.ensure_future(self._answer(request_id, parts))
        stops: list[asyncio.Task[None]] = []

        def interrupt() -> None:
            if stops:
                task.cancel()
            else:
                stops.append(loop.create_task(self._client.stop(request_id)))

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
            return ""
        finally:
            loop.remove_signal_handler(signal.SIGINT)
            # What a stop says of itself is said by the answer too.
            await asyncio.gather(*stops, return_exceptions=True)
        return "".join(parts)

    async def _answer(self, request_id: str, parts: list[str]) -> None:
        request = GenerateRequest(messages=self._history, session_id=self._session_id, **self._sampling)
        part: GenerateResponse | None = None
        async with aclosing(self._client.generate(request, request_id=request_id)) as answer:
            async for part in answer:
                parts.append(part.text)
                self._console.out(plain(part.text), end="", highlight=False)
                self._console.file.flush()
        if part is not None and part.finish_reason == "cancelled":
            self._console.print(f"\n{_INTERRUPTED}", style="dim", markup=False, end="")
        if part is not None:
            self._console.print(f"\n{_cost(part)}", style="dim", markup=False)


def _cost(last: GenerateResponse) -> str:
    """What an answer took, by the server's clock. The speed is that of decoding: the tokens after the first."""
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
