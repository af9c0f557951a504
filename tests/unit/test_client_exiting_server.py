"""A server that exits or hangs during responses: responses that receive parts continue, the others end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from charonia_client import Client, ConnectionLost, GenerateRequest, Unavailable
from charonia_client.errors import Unresponsive
from triton_double import Double, input_text, part
from tritonclient.grpc import service_pb2 as pb
from waiting import HANG_S, until


async def test_exiting_server_loses_only_responses_without_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test moves the clock of the event loop forward in steps. Each step is shorter than the time that the server
    may be silent, and comes only after the response `flowing` has received a part."""
    loop, ahead = asyncio.get_running_loop(), 0.0
    clock = loop.time
    monkeypatch.setattr(loop, "time", lambda: clock() + ahead)
    enough = asyncio.Event()
    parts = 0

    async def answer(request: pb.ModelInferRequest) -> AsyncIterator[Any]:
        yield part("begun")
        if input_text(request, "text_input") == "left":
            await asyncio.Event().wait()
        while not enough.is_set():
            yield part("more")
            await asyncio.sleep(0.02)
        yield part("", "stop")

    async def read(client: Client, text: str, begun: asyncio.Event) -> str | None:
        nonlocal parts
        reason = None
        async for response in client.generate(GenerateRequest(text=text, stream=True)):
            reason = response.finish_reason
            begun.set()
            parts += text == "flowing"
        return reason

    async def go_on() -> None:
        nonlocal ahead
        parts_before, refusals_before = parts, double.refusals
        ahead += 5.0
        await until(lambda: parts > parts_before and double.refusals > refusals_before)

    async with Double() as double, Client(double.target) as client:
        double.behaviour = answer
        begun = [asyncio.Event(), asyncio.Event()]
        left = asyncio.create_task(read(client, "left", begun[0]))
        flowing = asyncio.create_task(read(client, "flowing", begun[1]))
        await asyncio.wait_for(asyncio.gather(*(event.wait() for event in begun)), HANG_S)
        double.exiting = True
        while not left.done():
            await go_on()
        with pytest.raises(Unresponsive, match="takes no calls any more"):
            await left
        assert not flowing.done()
        enough.set()
        assert await asyncio.wait_for(flowing, HANG_S) == "stop"


@pytest.mark.slow
async def test_response_fails_if_only_streams_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton has one thread for streams, which can deadlock. Then the server still responds to all other calls."""
    monkeypatch.setattr("charonia_client.client._PROBE_INTERVAL_S", 0.05)
    monkeypatch.setattr("charonia_client.client._PROBE_TIMEOUT_S", 0.5)
    monkeypatch.setattr("charonia_client.client._UNARY_TIMEOUT_S", float(HANG_S))
    async with Double() as double, Client(double.target) as client:
        await client.check(HANG_S)
        double.streams_hang = True
        assert await client.server_live() and await client.model_ready()
        with pytest.raises(Unresponsive, match="did not answer in time"):
            await client.check(0.5)
        with pytest.raises(Unresponsive, match=r"did not answer for 0.5 s"):
            await asyncio.wait_for(client.complete(GenerateRequest(text="hi", stream=False)), HANG_S)


class Proxy:
    """A port in front of a server. A test can break its connections."""

    def __init__(self, target: str) -> None:
        self._host, self._port = target.split(":")
        self._writers: list[asyncio.StreamWriter] = []
        self._refuses = False

    async def __aenter__(self) -> str:
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aexit__(self, *_: object) -> None:
        self.cut()
        self._server.close()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refuses:
            writer.transport.abort()
            return
        far_reader, far_writer = await asyncio.open_connection(self._host, int(self._port))
        self._writers.append(writer)  # the connection to the server stays open, as if the network failed
        await asyncio.gather(_copy(reader, far_writer), _copy(far_reader, writer))

    def cut(self, *, refuses: bool = False) -> None:
        self._refuses = refuses
        while self._writers:
            self._writers.pop().transport.abort()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    except ConnectionError:
        pass


async def test_request_of_a_broken_connection_is_cancelled_after_reconnecting() -> None:
    async def answer(request: pb.ModelInferRequest) -> AsyncIterator[Any]:
        yield part("begun")
        await asyncio.Event().wait()

    async def read(client: Client) -> None:
        async for _ in client.generate(GenerateRequest(text="hi"), request_id="lost"):
            begun.set()

    begun = asyncio.Event()
    async with Double() as double:
        double.behaviour = answer
        proxy = Proxy(double.target)
        async with proxy as target, Client(target) as client:
            reading = asyncio.create_task(read(client))
            await asyncio.wait_for(begun.wait(), HANG_S)
            proxy.cut(refuses=True)
            with pytest.raises(ConnectionLost):
                await asyncio.wait_for(reading, HANG_S)
            await client.until_over("lost")  # the connection can stay lost for ever
            assert double.actions == []
            proxy.cut()
            await until(lambda: ("cancel", "lost") in double.actions)


async def test_check_fails_if_grpc_cancels_its_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """gRPC does so if the connection breaks when it ends the requests of a stream."""
    async with Double() as double, Client(double.target) as client:
        open_stream = client._stub.ModelStreamInfer

        def cancelled(requests: Any, timeout: float) -> Any:
            call = open_stream(requests, timeout=timeout)
            call.cancel()
            return call

        monkeypatch.setattr(client._stub, "ModelStreamInfer", cancelled)
        with pytest.raises(Unavailable, match="the connection broke"):
            await client.check(HANG_S)


async def test_call_about_adapters_is_read_to_its_end() -> None:
    """Leaving it before would cancel it, and Triton may count a cancelled call as running for ever."""

    class Breaking(Double):
        async def ModelStreamInfer(self, requests: Any, context: Any) -> AsyncIterator[pb.ModelStreamInferResponse]:
            yield await anext(super().ModelStreamInfer(requests, context))
            await context.abort(grpc.StatusCode.UNAVAILABLE, "broken")

    async with Breaking() as double, Client(double.target) as client:
        with pytest.raises(Unavailable, match="broken"):
            await client.adapters()
