"""Responses whose client may disconnect: server-sent events, and complete bodies.

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
TEXT = uuid.uuid4().hex  # no response contains it

# Characters that do not end a line in a stream, but do so in many clients' line readers (Python's str.splitlines).
_LINE_ENDS = {character.encode(): f"\\u{ord(character):04x}".encode() for character in "\u0085\u2028\u2029"}


def _json(data: Any) -> bytes:
    """`data` as JSON in one line, by any definition of a line."""
    text = to_json(data, inf_nan_mode="null")
    if not text.isascii():
        for character, escaped in _LINE_ENDS.items():
            text = text.replace(character, escaped)
    return text


def event(data: Any) -> bytes:
    """One event with `data` as JSON."""
    return b"data: " + _json(data) + b"\n\n"


class TextEvents:
    """Events that differ only in one text. The JSON around the text is encoded once. `data`: an event with TEXT as the
    text."""

    def __init__(self, data: Any) -> None:
        self._before, _, self._after = event(data).partition(_json(TEXT))

    def event(self, text: str) -> bytes:
        return self._before + _json(text) + self._after


def named_event(data: Mapping[str, Any]) -> bytes:
    """One event whose name is its `type`, as in Anthropic's streams and OpenAI's Responses."""
    kind: str = data["type"]
    return b"event: " + kind.encode() + b"\ndata: " + _json(data) + b"\n\n"


def line(data: Any) -> bytes:
    """One line with `data` as JSON."""
    return _json(data) + b"\n"


@dataclass(frozen=True)
class Format:
    """The format of a stream: its content type, and how a late error is written."""

    media_type: str
    error: Callable[[ApiError], bytes]
    heartbeat: bytes  # readers ignore it


EVENTS = Format("text/event-stream", lambda error: b"event: error\n" + event(error.body()), EVENT_HEARTBEAT)
# The format of LMDeploy's clients, which split at line ends.
LINES = Format("application/x-ndjson", lambda error: line(error.body()), LINE_HEARTBEAT)


async def _disconnected(receive: Receive) -> None:
    """Returns when the client has closed its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`. It is cancelled if the client disconnects (ClientDisconnect) or the server stops."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request.receive))
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
        await asyncio.gather(task, gone, return_exceptions=True)  # asyncio logs errors that are not read


class EventStream(Response):
    """Sends `events` as they arrive, and a heartbeat after `heartbeat_s` seconds without an event (0: never). The
    response begins with the first event or heartbeat. An error before that has its own status. A later error is an
    `error` event (or line) that ends the stream."""

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        headers: Mapping[str, str],
        format: Format = EVENTS,
        *,
        heartbeat_s: float = 0,
    ) -> None:
        # Response.__init__ is not called: it would set a content length of 0.
        self.status_code = 200
        self.background = None
        self.media_type = format.media_type
        self._format = format
        self.init_headers({**headers, "cache-control": "no-cache", "x-accel-buffering": "no"})
        self._events = events
        self._heartbeat_s = heartbeat_s
        self._started = False
        self._sending = False  # an event is being sent: no heartbeat may begin
        self._beating = asyncio.Lock()  # a heartbeat or the start is being sent: events wait
        self._clock = asyncio.get_running_loop().time
        self._sent_at = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sender = asyncio.ensure_future(self._send_all(scope, receive, send))
        gone = asyncio.ensure_future(_disconnected(receive))
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
            log.exception("a stream failed with an internal error of the gateway")
            error = ApiError(500, "internal error of the gateway; see its log", type="server_error")
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
                put = past_layers  # the middleware does not need events after the first text
                self._sent_at = self._clock()
                self._sending = False
        self._sending = True  # kept locked: no heartbeat may follow the end
        async with self._beating:
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _start(self, send: Send) -> None:
        if not self._started:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            self._started = True

    async def _beat(self, send: Send) -> None:
        """Send heartbeats, so that no proxy closes the connection during a long prefill, a queue or a pause."""
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
