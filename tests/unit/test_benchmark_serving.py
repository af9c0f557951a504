"""`charonia benchmark serving`: its targets, and its errors."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from charonia.bench import records, targets
from charonia.bench.cli import app
from charonia.bench.figures import Trace
from charonia.bench.serving import closed_loop
from charonia.bench.workload import Job
from charonia.errors import ModelError


class Half:
    """Serves every second request, and rejects the others."""

    def __init__(self) -> None:
        self._asked = 0

    async def run(self, job: Job, trace: Trace) -> None:
        self._asked += 1
        if self._asked % 2:
            raise RuntimeError("HTTP 429: the queue is full")
        trace.arrivals.append(targets.clock())


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The addresses of the targets, which are replaced by doubles."""
    found: list[str] = []

    @asynccontextmanager
    async def open_target(address: str, *_: Any) -> AsyncIterator[Half]:
        found.append(address)
        yield Half()

    monkeypatch.setattr(targets, "triton", open_target)
    monkeypatch.setattr(targets, "gateway", open_target)
    return found


@pytest.mark.parametrize(("target", "address"), [("triton", "127.0.0.1:4001"), ("gateway", "https://127.0.0.1:4002")])
def test_serving_with_failed_requests_counts_and_names_them(
    asked: list[str], tmp_path: Path, target: str, address: str
) -> None:
    (tmp_path / "prompts").write_text("Hello\n")
    options = ["--prompts", str(tmp_path / "prompts"), "--num-requests", "6", "--concurrency", "1", "--warmup", "0"]
    env = {"CHARONIA_GRPC_PORT": "4001", "CHARONIA_GATEWAY_PORT": "4002", "CHARONIA_GATEWAY_TLS_CERT": "cert.pem"}
    file = tmp_path / "figures"
    done = CliRunner().invoke(app, ["serving", "model", "--target", target, *options, "--json", str(file)], env=env)
    assert isinstance(done.exception, ModelError) and asked == [address]
    assert str(done.exception) == (
        "3 of 6 requests failed and are not in the figures: 3 x RuntimeError: HTTP 429: the queue is full"
    )
    assert {one.name: one.value for one in records.read(file)[1]}["errors"] == 3


def test_gateway_target_with_tls_error_names_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    failures = {
        "https://a": (httpx.ConnectError("[SSL: CERTIFICATE_VERIFY_FAILED] self-signed certificate"), "--tls-ca"),
        "http://a": (httpx.RemoteProtocolError("Server disconnected without sending a response."), "https://"),
    }
    for url, (error, hint) in failures.items():

        async def fails(*_: Any, error: httpx.HTTPError = error) -> httpx.Response:
            raise error

        monkeypatch.setattr(httpx.AsyncClient, "get", fails)
        with pytest.raises(ModelError, match=hint):
            asyncio.run(opened(url))


async def test_error_without_text_names_its_cause() -> None:
    async def reset(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        linger = struct.pack("ii", 1, 0)  # closing resets the connection
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.close()

    server = await asyncio.start_server(reset, "127.0.0.1")
    async with server, httpx.AsyncClient() as client:
        host, port = server.sockets[0].getsockname()

        class Asks:
            async def run(self, job: Job, trace: Trace) -> None:
                await client.get(f"http://{host}:{port}")

        [trace] = await closed_loop(Asks(), [Job("x", 1)], 1, lambda: None)
    assert trace.error.startswith("ReadError, caused by ConnectionResetError: ") and "reset by peer" in trace.error


async def test_requests_are_greedy_without_repetition_penalty() -> None:
    """The sampling parameters of generation_config.json would change the time of a step."""
    found: list[Any] = []

    class Asked:
        """A double of an engine and of Triton's client."""

        async def generate(self, request: Any) -> AsyncIterator[Any]:
            found.append({name: getattr(request, name) for name in ("temperature", "repetition_penalty")})
            for nothing in ():
                yield nothing

        async def astream(self, _: str, sampling: Any) -> AsyncIterator[Any]:
            async for part in self.generate(sampling):
                yield part

    def answer(request: httpx.Request) -> httpx.Response:
        found.append(json.loads(request.content))
        event = {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 1}}
        return httpx.Response(200, text=f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n")

    server: Any = Asked()
    async with httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://gateway") as client:
        for target in (targets.InProcess(server), targets.Triton(server), targets.Gateway(client, "m")):
            await target.run(Job("x", 1), Trace(0.0))
    assert [(one["temperature"], one["repetition_penalty"]) for one in found] == [(0.0, 1.0)] * 3


async def opened(url: str) -> None:
    async with targets.gateway(url):
        pass
