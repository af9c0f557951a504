"""SIGTERM during responses: new requests are rejected, running requests end normally, then the process ends. Requests
that take longer than the drain timeout are cancelled."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import engine_metrics
import httpx
from charonia_gateway.endpoints.choice import weight
from gateway_process import gateway
from stack import ENDLESS, HANG_S, SLOW, Stack, running
from streams import Streamed, gateway_metric, read_stream
from waiting import until

USER: list[Any] = [{"role": "user", "content": "Hello"}]
STREAMS = 4
TOKENS = 600  # tokens of a stream that ends by itself after at least six seconds


def body(model: str, tokens: int, **fields: Any) -> dict[str, Any]:
    return {"model": model, "messages": USER, "ignore_eos": True, "max_tokens": tokens, "stream": True, **fields}


async def begin_streams(http: httpx.AsyncClient, asked: dict[str, Any]) -> list[asyncio.Task[Streamed]]:
    begun = [asyncio.Event() for _ in range(STREAMS)]
    tasks = [asyncio.create_task(read_stream(http, asked, event)) for event in begun]
    await asyncio.wait_for(asyncio.gather(*(event.wait() for event in begun)), HANG_S)
    return tasks


@asynccontextmanager
async def held(http: httpx.AsyncClient, asked: dict[str, Any]) -> AsyncIterator[None]:
    """Reads a stream until the block ends. Its gateway drains at least as long."""
    begun = asyncio.Event()
    stream = asyncio.create_task(read_stream(http, asked, begun))
    await asyncio.wait_for(begun.wait(), HANG_S)
    yield
    assert not stream.done()
    stream.cancel()
    await asyncio.gather(stream, return_exceptions=True)


async def until_draining(http: httpx.AsyncClient) -> None:
    """Return when the readiness check reports the shutdown."""

    async def draining() -> bool:
        return (await http.get("/health/ready")).status_code == 503

    await until(draining)


async def check_refused(http: httpx.AsyncClient, asked: dict[str, Any]) -> None:
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/chat/interactive"):
        answer = await http.post(path, json=asked)
        assert answer.status_code == 503, answer.text
        assert int(answer.headers["Retry-After"]) >= 1
        assert answer.json()["error"]["code"] == "service_unavailable"
    assert (await http.get("/health/live")).status_code == 200


async def test_shutdown_waits_for_streams_of_remote_gateways(slow: Stack, slow_model: Path, tmp_path: Path) -> None:
    """The gateway and the server are no longer ready and reject new requests, so that clients can try another server.
    Running responses are completed, streamed or not. A turn does not continue at another server, which does not have
    its history. Requests of clients that disconnect are cancelled."""
    workers = {"CHARONIA_GATEWAY_WORKERS": "2", "CHARONIA_GATEWAY_MAX_RESPONSES": "0"}
    env = {**SLOW, "CHARONIA_DRAIN_TIMEOUT_S": str(HANG_S), **workers}
    with (
        running(Stack(slow_model, tmp_path / "run", env)) as stack,
        gateway(stack.grpc, tmp_path / "gateway.log") as elsewhere,
        gateway(
            "127.0.0.1:1",
            tmp_path / "two.log",
            CHARONIA_TRITON_ENDPOINTS=f"{stack.grpc},{slow.grpc}",
            CHARONIA_ENDPOINT_CHECK_INTERVAL_S="0.1",
            CHARONIA_ENDPOINT_CHECK_TIMEOUT_S=str(HANG_S),
        ) as two,
    ):
        sessions = (id for at in range(1000) if weight(id := f"s{at}", stack.grpc) > weight(id, slow.grpc))
        async with (
            httpx.AsyncClient(base_url=stack.gateway, timeout=HANG_S) as its_own,
            httpx.AsyncClient(base_url=elsewhere.url, timeout=HANG_S) as http,
            httpx.AsyncClient(base_url=two.url, timeout=HANG_S) as of_two,
        ):

            async def turn(session_id: str, **fields: Any) -> httpx.Response:
                asked = {"prompt": "Hello", "session_id": session_id, "interactive_mode": True, **fields}
                return await of_two.post("/v1/chat/interactive", json={"request_output_len": 2, **asked})

            kept, long = next(sessions), next(sessions)
            for begun in (False, True):
                answer = await turn(kept)
                assert answer.status_code == 200, answer.text
                assert (answer.json()["history_tokens"] > 0) is begun
            whole = asyncio.create_task(turn(long, request_output_len=TOKENS))
            await engine_metrics.until(stack.metrics, lambda now: now.running == 1 or whole.done(), "it runs there")
            begun_streams = await asyncio.gather(
                begin_streams(http, body("model", TOKENS, logprobs=True)),
                begin_streams(its_own, body("slow", TOKENS, logprobs=True)),
            )
            streams = [stream for some in begun_streams for stream in some]

            async def lost_turn() -> httpx.Response | None:
                """A turn after the gateway noticed that the session's server drains; until then it is 503."""
                return None if (answer := await turn(kept)).status_code == 503 else answer

            async with held(http, body("model", ENDLESS)):  # the server does not end before
                async with held(http, body("model", ENDLESS)):
                    async with held(its_own, body("slow", ENDLESS)):
                        stack.signal(signal.SIGTERM)
                        await until_draining(its_own)
                        await check_refused(its_own, body("slow", 1))
                    await until_draining(http)
                    refused = await http.post("/v1/chat/completions", json={**body("model", 1), "stream": False})
                    assert refused.status_code == 503 and int(refused.headers["Retry-After"]) >= 1, refused.text
                    cancelled = (await engine_metrics.read(stack.metrics)).cancelled
                await engine_metrics.until(
                    stack.metrics, lambda now: now.cancelled > cancelled, "it is cancelled there"
                )
                lost = await until(lost_turn)
                assert (lost.status_code, lost.json()["error"]["code"]) == (410, "session_lost"), lost.text
                assert (await turn(kept)).json()["history_tokens"] == 0, "the next turn begins a new history"
                retried = await gateway_metric(of_two, "retries_total")
            for ended in await asyncio.wait_for(asyncio.gather(*streams), HANG_S):
                assert (ended.reason, ended.last) == ("length", "data: [DONE]")
            last = (await asyncio.wait_for(whole, HANG_S)).json()
            assert (last["finish_reason"], last["tokens"]) == ("length", TOKENS)
            assert await gateway_metric(of_two, "retries_total") == retried, (
                "the whole answer was not begun again elsewhere"
            )
        assert await asyncio.to_thread(stack.wait) == 0
        assert stack.processes() == []


async def test_shutdown_cancels_requests_after_drain_timeout(slow_model: Path, tmp_path: Path) -> None:
    """Requests of the stack's gateway and of a remote gateway: the engine ends the remote requests before Triton
    ends."""
    env = {**SLOW, "CHARONIA_DRAIN_TIMEOUT_S": "0"}
    with (
        running(Stack(slow_model, tmp_path / "run", env)) as stack,
        gateway(stack.grpc, tmp_path / "gateway.log", CHARONIA_GATEWAY_RESUME_TIMEOUT_S="0") as elsewhere,
    ):
        async with (
            httpx.AsyncClient(base_url=stack.gateway, timeout=HANG_S) as own,
            httpx.AsyncClient(base_url=elsewhere.url, timeout=HANG_S) as other,
        ):
            streams = await begin_streams(own, body("slow", ENDLESS))
            others = await begin_streams(other, body("model", ENDLESS))
            whole = asyncio.create_task(
                other.post("/v1/chat/completions", json={**body("model", ENDLESS), "stream": False})
            )
            await engine_metrics.until(stack.metrics, lambda now: now.running == 2 * STREAMS + 1, "all of it runs")
            stack.signal(signal.SIGTERM)
            for tasks, says in ((streams, "shutting down"), (others, "the request was ended after")):
                for cancelled in await asyncio.wait_for(asyncio.gather(*tasks), HANG_S):
                    assert cancelled.reason is None
                    error = json.loads(cancelled.last.removeprefix("data: "))["error"]
                    assert error["code"] == "service_unavailable" and says in error["message"]
            answer = await asyncio.wait_for(whole, HANG_S)
            assert answer.status_code == 503 and "the request was ended after" in answer.text
        assert await asyncio.to_thread(stack.wait) == 0
