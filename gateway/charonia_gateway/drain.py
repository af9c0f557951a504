"""The orderly end of the gateway: it rejects new requests and finishes the running ones."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import math
import os
import socket
import time
from collections.abc import Callable, Iterator
from types import FrameType

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from charonia_gateway.errors import unavailable
from charonia_gateway.tls import Certificates

log = logging.getLogger("charonia_gateway")

_FINAL_MESSAGE_S = 2.0  # for clients to read the last message of cancelled requests
_ENDED_S = 5.0  # for cancelled requests to end, which notify Triton first


class Drain:
    """Counts the running requests. `limit_s`: how long they may continue after begin()."""

    def __init__(self, limit_s: float) -> None:
        self.running = 0
        self.limit_s = limit_s
        self.has_cut = False
        self._tasks: set[asyncio.Task[object]] = set()
        self._deadline: float | None = None

    def begin(self) -> None:
        if self._deadline is None:
            self._deadline = time.monotonic() + self.limit_s

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Counts a request; use it in the request's task."""
        task = asyncio.current_task()
        assert task
        self.running += 1
        self._tasks.add(task)
        try:
            yield
        finally:
            self._tasks.discard(task)
            self.running -= 1

    def cut(self) -> int:
        """Cancel the running requests, which still notify their clients. Returns their number."""
        self.begin()
        self.has_cut = True
        for task in self._tasks:
            task.cancel()
        return len(self._tasks)

    async def have_ended(self, seconds: float) -> bool:
        """Whether all cancelled requests end within that time."""
        return not self._tasks or not (await asyncio.wait(self._tasks, timeout=seconds))[1]

    @property
    def begun(self) -> bool:
        return self._deadline is not None

    @property
    def is_over(self) -> bool:
        """Whether no request runs any more, or the time for them is over."""
        if self._deadline is None:
            return False
        return self.running == 0 or time.monotonic() >= self._deadline

    @property
    def left_s(self) -> int:
        """Seconds, at least one, after which another process may listen here."""
        return 1 if self._deadline is None else max(1, math.ceil(self._deadline - time.monotonic()))


class DrainMiddleware:
    """Rejects POST requests with 503 while draining. Health, metrics and documentation are still served."""

    def __init__(self, app: ASGIApp, drain: Drain) -> None:
        self._app = app
        self._drain = drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        if self._drain.begun:
            error = unavailable("the gateway is shutting down and takes no new request", self._drain.left_s)
            error.headers["Connection"] = "close"  # the next attempt may reach another gateway
            await error.response(scope)(scope, receive, send)
            return
        begun = False

        async def watched(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        with self._drain.counted():
            try:
                await self._app(scope, receive, watched)
            except asyncio.CancelledError:
                if not self._drain.has_cut:
                    raise
                if begun:  # otherwise uvicorn logs an error of the application
                    return
                # The request had not reached Triton: its body was incomplete, or it waited for a limit.
                error = unavailable("the gateway is shutting down")
                error.headers["Connection"] = "close"
                await error.response(scope)(scope, receive, send)


def _listens(one: socket.socket) -> bool:
    try:
        return bool(one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    except OSError:  # closed
        return False


class DrainingServer(uvicorn.Server):
    """Drains on the first signal, then shuts down as uvicorn does. Shuts down immediately on the second signal."""

    def __init__(
        self,
        config: uvicorn.Config,
        drain: Drain,
        write_timeout_s: float = 0,
        certificates: Certificates | None = None,
        started: Callable[[], None] | None = None,
    ) -> None:
        """write_timeout_s: a connection is closed if its client reads nothing for so long; 0: never. certificates: for
        TLS. started: called once the port is open."""
        super().__init__(config)
        self._certificates = certificates
        self._on_start = started
        self._following: asyncio.Task[None] | None = None
        self._drain = drain
        self._signalled = False
        self._was_over = False  # at the last tick
        self._write_timeout_s = write_timeout_s

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        if self._certificates:
            self.config.ssl = self._certificates.context()
            self._following = asyncio.create_task(self._certificates.follow())
        await super().startup(sockets)
        if self.started and not all(map(_listens, sockets or ())):  # uvloop ignores the error
            self.started = False
            await super().shutdown(sockets)
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        if self._write_timeout_s and hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
            for server in self.servers:
                for listening in server.sockets:
                    # Connections inherit it. The kernel closes them, even if the whole response has been written.
                    with socket.socket(fileno=os.dup(listening.fileno())) as own:
                        milliseconds = math.ceil(self._write_timeout_s * 1000)
                        own.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
        if self._on_start and self.started:
            self._on_start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._following:
            self._following.cancel()
        await self._cut()
        await super().shutdown(sockets)

    async def _cut(self) -> None:
        """Cancel the running requests. uvicorn would wait first, and then log errors and tracebacks."""
        had_its_time = self._drain.is_over
        count = self._drain.cut()
        if not count:
            return
        requests = "1 request was" if count == 1 else f"{count} requests were"
        if had_its_time:
            text = "%s cut off: not ended %g s after the shutdown began (CHARONIA_DRAIN_TIMEOUT_S)"
            log.warning(text, requests, self._drain.limit_s)
        else:
            log.warning("%s cut off: the gateway must shut down immediately", requests)
        if await self._drain.have_ended(_FINAL_MESSAGE_S):
            return
        for connection in list(self.server_state.connections):
            if connection.transport and connection.transport.get_write_buffer_size():  # its client does not read
                connection.transport.abort()
        await self._drain.have_ended(_ENDED_S)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._signalled:
            super().handle_exit(sig, frame)
        self._signalled = True
        self._drain.begin()

    async def on_tick(self, counter: int) -> bool:
        # One tick later: requests that arrived before it on a busy machine are still rejected with 503.
        self.should_exit = self.should_exit or (self._was_over and self._drain.is_over)
        self._was_over = self._drain.is_over
        return await super().on_tick(counter)
