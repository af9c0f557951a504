"""Requests that take too long or are too many: they fail with a status, and with the time for a retry."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import engine_metrics
import httpx
import openai
import pytest
from charonia_client import Client, GenerateRequest, Overloaded
from stack import ENDLESS, HANG_S, SLOW, Stack, running

USER: list[Any] = [{"role": "user", "content": "Hello"}]
TAKER = "taker"
LONG: dict[str, Any] = {"messages": USER, "ignore_eos": True, "max_tokens": ENDLESS}


@contextlib.contextmanager
def narrow(model: Path, folder: Path, **env: str) -> Iterator[Stack]:
    """The slow model with one running request at a time."""
    always = {**SLOW, "CHARONIA_MAX_BATCH_SIZE": "1"}
    with running(Stack(model, folder, {**always, **env})) as served:
        yield served


@pytest.fixture(scope="module")
def few_tokens(slow_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A stack whose queue holds 200 tokens."""
    with narrow(slow_model, tmp_path_factory.mktemp("few_tokens"), CHARONIA_MAX_QUEUE_TOKENS="200") as served:
        yield served


@pytest.fixture(scope="module")
def impatient(slow_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A request may wait for one second."""
    with narrow(slow_model, tmp_path_factory.mktemp("impatient"), CHARONIA_MAX_QUEUE_TIME_S="1") as served:
        yield served


@contextlib.asynccontextmanager
async def busy(stack: Stack) -> AsyncIterator[Client]:
    """The request TAKER takes the only place."""
    async with Client(stack.grpc) as client:

        async def take() -> None:
            while True:
                with contextlib.suppress(Overloaded):  # the machine was too busy to start it in time
                    await client.complete(GenerateRequest(**LONG, stream=False), request_id=TAKER)
                    return

        taken = asyncio.create_task(take())
        await engine_metrics.until(stack.metrics, lambda metrics: metrics.running == 1, "it runs")
        yield client
        taken.cancel()
        await asyncio.gather(taken, return_exceptions=True)
        await client.close(HANG_S)
    await engine_metrics.idle(stack.metrics)


@pytest.mark.parametrize("way", ["triton", "gateway"])
async def test_higher_priority_begins_first(few_tokens: Stack, way: str) -> None:
    """Two requests wait, and the later one starts first."""
    queue_ms: dict[int, float] = {}

    async def ask(client: Client, api: openai.AsyncOpenAI, priority: int) -> None:
        if way == "triton":
            asked = GenerateRequest(text="x", max_tokens=100, ignore_eos=True, priority=priority, stream=False)
            timings = (await client.complete(asked)).timings
            assert timings is not None
            queue_ms[priority] = timings.queue_ms
        else:
            extra = {"priority": priority, "timings": True, "ignore_eos": True}
            answer = await api.completions.create(model="slow", prompt="x", max_tokens=100, extra_body=extra)
            queue_ms[priority] = (answer.model_extra or {})["timings"]["queue_ms"]

    async with (
        openai.AsyncOpenAI(base_url=f"{few_tokens.gateway}/v1", api_key="x", max_retries=0) as api,
        busy(few_tokens) as client,
    ):
        low = asyncio.create_task(ask(client, api, -1))
        await engine_metrics.until(few_tokens.metrics, lambda now: now.waiting == 1, "one waits")
        high = asyncio.create_task(ask(client, api, 1))
        await engine_metrics.until(few_tokens.metrics, lambda now: now.waiting == 2, "both wait")
        await client.stop(TAKER)
        await asyncio.gather(low, high)
    assert queue_ms[1] < queue_ms[-1]


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "slow", **LONG, **fields}


async def test_too_many_waiting_tokens_are_429(few_tokens: Stack) -> None:
    async with busy(few_tokens) as client:
        prompt = "x" * 150
        first = asyncio.create_task(client.complete(GenerateRequest(text=prompt, max_tokens=2, stream=False)))
        await engine_metrics.until(few_tokens.metrics, lambda metrics: metrics.waiting == 1, "it waits")
        with pytest.raises(Overloaded) as refused:
            await client.complete(GenerateRequest(text=prompt, max_tokens=2, stream=False))
        assert refused.value.retry_after >= 1
        async with openai.AsyncOpenAI(base_url=f"{few_tokens.gateway}/v1", api_key="x", max_retries=0) as api:
            with pytest.raises(openai.RateLimitError) as told:
                await api.completions.create(model="slow", prompt=prompt, max_tokens=2)
        assert int(told.value.response.headers["Retry-After"]) >= 1
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)


async def test_clients_take_turns_in_the_queue(few_tokens: Stack) -> None:
    """A request is admitted before the later sequences of another client's request."""

    async def ask(address: str, **fields: Any) -> None:
        transport = httpx.AsyncHTTPTransport(local_address=address)
        async with httpx.AsyncClient(base_url=few_tokens.gateway, timeout=HANG_S, transport=transport) as http:
            asked = {"model": "slow", "prompt": "x", "max_tokens": 8, "ignore_eos": True, **fields}
            answer = await http.post("/v1/completions", json=asked)
            assert answer.status_code == 200, answer.text

    async with busy(few_tokens) as client:
        many = asyncio.create_task(ask("127.0.0.1", n=128))
        await engine_metrics.until(few_tokens.metrics, lambda metrics: metrics.waiting == 1, "it waits")
        one = asyncio.create_task(ask("127.0.0.2"))
        await engine_metrics.until(few_tokens.metrics, lambda metrics: metrics.waiting == 2, "both wait")
        await client.stop(TAKER)
        ended, _ = await asyncio.wait((many, one), return_when=asyncio.FIRST_COMPLETED)
        many.cancel()
        await asyncio.gather(many, return_exceptions=True)
        assert ended == {one}
        one.result()


@pytest.mark.parametrize("stream", [False, True])
async def test_too_long_wait_is_429(impatient: Stack, stream: bool) -> None:
    async with busy(impatient), httpx.AsyncClient(base_url=impatient.gateway, timeout=HANG_S) as http:
        answer = await http.post("/v1/chat/completions", json=body(stream=stream))
    assert answer.status_code == 429, answer.text
    assert int(answer.headers["Retry-After"]) >= 1
    assert answer.json()["error"]["code"] == "overloaded"


async def test_deadline_in_queue_is_504(few_tokens: Stack) -> None:
    async with busy(few_tokens), httpx.AsyncClient(base_url=few_tokens.gateway, timeout=HANG_S) as http:
        answer = await http.post("/v1/chat/completions", json=body(timeout=0.2))
    assert answer.status_code == 504, answer.text
    assert answer.json()["error"]["code"] == "deadline_exceeded"


async def test_deadline_ends_response_with_504_and_frees_blocks(slow: Stack) -> None:
    async with httpx.AsyncClient(base_url=slow.gateway, timeout=HANG_S) as http:
        whole = await http.post("/v1/chat/completions", json=body(timeout=1))
        assert whole.status_code == 504, whole.text
        for timeout in (1, 4, 16):  # repeated until it has begun before its deadline, on a machine of any speed
            streamed = await http.post("/v1/chat/completions", json=body(timeout=timeout, stream=True))
            if streamed.status_code == 200:
                break
        last = streamed.text.split("\n\n")[-2]
        assert last.startswith("event: error\ndata: ")
        assert json.loads(last.removeprefix("event: error\ndata: "))["error"]["code"] == "deadline_exceeded"
    await engine_metrics.idle(slow.metrics)
