"""The client library with the real server: requests, and a server that dies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from charonia_client import Client, GenerateRequest, Unavailable
from stack import HANG_S, Stack, free_ports

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


async def test_log_probabilities_have_token_bytes(client: Client) -> None:
    request = GenerateRequest(messages=MESSAGES, temperature=0, logprobs=3, stream=False)
    whole = await client.complete(request)
    assert len(whole.logprobs) == len(whole.tokens) == len(whole.top_logprobs) == len(whole.token_ids)
    assert b"".join(whole.tokens).decode() == whole.text
    # The end token adds nothing to the text, but top_logprobs has its name.
    assert whole.tokens[-1] == b""
    last = {top.id: top.token for top in whole.top_logprobs[-1]}
    assert last[whole.token_ids[-1]] != b""


async def test_missing_server_raises_unavailable_immediately() -> None:
    async with Client(f"127.0.0.1:{free_ports(1)[0]}") as client:
        assert not await client.server_live() and not await client.model_ready()
        with pytest.raises(Unavailable, match="cannot be reached"):
            await asyncio.wait_for(client.complete(GenerateRequest(messages=MESSAGES, stream=False)), HANG_S)
        with pytest.raises(Unavailable, match="cannot be reached"):
            await asyncio.wait_for(client.stop("some id"), HANG_S)
        with pytest.raises(Unavailable, match="cannot be reached"):
            await asyncio.wait_for(client.server_metadata(), HANG_S)


async def test_missing_ensemble_raises_unavailable(stack: Stack) -> None:
    async with Client(stack.grpc, model="no_such_model") as client:
        with pytest.raises(Unavailable, match="no_such_model"):
            await client.complete(GenerateRequest(messages=MESSAGES, stream=False))

        # Closing did not wait for stop requests to a dead server.
