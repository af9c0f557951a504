"""The gateway's subscription and its requests when clients disconnect or the gateway dies."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import engine_metrics
import httpx
import psutil
from gateway_process import gateway
from stack import ENDLESS, HANG_S, Stack, answers
from streams import Streamed, read_stream
from waiting import until
from worker_client import client_of

CHAT = [{"role": "user", "content": "Name five colours and describe each."}]


LONG: dict[str, Any] = {"model": "model", "ignore_eos": True, "max_tokens": ENDLESS, "stream": True, "messages": CHAT}


async def test_killed_worker_ends_only_its_streams(slow: Stack, tmp_path: Path) -> None:
    settings = {"CHARONIA_GATEWAY_WORKERS": "2", "CHARONIA_GATEWAY_MAX_RESPONSES": "0"}
    # The gateways of earlier tests may still leave. A gateway subscribes when it starts.
    await engine_metrics.until(slow.metrics, lambda now: now.subscriptions == 1, "the stack's own gateway alone")
    before = await engine_metrics.idle(slow.metrics)
    with gateway(slow.grpc, tmp_path / "gateway.log", **settings) as own:
        await until(lambda: asyncio.to_thread(answers, f"{own.url}/health/ready"))
        supervisor = psutil.Process(own.process.pid)
        dies, lives = (child.pid for child in supervisor.children())
        async with AsyncExitStack() as opened:
            webs = [await opened.enter_async_context(client_of(own.url, pid)) for pid in [dies] * 4 + [lives] * 4]
            begun = [asyncio.Event() for _ in webs]

            def read(number: int, max_tokens: int) -> asyncio.Task[Streamed]:
                asked = {**LONG, "max_tokens": max_tokens, "seed": 1, "stream_options": {"include_usage": True}}
                return asyncio.create_task(read_stream(webs[number], asked, begun[number]))

            lost = [read(number, ENDLESS) for number in range(4)]
            kept = [read(number, 400) for number in range(4, 8)]
            await asyncio.wait_for(asyncio.gather(*(one.wait() for one in begun)), HANG_S)
            assert (await engine_metrics.read(slow.metrics)).subscriptions == before.subscriptions + 2
            os.kill(dies, signal.SIGKILL)
            for error in await asyncio.gather(*lost, return_exceptions=True):
                assert isinstance(error, httpx.TransportError)
            await engine_metrics.until(
                slow.metrics,
                lambda now: (now.subscriptions, now.cancelled) == (before.subscriptions + 1, before.cancelled + 4),
                "its requests have ended, and its subscription",
            )
            first, *others = await asyncio.gather(*kept)
            assert (first.tokens, first.last) == (400, "data: [DONE]") and others == [first] * 3

        async def new() -> int | None:
            return next((child.pid for child in supervisor.children() if child.pid not in (dies, lives)), None)

        await until(new)
        async with client_of(own.url, await new() or 0) as web:
            asked = {**LONG, "max_tokens": 2, "stream": False}
            (await web.post("/v1/chat/completions", json=asked)).raise_for_status()
        assert (await engine_metrics.read(slow.metrics)).subscriptions == before.subscriptions + 2
        assert (await engine_metrics.idle(slow.metrics)).cancelled == before.cancelled + 4
