"""SIGTERM while answers are under way: no new request is taken, running ones end as they would have, then the process
does; what takes longer than it may is cancelled."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import engine_metrics
import httpx
import pytest
import tritonclient.grpc.aio as triton
from gateway_process import GatewayProcess, gateway
from stack import HANG_S, Stack, running
from tritonclient.utils import InferenceServerException

USER: list[Any] = [{"role": "user", "content": "Hello"}]
STREAMS = 4
TOKENS = 400  # of a stream that is to end by itself: some seconds on a slow machine
ENDLESS = 4000


def body(model: str, tokens: int, **fields: Any) -> dict[str, Any]:
    return {"model": model, "messages": USER, "ignore_eos": True, "max_tokens": tokens, "stream": True, **fields}


async def read_stream(http: httpx.AsyncClient, body: dict[str, Any], begun: asyncio.Event) -> tuple[str | None, str]:
    """Finish reason and last event of a stream; sets `begun` at its first text."""
    reason, last = None, ""
    async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if not line:
                continue
            last = line
            begun.set()
            if line.startswith("data: {") and "choices" in line:
                choices = json.loads(line.removeprefix("data: "))["choices"]
                reason = (choices and choices[0]["finish_reason"]) or reason
    return reason, last


async def begin_streams(http: httpx.AsyncClient, asked: dict[str, Any]) -> list[asyncio.Task[tuple[str | None, str]]]:
    begun = [asyncio.Event() for _ in range(STREAMS)]
    tasks = [asyncio.create_task(read_stream(http, asked, event)) for event in begun]
    await asyncio.wait_for(asyncio.gather(*(event.wait() for event in begun)), HANG_S)
    return tasks


async def until_draining(http: httpx.AsyncClient) -> None:
    """Returns when readiness says that it ends."""

    async def ask() -> None:
        while (await http.get("/health/ready")).status_code != 503:
            await asyncio.sleep(0.01)

    await asyncio.wait_for(ask(), HANG_S)


async def check_refused(http: httpx.AsyncClient, asked: dict[str, Any]) -> None:
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/chat/interactive"):
        answer = await http.post(path, json=asked)
        assert answer.status_code == 503, answer.text
        assert int(answer.headers["Retry-After"]) >= 1
        assert answer.json()["error"]["code"] == "service_unavailable"
    assert (await http.get("/health/live")).status_code == 200


@pytest.fixture
async def alone(slow: Stack, tmp_path: Path) -> AsyncIterator[GatewayProcess]:
    """A gateway of its own that drains for long."""
    with gateway(slow.grpc, tmp_path / "gateway.log", CHARONIA_DRAIN_TIMEOUT_S=str(HANG_S)) as own:
        yield own


async def test_a_gateway_ends_when_its_streams_have(alone: GatewayProcess) -> None:
    async with httpx.AsyncClient(base_url=alone.url, timeout=HANG_S) as http:
        streams = await begin_streams(http, body("model", TOKENS))
        alone.process.send_signal(signal.SIGTERM)
        await until_draining(http)
        await check_refused(http, body("model", 1))
        for reason, last in await asyncio.wait_for(asyncio.gather(*streams), HANG_S):
            assert (reason, last) == ("length", "data: [DONE]")
    assert await asyncio.to_thread(alone.process.wait, HANG_S) == 0


async def test_a_gateway_with_nothing_to_do_ends_at_once(alone: GatewayProcess) -> None:
    alone.process.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(alone.process.wait, HANG_S) == 0


async def test_a_second_signal_does_not_wait(slow: Stack, alone: GatewayProcess) -> None:
    async with httpx.AsyncClient(base_url=alone.url, timeout=HANG_S) as http:
        streams = await begin_streams(http, body("model", ENDLESS))
        alone.process.send_signal(signal.SIGTERM)
        await until_draining(http)
        alone.process.send_signal(signal.SIGTERM)
        for reason, last in await asyncio.wait_for(asyncio.gather(*streams), HANG_S):
            assert reason is None and "shutting down" in last
    assert await asyncio.to_thread(alone.process.wait, HANG_S) == 0
    await engine_metrics.idle(slow.metrics)


async def test_the_whole_stack_ends_when_its_streams_have(slow_model: Path, tmp_path: Path) -> None:
    env = {"CHARONIA_STREAM_INTERVAL_MS": "0", "CHARONIA_DRAIN_TIMEOUT_S": str(HANG_S)}
    with running(Stack(slow_model, tmp_path / "run", env)) as stack:
        async with httpx.AsyncClient(base_url=stack.gateway, timeout=HANG_S) as http:
            streams = await begin_streams(http, body("slow", TOKENS, logprobs=True))
            stack.signal(signal.SIGTERM)
            await until_draining(http)
            await check_refused(http, body("slow", 1))
            for reason, last in await asyncio.wait_for(asyncio.gather(*streams), HANG_S):
                assert (reason, last) == ("length", "data: [DONE]")
        assert await asyncio.to_thread(stack.wait) == 0
        assert stack.processes() == []


async def test_a_server_ends_when_the_streams_of_gateways_elsewhere_have(slow_model: Path, tmp_path: Path) -> None:
    """It is not ready any more at once, and refuses what is new so that it can go to another server."""
    env = {"CHARONIA_STREAM_INTERVAL_MS": "0", "CHARONIA_DRAIN_TIMEOUT_S": str(HANG_S)}
    with (
        running(Stack(slow_model, tmp_path / "run", env)) as stack,
        gateway(stack.grpc, tmp_path / "gateway.log") as elsewhere,
    ):
        async with httpx.AsyncClient(base_url=elsewhere.url, timeout=HANG_S) as http:
            streams = await begin_streams(http, body("model", TOKENS, logprobs=True))
            stack.signal(signal.SIGTERM)
            await until_draining(http)
            refused = await http.post("/v1/chat/completions", json={**body("model", 1), "stream": False})
            assert refused.status_code == 503 and int(refused.headers["Retry-After"]) >= 1, refused.text
            for reason, last in await asyncio.wait_for(asyncio.gather(*streams), HANG_S):
                assert (reason, last) == ("length", "data: [DONE]")
        assert await asyncio.to_thread(stack.wait) == 0
        assert stack.processes() == []


async def test_nobody_else_may_unload_a_servers_models(stack: Stack) -> None:
    async with httpx.AsyncClient(base_url=stack.http, timeout=HANG_S) as http:
        for action in ("load", "unload"):
            answer = await http.post(f"/v2/repository/models/ensemble/{action}", json={})
            assert answer.status_code == 403, answer.text
        assert (await http.get("/v2/models/ensemble/ready")).status_code == 200
    async with triton.InferenceServerClient(stack.grpc) as client:
        for call in (client.load_model, client.unload_model):
            with pytest.raises(InferenceServerException, match="restricted"):
                await call("ensemble")
        assert await client.is_model_ready("ensemble")


async def test_the_whole_stack_cancels_what_takes_longer_than_it_may(slow_model: Path, tmp_path: Path) -> None:
    env = {"CHARONIA_STREAM_INTERVAL_MS": "0", "CHARONIA_DRAIN_TIMEOUT_S": "0"}
    with running(Stack(slow_model, tmp_path / "run", env)) as stack:
        async with httpx.AsyncClient(base_url=stack.gateway, timeout=HANG_S) as http:
            streams = await begin_streams(http, body("slow", ENDLESS))
            stack.signal(signal.SIGTERM)
            for reason, last in await asyncio.wait_for(asyncio.gather(*streams), HANG_S):
                assert reason is None
                error = json.loads(last.removeprefix("data: "))["error"]
                assert error["code"] == "service_unavailable" and "shutting down" in error["message"]
        assert await asyncio.to_thread(stack.wait) == 0
        assert "killed" not in stack.log_file.read_text()
