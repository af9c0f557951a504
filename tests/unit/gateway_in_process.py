"""The gateway's application over HTTP, in this process, in front of a server that does what a test tells it to."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
from charonia_gateway.app import create_app
from charonia_gateway.settings import Settings
from triton_double import Double

MODEL = "the-model"


@asynccontextmanager
async def gateway(credentials: Any = None, **settings: Any) -> AsyncIterator[tuple[httpx.AsyncClient, Double]]:
    """Its client, and the one server behind it, which has TLS with `credentials` (grpc.ServerCredentials)."""
    async with Double(credentials) as server:
        app = create_app(Settings(_env_file=None, triton_endpoints=server.target, model_name=MODEL, **settings))
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url="http://g") as web:
            yield web, server
