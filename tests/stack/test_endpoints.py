"""Two real servers behind one gateway: one is killed and restarted."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import engine_metrics
import httpx
import pytest
from charonia_gateway.endpoints.choice import weight
from gateway_process import gateway
from stack import HANG_S, SLOW, Stack, running
from streams import gateway_metric, read_stream
from waiting import until

pytestmark = pytest.mark.slow

LONG = 1500


async def until_up(http: httpx.AsyncClient, stack: Stack, up: bool) -> None:
    async def is_so() -> bool:
        return await gateway_metric(http, "endpoint_up", endpoint=stack.grpc) == up

    await until(is_so)


async def test_a_killed_server_loses_the_histories_of_sessions_and_no_response(
    slow: Stack, slow_model: Path, tmp_path: Path
) -> None:
    with (
        running(Stack(slow_model, tmp_path / "run", SLOW)) as one,
        gateway(
            "127.0.0.1:1",
            tmp_path / "gateway.log",
            CHARONIA_TRITON_ENDPOINTS=f"{one.grpc},{slow.grpc}",
            CHARONIA_ENDPOINT_CHECK_INTERVAL_S="0.1",
            CHARONIA_ENDPOINT_CHECK_TIMEOUT_S=str(HANG_S),
        ) as own,
    ):
        # Sessions whose history is on that server.
        sessions = (id for at in range(1000) if weight(id := f"s{at}", one.grpc) > weight(id, slow.grpc))
        async with httpx.AsyncClient(base_url=own.url, timeout=HANG_S) as http:

            async def turn(session_id: str, **fields: Any) -> httpx.Response:
                body = {"prompt": "Hello", "session_id": session_id, "interactive_mode": True, "request_output_len": 2}
                return await http.post("/v1/chat/interactive", json={**body, **fields})

            def body(tokens: int) -> dict[str, Any]:
                asked = {"model": "model", "messages": "Hello", "ignore_eos": True, "max_tokens": tokens}
                return {**asked, "session_id": next(sessions)}

            begun = asyncio.Event()

            await until_up(http, one, True)
            await until_up(http, slow, True)
            kept = next(sessions)
            for has_history in (False, True):
                assert ((await turn(kept)).json()["history_tokens"] > 0) is has_history
            streamed = {**body(LONG), "stream": True, "stream_options": {"include_usage": True}}
            reads = asyncio.create_task(read_stream(http, streamed, begun))
            await asyncio.wait_for(begun.wait(), HANG_S)
            waits = asyncio.create_task(http.post("/v1/chat/completions", json=body(LONG)))
            await engine_metrics.until(one.metrics, lambda now: now.running == 2, "both run there")
            os.kill(one.pid_of("tritonserver"), signal.SIGKILL)
            assert (await asyncio.wait_for(reads, HANG_S)).tokens == LONG
            whole = await asyncio.wait_for(waits, HANG_S)
            assert whole.json()["usage"]["completion_tokens"] == LONG
            assert await gateway_metric(http, "resumes_total") == 2
            await until_up(http, one, False)
            lost = await turn(kept)
            assert (lost.status_code, lost.json()["error"]["code"]) == (410, "session_lost")
            for has_history in (False, True):
                assert ((await turn(kept)).json()["history_tokens"] > 0) is has_history
            await asyncio.to_thread(one.stop)
            await asyncio.to_thread(one.start)
            await until_up(http, one, True)
            assert (await turn(next(sessions))).status_code == 200
            assert (await engine_metrics.read(one.metrics)).generated_tokens >= 2, "it gets requests again"
            assert (await turn(kept)).json()["history_tokens"] > 0, "this session stays where it is"
