"""A server that ends while answers run: those that get something go on, those that get nothing any more end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from charonia_client import Client, GenerateRequest
from charonia_client.errors import Unresponsive
from triton_double import Double, input_text, part
from tritonclient.grpc import service_pb2 as pb

HANG_S = 60


async def test_an_exiting_server_loses_only_the_answers_that_it_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("charonia_client.client._PROBE_INTERVAL_S", 0.05)
    monkeypatch.setattr("charonia_client.client._REFUSED_TIMEOUT_S", 1.0)
    enough = asyncio.Event()

    async def answer(request: pb.ModelInferRequest) -> AsyncIterator[pb.ModelStreamInferResponse]:
        yield part("begun")
        if input_text(request, "text_input") == "left":
            await asyncio.Event().wait()
        while not enough.is_set():
            yield part("more")
            await asyncio.sleep(0.02)
        yield part("", "stop")

    async def read(client: Client, text: str, begun: asyncio.Event) -> str | None:
        reason = None
        async for response in client.generate(GenerateRequest(text=text, stream=True)):
            reason = response.finish_reason
            begun.set()
        return reason

    async with Double() as double, Client(double.target) as client:
        double.behaviour = answer
        begun = [asyncio.Event(), asyncio.Event()]
        left = asyncio.create_task(read(client, "left", begun[0]))
        flowing = asyncio.create_task(read(client, "flowing", begun[1]))
        await asyncio.wait_for(asyncio.gather(*(event.wait() for event in begun)), HANG_S)
        double.exiting = True
        with pytest.raises(Unresponsive, match="takes no calls any more"):
            await asyncio.wait_for(left, HANG_S)
        assert not flowing.done()
        enough.set()
        assert await asyncio.wait_for(flowing, HANG_S) == "stop"
