"""Requests that the gateway sends to itself: responses in the background, and the requests of batches.

They pass the middleware of all requests. So they have a record, their tokens are charged to their key, and a drain
waits for them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message

from charonia_gateway.record import INNER, REQUEST_ID_HEADER, Inner


@dataclass
class InnerAnswer:
    """status: 0 if the request was cancelled before its response began."""

    status: int = 0
    headers: Headers = field(default_factory=Headers)
    body: bytes = b""


async def ask_itself(
    app: ASGIApp,
    path: str,
    body: bytes,
    inner: Inner,
    cancelled: asyncio.Event,
    read: Callable[[bytes], None] | None = None,
) -> InnerAnswer:
    """Send a POST request with a JSON body to the gateway's own application. cancelled: when it is set, the request
    ends as if its client had disconnected. read: gets each piece of a response with status 200, instead of
    InnerAnswer.body."""
    answer = InnerAnswer()
    pieces: list[bytes] = []
    unread = [body]

    async def receive() -> Message:
        if unread:
            return {"type": "http.request", "body": unread.pop(), "more_body": False}
        await cancelled.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            answer.status, answer.headers = message["status"], Headers(raw=message["headers"])
        elif read and answer.status == 200:
            read(message.get("body", b""))
        else:
            pieces.append(message.get("body", b""))

    headers = {"host": "localhost", "content-type": "application/json", "content-length": str(len(body))}
    if inner.request_id:
        headers[REQUEST_ID_HEADER] = inner.request_id
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        "client": (inner.address, 0),
        "server": None,
        "state": {INNER: inner},
    }
    await app(scope, receive, send)
    answer.body = b"".join(pieces)
    return answer
