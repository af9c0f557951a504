"""Responses of /v1/responses that are generated in the background. One process has them, in memory."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator
from typing import Any

from pydantic_core import to_json
from starlette.types import ASGIApp

from charonia_gateway.errors import ApiError, too_many
from charonia_gateway.inner import InnerAnswer, ask_itself
from charonia_gateway.record import Inner
from charonia_gateway.sse import named_event
from charonia_gateway.state import Bounds

log = logging.getLogger("charonia_gateway")

PATH = "/v1/responses"
# Events that contain the whole response.
_WHOLE = tuple(
    f"event: response.{name}\n".encode()
    for name in ("created", "queued", "in_progress", "completed", "incomplete", "failed")
)
# OpenAI's codes of a failed response, by the codes that a request without background has. Others: server_error.
_CODES = {
    "invalid_value": "invalid_prompt",
    "context_length_exceeded": "invalid_prompt",
    "overloaded": "rate_limit_exceeded",
    "rate_limit_exceeded": "rate_limit_exceeded",
}


class Background:
    """One response. response: its newest form. owner: the id of the key that asked for it."""

    def __init__(self, response: dict[str, Any], owner: str | None, *, streams: bool) -> None:
        """streams: its events are kept for readers."""
        self.response = response
        self.owner = owner
        self.streams = streams
        self.events: list[bytes] = []  # each at the index of its sequence_number
        self.size = 0  # bytes of its events and of the response, once it has ended
        self.ended = asyncio.Event()
        self.ended_at = 0.0
        self._cancelled = asyncio.Event()
        self._changed = asyncio.Event()

    @property
    def id(self) -> str:
        return str(self.response["id"])

    async def run(self, app: ASGIApp, body: bytes, inner: Inner) -> None:
        try:
            answer = await ask_itself(app, PATH, body, inner, self._cancelled, self._read)
            self._end(answer)
        except BaseException as error:
            if not isinstance(error, asyncio.CancelledError):
                log.exception("a response in the background failed with an internal error of the gateway")
            self._fail("server_error", "the gateway could not finish the response")
            raise
        finally:
            self.size = len(to_json(self.response)) + sum(map(len, self.events))
            self.ended.set()
            self._tell()

    async def cancel(self) -> None:
        """Returns when the response has ended."""
        self._cancelled.set()
        await self.ended.wait()

    async def follow(self, after: int) -> AsyncGenerator[bytes, None]:
        """Yield the events after the event with this sequence_number, until the response ends."""
        at = after + 1
        while True:
            changed, has_ended = self._changed, self.ended.is_set()
            while at < len(self.events):
                at += 1
                yield self.events[at - 1]
            if has_ended:
                return
            await changed.wait()

    def _read(self, piece: bytes) -> None:
        for text in piece.split(b"\n\n"):
            if text.startswith(b"event: error\n"):
                error = json.loads(text.partition(b"\ndata: ")[2])
                self._fail(error["code"], error["message"])
            elif text.startswith(b"event: "):
                if text.startswith(_WHOLE):
                    self.response = json.loads(text.partition(b"\ndata: ")[2])["response"]
                self._add(text + b"\n\n")

    def _add(self, event: bytes) -> None:
        if self.streams:
            self.events.append(event)
            self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    @property
    def _is_running(self) -> bool:
        return self.response["status"] in ("queued", "in_progress")

    def _end(self, answer: InnerAnswer) -> None:
        if answer.status not in (0, 200):
            error = json.loads(answer.body)["error"]
            self._fail(error["code"], error["message"])
        elif self._is_running:
            self.response = {**self.response, "status": "cancelled"}

    def _fail(self, code: str | None, message: str) -> None:
        if self._is_running:
            error = {"code": _CODES.get(code or "", "server_error"), "message": message}
            self.response = {**self.response, "status": "failed", "error": error}
            data = {"type": "response.failed", "sequence_number": len(self.events), "response": self.response}
            self._add(named_event(data))


class Backgrounds:
    """The responses that run in the background, and those that have ended. `bounds` limits the ended ones."""

    def __init__(self, most: int, bounds: Bounds) -> None:
        """most: of those that run at the same time; 0: none."""
        self._most = most
        self._bounds = bounds
        self._running: dict[str, Background] = {}
        self._ended: OrderedDict[str, Background] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()

    def check(self) -> None:
        """Raises ApiError if no other response can begin."""
        if not self._most:
            raise ApiError(
                400,
                "background: this server generates no responses in the background (CHARONIA_GATEWAY_MAX_BACKGROUND is "
                "0, or several gateways share Redis); leave background out",
                param="background",
                code="invalid_value",
            )
        if len(self._running) >= self._most:
            text = f"{self._most} responses run in the background, the most this server takes: wait for one to end"
            raise too_many(text, 5, "overloaded")

    def start(self, app: ASGIApp, made: Background, body: bytes, inner: Inner) -> None:
        """Begin to generate a response. Call check() before, without waiting in between."""
        self._running[made.id] = made
        task = asyncio.create_task(made.run(app, body, inner))
        self._tasks.add(task)
        task.add_done_callback(lambda done: self._finish(made, done))

    def find(self, id: str, owner: str | None) -> Background | None:
        """None also for a response of another owner."""
        self._trim()
        found = self._running.get(id) or self._ended.get(id)
        return found if found and found.owner == owner else None

    def forget(self, id: str) -> None:
        self._ended.pop(id, None)

    async def close(self) -> None:
        """Cancel what still runs."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _finish(self, made: Background, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # it is logged
        del self._running[made.id]
        made.ended_at = time.monotonic()
        self._ended[made.id] = made
        self._trim()

    def _trim(self) -> None:
        size = sum(one.size for one in self._ended.values())
        while self._ended:
            first = next(iter(self._ended.values()))
            is_young = first.ended_at >= time.monotonic() - self._bounds.age_s
            if is_young and len(self._ended) <= self._bounds.count and size <= self._bounds.bytes:
                return
            size -= first.size
            del self._ended[first.id]


def check_has_ended(found: Background | None) -> None:
    """Raises ApiError 400 if a response that is to be continued still runs."""
    if found and not found.ended.is_set():
        raise ApiError(
            400,
            f"previous_response_id: the response {found.id!r} is still generated: wait until it is completed",
            param="previous_response_id",
            code="invalid_value",
        )
