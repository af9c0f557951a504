"""The whole application over HTTP, in front of a server that does what a test tells it to."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from charonia_gateway.app import create_app
from charonia_gateway.settings import Settings
from triton_double import Double

MODEL = "the-model"
CHAT: dict[str, Any] = {"model": MODEL, "messages": "hi"}


@asynccontextmanager
async def gateway(**settings: Any) -> AsyncIterator[tuple[httpx.AsyncClient, Double]]:
    """Its client, and the one server behind it."""
    async with Double() as server:
        app = create_app(Settings(_env_file=None, endpoints=server.target, model_name=MODEL, **settings))
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url="http://g") as web:
            yield web, server


async def test_of_a_wrong_models_name_the_log_has_the_beginning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "charonia_gateway.access"):
        async with gateway(access_log=True) as (web, _):
            answer = await web.post("/v1/chat/completions", json={**CHAT, "model": "m" * 1_000_000})
    assert answer.status_code == 404
    (line,) = [record for record in caplog.records if record.name == "charonia_gateway.access"]
    assert line.__dict__["model"] == "m" * 100
