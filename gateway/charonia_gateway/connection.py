"""Connections that nobody can hold by sending slowly.

uvicorn has no limit on the time or the size of a request's head, and none on the time of its body.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from charonia_gateway.errors import ApiError

# Far above what clients send (8 KiB is usual in proxies); cookies of other services on the same host are part of it.
MAX_HEAD_BYTES = 1 << 16
_HEAD_PIECE = 1 << 12  # by so much, the head of a request may be larger that came behind another one in one piece


class BoundedProtocol(HttpToolsProtocol):
    """Of `read_timeout_s` seconds a request may take: from its first byte, or a connection's beginning, to its end. How
    long a connection may be idle between two requests is uvicorn's to say. 0: no limit."""

    read_timeout_s = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._timer: asyncio.TimerHandle | None = None
        self._in_head = True  # of a request, or before it
        self._head_bytes = 0
        self._expect_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._timer is None:
            self._expect_request()
        # The parser does not say where in the data a head ends. So it gets one in pieces, none of which pass the limit.
        while data and not self.transport.is_closing():
            piece = data
            if self._in_head:
                piece = data[: min(_HEAD_PIECE, MAX_HEAD_BYTES - self._head_bytes)]
                if not piece:
                    text = f"the request's head is larger than {MAX_HEAD_BYTES} bytes"
                    return self._refuse(ApiError(431, text, code="too_large"))
                self._head_bytes += len(piece)
            super().data_received(piece)
            data = data[len(piece) :]

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_head, self._head_bytes = True, 0
        self._stop_timer()
        super().on_message_complete()
        # uvicorn arms this when it has answered, and data disarms it: also the rest of a request that was answered
        # before it was read. Then nobody else ends a connection on which no other request comes.
        if self.cycle.response_complete and not self.timeout_keep_alive_task and not self.transport.is_closing():
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def _expect_request(self) -> None:
        if self.read_timeout_s:
            self._timer = self.loop.call_later(self.read_timeout_s, self._too_slow)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_slow(self) -> None:
        self._timer = None
        if self.transport.is_closing():
            return
        if self.flow.read_paused or (self._in_head and self._is_answering):
            self._expect_request()  # the next request waits for this answer, or is a stray line end
        elif self._in_head and not self._head_bytes:
            self.transport.close()  # it has said nothing
        else:
            text = f"the request did not arrive in {self.read_timeout_s:g} s (CHARONIA_GATEWAY_READ_TIMEOUT_S)"
            self._refuse(ApiError(408, text, type="timeout_error", code="request_timeout"))

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _refuse(self, error: ApiError) -> None:
        """Ends the connection, with an answer unless one has begun. The application sees that the client is gone."""
        if not self._is_answering if self._in_head else not self.cycle.response_started:
            body = json.dumps(error.body()).encode()
            reason = {408: "Request Timeout", 431: "Request Header Fields Too Large"}[error.status]
            head = f"HTTP/1.1 {error.status} {reason}\r\ncontent-type: application/json\r\n"
            head += f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            self.transport.write(head.encode() + body)
        self.transport.close()


def bounded(read_timeout_s: float) -> type[asyncio.Protocol]:
    """The class of a server's connections, for uvicorn's setting `http`."""
    members: dict[str, Any] = {"read_timeout_s": read_timeout_s}
    return type("BoundedProtocol", (BoundedProtocol,), members)
