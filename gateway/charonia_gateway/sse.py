"""Answers whose client may go away: server-sent events, and whole bodies that are awaited.

Both watch the connection while the engine works, and cancel the work when it closes.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

from charonia_client import CharoniaError
from fastapi import Request, Response
from pydantic_core import to_json
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from charonia_gateway.errors import ApiError, from_engine, unavailable
from charonia_gateway.record import EVENT_HEARTBEAT, LINE_HEARTBEAT, record_of, server_send

log = logging.getLogger("charonia_gateway")
T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
TEXT = uuid.uuid4().hex  # which no answer has

# Characters that are no line ends of a stream, but are to the line readers of many clients (Python's str.splitlines).
_LINE_ENDS = {character.encode(): f"\\u{ord(character):04x}".encode() for character in "\u0085\u2028\u2029"}


def _json(data: Any) -> bytes:
    """`data` as JSON in one line, whatever one takes for a line."""
    text = to_json(data, inf_nan_mode="null")
    if not text.isascii():
        for character, escaped in _LINE_ENDS.items():
            text = text.replace(character, escaped)
    return text


def event(data: Any) -> bytes:
    """One event with `data` as JSON."""
    return b"data: " + _json(data) + b"\n\n"


class TextEvents:
    """Events that differ in one text alone: what is around it is made once. `data` is one's, with TEXT in its place."""

    def __init__(self, data: Any) -> None:
        self._before, _, self._after = event(data).partition(_json(TEXT))

    def event(self, text: str) -> bytes:
        return self._before + _json(text) + self._after


def named_event(data: Mapping[str, Any]) -> bytes:
    """One event under the name that its `type` has, as Anthropic's and the newer of OpenAI's streams are."""
    kind: str = data["type"]
    return b"event: " + kind.encode() + b"\ndata: " + _json(data) + b"\n\n"


def line(data: Any) -> bytes:
    """One line with `data` as JSON."""
    return _json(data) + b"\n"


@dataclass(frozen=True)
class Format:
    """How a stream is written: its type, and how an error that comes after its beginning is."""

    media_type: str
    error: Callable[[ApiError], bytes]
    heartbeat: bytes  # means nothing to a reader


EVENTS = Format("text/event-stream", lambda error: b"event: error\n" + event(error.body()), EVENT_HEARTBEAT)
# What LMDeploy's clients read: they split at line ends.
LINES = Format("application/x-ndjson", lambda error: line(error.body()), LINE_HEARTBEAT)


async def _gone(receive: Receive) -> None:
    """Returns when the client has closed its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client goes away (ClientDisconnect) or the server stops."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(request.receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    except asyncio.CancelledError:
        raise unavailable("the gateway is shutting down") from None
    finally:
        gone.cancel()
        task.cancel()
        await asyncio.wait((task, gone))


class EventStream(Response):
    """Sends `events` as they come, and a heartbeat whenever it has sent nothing for `heartbeat_s` seconds (0: never).
    The answer begins with the first of either: until then an error has its own status; later it is an `error` event (or
    line), after which the stream ends."""

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        headers: Mapping[str, str],
        format: Format = EVENTS,
        *,
        heartbeat_s: float = 0,
    ) -> None:
        # Not Response's own: that would announce a body of length 0.
        self.status_code = 200
        self.background = None
        self.media_type = format.media_type
        self._format = format
        self.init_headers({**headers, "cache-control": "no-cache", "x-accel-buffering": "no"})
        self._events = events
        self._heartbeat_s = heartbeat_s
        self._started = False
        self._sending = False  # an event: no heartbeat begins
        self._beating = asyncio.Lock()  # a heartbeat or the beginning is on its way, for which events wait
        self._clock = asyncio.get_running_loop().time
        self._sent_at = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sender = asyncio.ensure_future(self._send_all(scope, receive, send))
        gone = asyncio.ensure_future(_gone(receive))
        heart = asyncio.ensure_future(self._beat(send)) if self._heartbeat_s else None
        error: ApiError | None = None
        try:
            await asyncio.wait((sender, gone), return_when=asyncio.FIRST_COMPLETED)
            if not sender.done():
                scope.setdefault("state", {})["disconnected"] = True
            elif failure := sender.exception():
                raise failure
        except asyncio.CancelledError:
            error = unavailable("the gateway is shutting down")
        except CharoniaError as failure:
            error = from_engine(failure, record_of(scope).names)
        except Exception:
            log.exception("a stream ended with an error of the gateway's own")
            error = ApiError(500, "the gateway failed; its log says why", type="server_error")
        finally:
            tasks = [sender, gone, *([heart] if heart else [])]
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        if error:
            record_of(scope).error = error.code or error.type
            record_of(scope).failed_status = error.status if self._started else 0
        if error and self._started:
            await send({"type": "http.response.body", "body": self._format.error(error), "more_body": False})
        elif error:
            await error.response(scope)(scope, receive, send)

    async def _send_all(self, scope: Scope, receive: Receive, send: Send) -> None:
        put, past_layers = send, server_send(scope)
        async with aclosing(self._events) as events:
            async for data in events:
                self._sending = True
                if not self._started or self._beating.locked():
                    async with self._beating:
                        await self._start(send)
                await put({"type": "http.response.body", "body": data, "more_body": True})
                put = past_layers  # none of them looks at what follows the first text
                self._sent_at = self._clock()
                self._sending = False
        self._sending = True  # for good: no heartbeat comes after the end
        async with self._beating:
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _start(self, send: Send) -> None:
        if not self._started:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            self._started = True

    async def _beat(self, send: Send) -> None:
        """So that no proxy takes a long prefill, a queue or a pause for a dead connection."""
        self._sent_at = self._clock()
        while True:
            silent_s = self._clock() - self._sent_at
            if not self._sending and silent_s >= self._heartbeat_s:
                async with self._beating:
                    await self._start(send)
                    await send({"type": "http.response.body", "body": self._format.heartbeat, "more_body": True})
                self._sent_at = self._clock()
                silent_s = 0
            await asyncio.sleep(max(self._heartbeat_s - silent_s, self._heartbeat_s / 10))
