"""The gateway's application over HTTP in this process, with a server that a test controls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import uvicorn
from charonia_gateway.app import create_app
from charonia_gateway.settings import Settings
from triton_double import Behaviour, Double

MODEL = "the-model"
HANG_S = 120


@asynccontextmanager
async def gateway(
    credentials: Any = None, info: dict[str, Any] | None = None, **settings: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, Double]]:
    """Yield a client of the gateway, and its one server, which uses TLS with `credentials` (grpc.ServerCredentials).
    info: the server's model_info."""
    async with Double(credentials) as server:
        server.info = info or {}
        given = {"model_name": MODEL, "resume_timeout_s": 0, "endpoint_check_timeout_s": HANG_S, **settings}
        app = create_app(Settings(_env_file=None, triton_endpoints=server.target, **given))
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url="http://g") as web:
            yield web, server


async def ask(
    path: str, body: Any, behaviour: Behaviour | None = None, headers: dict[str, str] | None = None, **settings: Any
) -> httpx.Response:
    """The response of a new gateway to one request. behaviour: of its server."""
    async with gateway(**settings) as (web, server):
        server.behaviour = behaviour or server.behaviour
        return await web.post(path, json=body, headers=headers)


@asynccontextmanager
async def listening(
    app: Any, make: Callable[[uvicorn.Config], uvicorn.Server] = uvicorn.Server, **config: Any
) -> AsyncIterator[tuple[str, int]]:
    """Yield host and port of a server of `app`, without the app's lifespan. make: creates the server."""
    server = make(uvicorn.Config(app, port=0, lifespan="off", log_config=None, **config))
    running = asyncio.create_task(server._serve())
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        yield server.servers[0].sockets[0].getsockname()
    finally:
        server.should_exit = True
        await asyncio.wait_for(running, HANG_S)
