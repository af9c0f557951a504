"""Clients that disconnect: their requests are cancelled, and nothing stays in the engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import engine_metrics
import httpx
import pytest
from charonia_client import Client, GenerateRequest
from stack import HANG_S, Stack
from waiting import until

LONG = {"ignore_eos": True, "max_tokens": 3000}
PROMPT = "Tell me everything"
# Far below the length of the response, so that the cancel request arrives before its end, even on a busy machine. The
# engine's cancel_to_free_seconds measures the delay.
FEW_TOKENS = LONG["max_tokens"] // 2
# This number of 200 clients disconnect after a token: the engine must cancel their requests.
IN_ENGINE = 40


@pytest.fixture
async def client(slow: Stack) -> AsyncIterator[Client]:
    async with Client(slow.grpc) as client:
        yield client
        await client.close(HANG_S)  # requests of one test must end before the next test counts


@pytest.fixture
async def http(slow: Stack) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=slow.gateway, timeout=HANG_S, limits=limits) as http:
        yield http


def request(**fields: Any) -> GenerateRequest:
    return GenerateRequest(messages=[{"role": "user", "content": PROMPT}], **{**LONG, **fields})


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "slow", "messages": PROMPT, **LONG, **fields}


async def cancelled(slow: Stack, before: engine_metrics.EngineMetrics, requests: int) -> engine_metrics.EngineMetrics:
    """The metrics when the engine has cancelled this number of requests and is idle. A request may reach it after its
    client has disconnected."""
    await engine_metrics.until(
        slow.metrics, lambda metrics: metrics.cancelled - before.cancelled >= requests, f"{requests} cancelled"
    )
    return await engine_metrics.idle(slow.metrics)


async def stopped_early(slow: Stack, before: engine_metrics.EngineMetrics, requests: int) -> None:
    """The engine has cancelled exactly this number of requests, and did so early."""
    after = await cancelled(slow, before, requests)
    assert after.cancelled - before.cancelled == requests
    assert after.generated_tokens - before.generated_tokens < FEW_TOKENS * requests


async def running(slow: Stack, requests: int) -> None:
    """Return when this number of requests run in the engine."""
    await engine_metrics.until(slow.metrics, lambda metrics: metrics.running >= requests, f"{requests} running")


async def test_dropping_iterator_stops_request(slow: Stack, client: Client) -> None:
    before = await engine_metrics.idle(slow.metrics)
    async for _ in client.generate(request()):
        break
    await stopped_early(slow, before, 1)


def test_ending_event_loop_stops_its_requests(slow: Stack) -> None:
    """`asyncio.run` with a main function that fails: all tasks are cancelled, and the client is not closed."""

    async def abandon() -> None:
        client = Client(slow.grpc)
        parts = client.generate(request())
        await anext(parts)
        waiting = None
        while waiting is None or waiting.done():  # a part that has already arrived needs no wait
            waiting = asyncio.ensure_future(anext(parts))
            await asyncio.sleep(0)
        raise KeyError("the caller's own trouble")

    before = asyncio.run(engine_metrics.idle(slow.metrics))
    with pytest.raises(KeyError):
        asyncio.run(abandon())
    asyncio.run(stopped_early(slow, before, 1))


async def test_http_client_that_leaves_unstreamed_request_stops_it(slow: Stack, http: httpx.AsyncClient) -> None:
    before = await engine_metrics.idle(slow.metrics)
    task = asyncio.create_task(http.post("/v1/chat/completions", json=body()))
    await running(slow, 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await stopped_early(slow, before, 1)


async def test_engine_is_idle_after_200_http_clients_leave(slow: Stack, http: httpx.AsyncClient) -> None:
    before = await engine_metrics.idle(slow.metrics)

    async def read(*, one_token: bool) -> None:
        async with http.stream("POST", "/v1/chat/completions", json=body(stream=True)) as answer:
            async for line in answer.aiter_lines():
                if one_token and line.startswith("data: {"):
                    choices = json.loads(line.removeprefix("data: "))["choices"]
                    if any(choice["delta"].get("content") for choice in choices):
                        return
        assert not one_token, "the stream ended without a token"

    async def leave_after(seconds: float) -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(read(one_token=False), seconds)

    await asyncio.gather(
        *(leave_after(0.01 * number) for number in range(200 - IN_ENGINE)),
        *(read(one_token=True) for _ in range(IN_ENGINE)),
    )
    # The number of other requests that reach the engine depends on the machine.
    after = await cancelled(slow, before, IN_ENGINE)
    assert after.cancelled - before.cancelled <= 200

    async def nothing_runs() -> bool:
        return "charonia_gateway_requests_running 0.0" in (await http.get("/metrics")).text

    await until(nothing_runs)
    answer = await http.post("/v1/chat/completions", json=body(max_tokens=5))
    assert answer.json()["usage"]["completion_tokens"] == 5
