"""Connections to the gateway, as far as they are not uvicorn's own business."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import uvicorn
from charonia_gateway.connection import bounded

HANG_S = 20
KEEP_ALIVE_S = 1


async def answers_before_it_reads(scope: dict[str, Any], receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 413, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"no"})


@pytest.mark.parametrize("read_timeout_s", [0, 10 * HANG_S])
async def test_a_connection_ends_whose_body_came_after_the_answer(read_timeout_s: float) -> None:
    config = uvicorn.Config(
        answers_before_it_reads,
        port=0,
        lifespan="off",
        log_config=None,
        http=bounded(read_timeout_s),
        timeout_keep_alive=KEEP_ALIVE_S,
    )
    server = uvicorn.Server(config)
    running = asyncio.create_task(server._serve())
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        address = server.servers[0].sockets[0].getsockname()
        reader, writer = await asyncio.open_connection(*address)
        writer.write(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\n\r\n")
        assert (await asyncio.wait_for(reader.readuntil(b"no"), HANG_S)).startswith(b"HTTP/1.1 413 ")
        writer.write(b"body")
        assert await asyncio.wait_for(reader.read(), HANG_S) == b""
        writer.close()
    finally:
        server.should_exit = True
        await asyncio.wait_for(running, HANG_S)
