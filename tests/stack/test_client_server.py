"""The client library with the real server: requests, and a server that dies."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from charonia_client import CharoniaError, Client, GenerateRequest, Unavailable
from stack import ENDLESS, HANG_S, SLOW, Stack, free_ports, running

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


async def test_killed_server_under_load_ends_every_response(slow_model: Path, tmp_path: Path) -> None:
    request = GenerateRequest(messages=MESSAGES, ignore_eos=True, max_tokens=ENDLESS)

    async def ask_twice(client: Client, began: asyncio.Event) -> list[CharoniaError]:
        """The errors of a running response, and of a request immediately after that."""
        errors = []
        for _ in range(2):
            try:
                async for part in client.generate(request):
                    assert part.finish_reason is None
                    began.set()
            except CharoniaError as error:
                errors.append(error)
        return errors

    with running(Stack(slow_model, tmp_path, SLOW)) as served:
        async with Client(served.grpc) as client:
            began = [asyncio.Event() for _ in range(24)]
            readers = [asyncio.create_task(ask_twice(client, event)) for event in began]
            await asyncio.gather(*(event.wait() for event in began))
            os.kill(served.pid_of("tritonserver"), signal.SIGKILL)
            # New calls all the time: some begin while the connection breaks.
            calls: list[asyncio.Task[None]] = []
            while not any(reader.done() for reader in readers):
                calls.append(asyncio.create_task(client.stop("some id")))
                await asyncio.sleep(0.001)
            for result in await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), HANG_S):
                assert result is None or isinstance(result, Unavailable), repr(result)
            for errors in await asyncio.wait_for(asyncio.gather(*readers), HANG_S):
                assert len(errors) == 2 and all(isinstance(error, Unavailable) for error in errors), errors
                # The closed connection was noticed, not the missing probe responses, which takes longer.
                assert all("cannot be reached or went away" in str(error) for error in errors), errors
        # Closing did not wait for stop requests to a dead server.
