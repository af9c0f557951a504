"""HTTP connections with bounds on the time and memory that a client can take.

uvicorn has no limit on the time or the size of a request's head and trailers, and none on the time of its body. It
parses and queues pipelined requests as fast as they arrive.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

import httptools
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from charonia_gateway.errors import ApiError

log = logging.getLogger("charonia_gateway")
# Far above what clients send (8 KiB is usual in proxies); cookies of other services on the same host are part of it.
# Also the limit of trailers, and of the bytes between two chunks of a body.
MAX_HEAD_BYTES = 1 << 16
# The parser gets at most this many bytes in one call. So at most the requests within one piece are queued. A head that
# begins within a piece can be larger than MAX_HEAD_BYTES by one piece.
PIECE_BYTES = 1 << 12
_HEAD_END = re.compile(rb"\n\r?\n")


class _Flow(FlowControl):
    """Calls `on_resume` instead of resuming the transport when the application is ready for more."""

    def __init__(self, transport: asyncio.Transport, on_resume: Callable[[], None]) -> None:
        super().__init__(transport)
        self._on_resume = on_resume

    def resume_reading(self) -> None:
        if self.read_paused:
            self.read_paused = False
            asyncio.get_running_loop().call_soon(self._on_resume)


class BoundedProtocol(HttpToolsProtocol):
    """A request may take `read_timeout_s` seconds from its first byte, or from the start of the connection, to its end.
    0 means no limit. uvicorn limits how long a connection may be idle between two requests.

    Data is parsed only while no pipelined request waits and the application keeps up with the body. The transport is
    paused until all received data is parsed."""

    read_timeout_s = 0.0
    max_per_address = 0  # 0 means no limit
    _per_address: ClassVar[Counter[str]]
    _full: ClassVar[set[str]]  # addresses whose limit was logged
    _address = ""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._address = str((transport.get_extra_info("peername") or ("",))[0])
        self._per_address[self._address] += 1
        if self.max_per_address and self._per_address[self._address] > self.max_per_address:
            if self._address not in self._full:
                self._full.add(self._address)
                log.warning("closing connections of %s beyond %d at once", self._address, self.max_per_address)
            transport.abort()
        self.flow = _Flow(transport, self._resume)
        self._timer: asyncio.TimerHandle | None = None
        self._unparsed = bytearray()
        self._in_head = True  # of a request, or before it
        self._answered: RequestResponseCycle | None = None  # the request that is answered now
        self._head_bytes = 0  # since the request's begin or the last bytes of its body
        self._expect_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._per_address[self._address] -= 1
        if self._per_address[self._address] <= self.max_per_address // 2:
            self._full.discard(self._address)
        if not self._per_address[self._address]:
            del self._per_address[self._address]
        self._stop_timer()
        self._unparsed.clear()
        if self._answered:  # uvicorn ends only the last of several pipelined requests
            self._answered.disconnected = True
            self._answered.message_event.set()
        super().connection_lost(exc)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, app)

    def data_received(self, data: bytes) -> None:
        self._unparsed += data
        self._parse()

    def _parse(self) -> None:
        while self._unparsed and not self.transport.is_closing():
            if self.pipeline:
                self.flow.pause_reading()
            if self.flow.read_paused:
                return
            if self._timer is None:
                self._expect_request()
            size = min(PIECE_BYTES, MAX_HEAD_BYTES - self._head_bytes)
            if not size:
                part = "head" if self._in_head else "trailer part"
                text = f"the request's {part} is larger than {MAX_HEAD_BYTES} bytes"
                return self._refuse(ApiError(431, text, code="too_large"))
            if self._in_head and (end := _HEAD_END.search(self._unparsed, 0, size)):
                size = end.end()
            piece = bytes(self._unparsed[:size])
            del self._unparsed[:size]
            self._head_bytes += len(piece)
            super().data_received(piece)

    def _resume(self) -> None:
        self._parse()
        if not self.flow.read_paused and not self.transport.is_closing():
            self.transport.resume_reading()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # trailers are not used
            super().on_header(name, value)

    @property
    def _asks_for_upgrade(self) -> bool:
        return self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"

    def on_headers_complete(self) -> None:
        if not self._asks_for_upgrade:
            self._in_head, self._head_bytes = False, 0
            super().on_headers_complete()

    def _unsupported_upgrade_warning(self) -> None:
        """Parse the head again, without the request for another protocol, which servers may ignore. With it, the parser
        finds no body. Java's HttpClient asks for HTTP/2 in this way by default."""
        if self._asks_for_upgrade:
            version = self.parser.get_http_version().encode()
            lines = [b" ".join((self.parser.get_method(), self.url, b"HTTP/" + version))]
            lines += [name + b": " + value for name, value in self.headers if name != b"upgrade"]
            self.parser = httptools.HttpRequestParser(self)
            self.parser.feed_data(b"\r\n".join([*lines, b"", b""]))

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._asks_for_upgrade:
            return
        self._in_head, self._head_bytes = True, 0
        self._stop_timer()
        super().on_message_complete()
        # uvicorn starts this timer after a response and cancels it when data arrives. The rest of a request that was
        # answered early cancels it too, so an idle connection would stay open.
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
            self._expect_request()  # the next request waits for this response, or only a line end was received
        elif self._in_head and not self._head_bytes:
            self.transport.close()  # nothing was received
        else:
            text = f"the request did not arrive in {self.read_timeout_s:g} s (CHARONIA_GATEWAY_READ_TIMEOUT_S)"
            self._refuse(ApiError(408, text, type="timeout_error", code="request_timeout"))

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _refuse(self, error: ApiError) -> None:
        """Close the connection, with an error response unless a response has begun.

        The application sees a disconnect."""
        if not self._is_answering if self._in_head else not self.cycle.response_started:
            body = json.dumps(error.body()).encode()
            reason = {408: "Request Timeout", 431: "Request Header Fields Too Large"}[error.status]
            head = f"HTTP/1.1 {error.status} {reason}\r\ncontent-type: application/json\r\n"
            head += f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            self.transport.write(head.encode() + body)
        self.transport.close()


def bounded(read_timeout_s: float, max_per_address: int = 0) -> type[asyncio.Protocol]:
    """The class of a server's connections for uvicorn's setting `http`. max_per_address: connections of one client
    address, so that no client can take all descriptors of this process; 0 means no limit."""
    members: dict[str, Any] = {"read_timeout_s": read_timeout_s, "max_per_address": max_per_address}
    members |= {"_per_address": Counter(), "_full": set()}
    return type("BoundedProtocol", (BoundedProtocol,), members)
