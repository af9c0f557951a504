"""Bounds on the connections to the gateway."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn
from charonia_gateway.connection import MAX_HEAD_BYTES, PIECE_BYTES, bounded
from gateway_in_process import listening
from uvicorn.server import ServerState

HANG_S = 120


async def answers_before_it_reads(scope: dict[str, Any], receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 413, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"no"})


def limited(max_per_address: int) -> Any:
    """A factory of connections."""
    config = uvicorn.Config(answers_before_it_reads, log_config=None, http=bounded(0, max_per_address), lifespan="off")
    config.load()
    state = ServerState()
    return lambda: config.http_protocol_class(config, state, {})


@asynccontextmanager
async def served(
    app: Any, read_timeout_s: float, keep_alive_s: int = HANG_S
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection to a server of `app`."""
    async with listening(app, http=bounded(read_timeout_s), timeout_keep_alive=keep_alive_s) as address:
        reader, writer = await asyncio.open_connection(*address)
        yield reader, writer
        writer.close()


async def test_an_address_has_a_limited_number_of_connections(caplog: pytest.LogCaptureFixture) -> None:
    server = await asyncio.get_running_loop().create_server(limited(2), "127.0.0.1", 0)
    async with server:
        address = server.sockets[0].getsockname()
        request = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"

        async def answers() -> tuple[bool, asyncio.StreamWriter]:
            reader, writer = await asyncio.open_connection(*address)
            with contextlib.suppress(ConnectionError):
                writer.write(request)
                return bool(await asyncio.wait_for(reader.read(1), HANG_S)), writer
            return False, writer

        opened = [await answers() for _ in range(4)]
        assert [answered for answered, _ in opened] == [True, True, False, False]
        assert caplog.text.count("closing connections of 127.0.0.1 beyond 2 at once") == 1
        opened[0][1].close()
        while not (await answers())[0]:  # until the server has seen the end of the first connection
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("read_timeout_s", [0, 10 * HANG_S])
async def test_connection_with_a_late_body_ends(read_timeout_s: float) -> None:
    async with served(answers_before_it_reads, read_timeout_s, keep_alive_s=1) as (reader, writer):
        writer.write(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\n\r\n")
        assert (await asyncio.wait_for(reader.readuntil(b"no"), HANG_S)).startswith(b"HTTP/1.1 413 ")
        writer.write(b"body")
        assert await asyncio.wait_for(reader.read(), HANG_S) == b""


async def says_how_long_the_body_is(scope: dict[str, Any], receive: Any, send: Any) -> None:
    size, more = 0, True
    while more:
        message = await receive()
        size, more = size + len(message["body"]), message["more_body"]
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"6")]})
    await send({"type": "http.response.body", "body": f"{size:6}".encode()})


@pytest.mark.parametrize("size", [MAX_HEAD_BYTES, MAX_HEAD_BYTES + 1, 100_000])
@pytest.mark.parametrize("body", [0, 200_000])
async def test_head_has_a_size_limit_also_in_one_piece(size: int, body: int) -> None:
    start, end = b"POST / HTTP/1.1\r\nHost: localhost\r\nX: ", f"\r\nContent-Length: {body}\r\n\r\n".encode()
    head = start + b"x" * (size - len(start) - len(end)) + end
    assert len(head) == size
    async with served(says_how_long_the_body_is, 0) as (reader, writer):
        for _ in range(2 if size <= MAX_HEAD_BYTES else 1):
            writer.write(head + b"b" * body)
            answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), HANG_S)
            if size > MAX_HEAD_BYTES:
                assert answer.startswith(b"HTTP/1.1 431 ")
            else:
                assert answer.startswith(b"HTTP/1.1 200 ")
                assert int(await reader.readexactly(6)) == body


@pytest.mark.parametrize("trailer", [b"x: " + b"y" * (2 * MAX_HEAD_BYTES), b"x: y\r\n" * (MAX_HEAD_BYTES // 3)])
async def test_trailers_are_bounded_and_are_not_headers(trailer: bytes) -> None:
    seen: list[Any] = []

    async def remembers_its_scope(scope: dict[str, Any], receive: Any, send: Any) -> None:
        seen.append(scope)
        await says_how_long_the_body_is(scope, receive, send)

    request = b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n"
    async with served(remembers_its_scope, 0) as (reader, writer):
        writer.write(request + b"content-type: text/html\r\n\r\n")
        await asyncio.wait_for(reader.readuntil(b"     1"), HANG_S)
        writer.write(request + trailer)
        assert (await asyncio.wait_for(reader.read(), HANG_S)).startswith(b"HTTP/1.1 431 ")
        assert {name for scope in seen for name, _ in scope["headers"]} == {b"host", b"transfer-encoding"}


async def test_a_request_for_http_2_is_answered_in_http_1(caplog: pytest.LogCaptureFixture) -> None:
    """Java's HttpClient sends such requests."""
    head = "POST / HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
    request = f"{head}HTTP2-Settings: AAEAAEAAAAIAAAAB\r\nContent-Length: 4\r\n\r\nabcd".encode()
    async with served(says_how_long_the_body_is, 0) as (reader, writer):
        for _ in range(2):
            writer.write(request)
            assert (await asyncio.wait_for(reader.readuntil(b"     4"), HANG_S)).startswith(b"HTTP/1.1 200 ")
        assert not caplog.text
        writer.write(b"CONNECT example.org:443 HTTP/1.1\r\nHost: example.org\r\n\r\n")
        assert (await asyncio.wait_for(reader.read(), HANG_S)).startswith(b"HTTP/1.1 400 ")


async def test_a_request_ends_with_its_connection_although_another_is_pipelined() -> None:
    seen = asyncio.Event()

    async def waits_for_the_end(scope: dict[str, Any], receive: Any, send: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            seen.set()
        ended.set()

    ended = asyncio.Event()
    async with served(waits_for_the_end, 0) as (_, writer):
        writer.write(b"GET /1 HTTP/1.1\r\nHost: x\r\n\r\nGET /2 HTTP/1.1\r\nHost: x\r\n\r\n")
        await asyncio.wait_for(seen.wait(), HANG_S)
        writer.close()
        await asyncio.wait_for(ended.wait(), HANG_S)


async def test_a_connection_that_asks_nothing_more_ends() -> None:
    """The connection is closed after the idle time, not earlier: it accepts another request first."""
    async with served(says_how_long_the_body_is, 0, keep_alive_s=1) as (reader, writer):
        for _ in range(2):
            writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert (await asyncio.wait_for(reader.readuntil(b"     0"), HANG_S)).startswith(b"HTTP/1.1 200 ")
        assert await asyncio.wait_for(reader.read(), HANG_S) == b""


@pytest.mark.parametrize(
    ("request_text", "most_queued"),
    [
        ("GET /{} HTTP/1.1\r\n\r\n", 1),
        ("POST /{} HTTP/1.1\r\nContent-Length: 2\r\n\r\nab", PIECE_BYTES // 40),
    ],
    ids=["without bodies", "with bodies"],
)
async def test_pipelined_requests_are_queued_up_to_a_bound_and_answered_in_order(
    request_text: str, most_queued: int
) -> None:
    queued, unparsed = [0], [0]

    async def says_its_path(scope: dict[str, Any], receive: Any, send: Any) -> None:
        while (await receive())["more_body"]:
            pass
        queued.append(len(protocol.pipeline))
        unparsed.append(len(protocol._unparsed))
        path = scope["path"].encode() + b"\n"
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(path))]})
        await send({"type": "http.response.body", "body": path})

    config = uvicorn.Config(says_its_path, lifespan="off", log_config=None, http=bounded(0), date_header=False)
    config.load()
    protocol: Any = config.http_protocol_class(config=config, server_state=ServerState(), app_state={})  # type: ignore[call-arg, operator]
    server = await asyncio.get_running_loop().create_server(lambda: protocol, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname(), limit=1 << 20)
    try:
        writer.write("".join(request_text.format(number) for number in range(10_000)).encode())
        for number in range(10_000):
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), HANG_S)
            assert head.startswith(b"HTTP/1.1 200 ")
            assert await reader.readline() == b"/%d\n" % number
        assert max(queued) <= most_queued
        assert max(unparsed) <= 1 << 18  # maximum of one read
    finally:
        writer.close()
        server.close()
