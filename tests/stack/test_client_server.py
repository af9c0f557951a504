"""The client library with the real server: requests, and a server that dies."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from charonia_client import Client, GenerateRequest, Unavailable
from stack import Stack

MESSAGES = [{"role": "user", "content": "Hello"}]


@pytest.fixture
async def client(stack: Stack) -> AsyncIterator[Client]:
    async with Client(stack.grpc) as client:
        yield client


async def test_health_and_metadata(client: Client) -> None:
    assert await client.server_live() and await client.server_ready()
    assert await client.model_ready() and not await client.model_ready("no such model")
    server = await client.server_metadata()
    assert (server.name, server.version) == ("triton", "2.51.0")
    model = await client.model_metadata()
    assert model.inputs["max_tokens"] == ("INT32", (1,))
    assert model.outputs["text_output"] == ("BYTES", (1,))


async def test_missing_ensemble_raises_unavailable(stack: Stack) -> None:
    async with Client(stack.grpc, model="no_such_model") as client:
        with pytest.raises(Unavailable, match="no_such_model"):
            await client.complete(GenerateRequest(messages=MESSAGES, stream=False))

        # Closing did not wait for stop requests to a dead server.
