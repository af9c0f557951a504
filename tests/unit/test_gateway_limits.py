"""Limits of API keys over HTTP: requests, tokens and concurrent requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from gateway_in_process import MODEL, gateway, listening
from key_files import KeyFile
from triton_double import error, input_text, part, says
from tritonclient.grpc import service_pb2 as pb
from waiting import until

ROOT = Path(__file__).resolve().parents[2]

CHAT: dict[str, Any] = {"model": MODEL, "messages": "hi"}
MESSAGES: dict[str, Any] = {"model": MODEL, "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}
Parts = AsyncIterator[Any]
HANG_S = 120


@pytest.fixture
def file(tmp_path: Path) -> KeyFile:
    return KeyFile(tmp_path / "keys.json", alice={"access": ("inference", "metrics")})


async def test_requests_beyond_the_limit_are_429_and_say_when_to_come_again(file: KeyFile) -> None:
    file.add("two", requests_per_minute=2)
    async with gateway(keys_file=file.path) as (web, server):
        answers = [await web.post("/v1/chat/completions", json=CHAT, headers=file.bearer("two")) for _ in range(3)]
        assert (await web.get("/v1/models", headers=file.bearer("two"))).status_code == 200, "only work is counted"
        other = await web.post("/v1/chat/completions", json=CHAT, headers=file.bearer("alice"))
        assert other.status_code == 200 and "x-ratelimit-limit-requests" not in other.headers
        assert len(server.requests) == 3
        scraped = (await web.get("/metrics", headers=file.bearer("alice"))).text
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert [answer.headers["x-ratelimit-remaining-requests"] for answer in answers] == ["1", "0", "0"]
    assert {answer.headers["x-ratelimit-limit-requests"] for answer in answers} == {"2"}
    resets = [int(answer.headers["x-ratelimit-reset-requests"].removesuffix("s")) for answer in answers]
    assert all(0 < seconds <= 60 for seconds in (*resets, int(answers[2].headers["retry-after"])))
    assert answers[2].json()["error"]["code"] == "rate_limit_exceeded"
    assert 'charonia_gateway_key_limited_total{key="two",limit="requests"} 1.0' in scraped


tell = says(part("x", "stop"))  # A response with 5 prompt tokens and 1 output token.


break_off = says(part("x"), error("[503] the engine ends"))


stop = says(part("x", "cancelled"))  # A response that the session's client stops with another request.


tell_of_the_second = says(part("x", index=1), error("[503] the engine ends"))


refuse = says(error("[400] top_k: wrong"))


@pytest.mark.parametrize(
    ("path", "body", "behaviour", "tokens"),
    [
        ("/v1/chat/completions", CHAT, tell, 6),
        ("/v1/chat/completions", {**CHAT, "stream": True}, tell, 6),
        ("/v1/completions", {"model": MODEL, "prompt": ["a", "b"]}, tell, 12),
        ("/v1/messages", {**MESSAGES, "stream": True}, tell, 6),
        ("/v1/responses", {"model": MODEL, "input": "hi"}, tell, 6),
        ("/v1/chat/interactive", {"prompt": "hi"}, tell, 6),
        ("/v1/chat/completions", {**CHAT, "stream": True}, break_off, 6),
        ("/v1/chat/completions", CHAT, stop, 6),
        ("/v1/chat/completions", {**CHAT, "stream": True}, stop, 6),
        ("/v1/messages", MESSAGES, stop, 6),
        ("/v1/responses", {"model": MODEL, "input": "hi"}, stop, 6),
        ("/v1/chat/completions", {**CHAT, "stream": True, "n": 2}, tell_of_the_second, 6),
        ("/v1/chat/completions", CHAT, refuse, 0),
        ("/tokenize", {"prompt": "hi"}, tell, 0),
    ],
)
async def test_tokens_are_charged_as_the_engine_counts_them(
    file: KeyFile, path: str, body: dict[str, Any], behaviour: Any, tokens: int
) -> None:
    file.add("rich", tokens_per_minute=100)
    async with gateway(keys_file=file.path) as (web, server):
        server.behaviour = behaviour
        await web.post(path, json=body, headers=file.bearer("rich"))
        after = await web.post("/tokenize", json={"prompt": "hi"}, headers=file.bearer("rich"))
        scraped = (await web.get("/metrics", headers=file.bearer("alice"))).text
    assert after.headers["x-ratelimit-remaining-tokens"] == str(100 - tokens)
    prompt = f'charonia_gateway_key_tokens_total{{key="rich",kind="prompt"}} {tokens * 5 / 6}'
    assert (prompt in scraped) == bool(tokens)


async def test_inputs_that_ended_are_charged_though_another_fails(file: KeyFile) -> None:
    file.add("rich", tokens_per_minute=100)
    ended = asyncio.Event()

    async def fail_second(request: pb.ModelInferRequest) -> Parts:
        if input_text(request, "text_input") == "b":
            await ended.wait()
            yield error("[500] it failed")
            return
        chunk = part("", "stop")
        chunk.num_output_tokens = 0
        chunk.pooled.append(1)
        yield chunk
        ended.set()

    async with gateway(keys_file=file.path) as (web, server):
        server.behaviour = fail_second
        body = {"model": MODEL, "input": ["a", "b"]}
        failed = await web.post("/v1/embeddings", json=body, headers=file.bearer("rich"))
        after = await web.post("/tokenize", json={"prompt": "hi"}, headers=file.bearer("rich"))
    assert (failed.status_code, after.headers["x-ratelimit-remaining-tokens"]) == (500, "95")


async def test_a_request_that_outruns_the_budget_ends_and_the_next_waits(file: KeyFile) -> None:
    file.add("poor", tokens_per_minute=7)
    headers = {"x-api-key": file.texts["poor"]}
    async with gateway(keys_file=file.path) as (web, _):
        answers = [await web.post("/v1/messages", json=MESSAGES, headers=headers) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert [answer.headers["x-ratelimit-remaining-tokens"] for answer in answers] == ["7", "1", "0"]
    assert answers[2].json()["error"]["type"] == "rate_limit_error"


@pytest.mark.parametrize(("stream", "charged"), [(True, 6), (False, 11)])
async def test_a_client_that_leaves_is_charged(file: KeyFile, stream: bool, charged: int) -> None:
    """Tokens reported by the engine count. Without a report, the prompt is estimated at four characters per token."""
    file.add("hasty", tokens_per_minute=100)
    begun = asyncio.Event()

    async def goes_on(request: pb.ModelInferRequest) -> Parts:
        if stream:
            yield part("x")
        begun.set()
        await asyncio.Event().wait()

    body = {**CHAT, "messages": "x" * 40, "stream": stream}
    async with gateway(keys_file=file.path) as (web, server), listening(web._transport.app) as address:  # type: ignore[attr-defined]
        server.behaviour = goes_on
        url = "http://{}:{}/v1/chat/completions".format(*address)
        async with httpx.AsyncClient(headers=file.bearer("hasty"), timeout=HANG_S) as leaving:
            if stream:
                async with leaving.stream("POST", url, json=body) as answer:
                    await anext(answer.aiter_bytes())
            else:
                asked = asyncio.create_task(leaving.post(url, json=body))
                await begun.wait()
                asked.cancel()
                await asyncio.gather(asked, return_exceptions=True)

        async def is_charged() -> bool:
            after = await web.post("/tokenize", json={"prompt": "hi"}, headers=file.bearer("hasty"))
            return after.headers["x-ratelimit-remaining-tokens"] == str(100 - charged)

        await until(is_charged)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_key_may_send_its_next_request_at_the_end_of_a_response(file: KeyFile, stream: bool) -> None:
    file.add("one", max_concurrent=1)
    following: list[asyncio.Task[httpx.Response]] = []
    async with gateway(keys_file=file.path) as (web, server):
        server.behaviour = tell
        app = web._transport.app  # type: ignore[attr-defined]

        async def ask_next_at_the_end(scope: Any, receive: Any, send: Any) -> None:
            async def watched(message: Any) -> None:
                body = message.get("body", b"")
                ends = b"[DONE]" in body if stream else body.endswith(b"}")
                await send(message)
                if ends and not following:
                    again = web.post("/v1/chat/completions", json=CHAT, headers=file.bearer("one"))
                    following.append(asyncio.create_task(again))

            await app(scope, receive, watched)

        transport = httpx.ASGITransport(ask_next_at_the_end)
        async with httpx.AsyncClient(transport=transport, base_url="http://g") as first:
            sent = {**CHAT, "stream": stream}
            answer = await first.post("/v1/chat/completions", json=sent, headers=file.bearer("one"))
        assert (answer.status_code, (await following[0]).status_code) == (200, 200)


async def test_key_has_at_most_max_concurrent_requests(file: KeyFile) -> None:
    file.add("one", max_concurrent=1)
    begun, go = asyncio.Event(), asyncio.Event()

    async def waits(request: pb.ModelInferRequest) -> Parts:
        begun.set()
        await go.wait()
        yield part("x", "stop")

    async with gateway(keys_file=file.path) as (web, server):
        server.behaviour = waits
        first = asyncio.create_task(web.post("/v1/chat/completions", json=CHAT, headers=file.bearer("one")))
        await begun.wait()
        second = await web.post("/v1/chat/completions", json=CHAT, headers=file.bearer("one"))
        go.set()
        assert (await first).status_code == 200
        third = await web.post("/v1/chat/completions", json=CHAT, headers=file.bearer("one"))
        several = await web.post("/v1/chat/completions", json={**CHAT, "n": 2}, headers=file.bearer("one"))
        assert (several.status_code, several.json()["error"]["param"]) == (400, "n")
        fourth = await web.post("/v1/chat/completions", json=CHAT, headers=file.bearer("one"))
    assert (second.status_code, second.headers["retry-after"]) == (429, "1")
    assert (third.status_code, fourth.status_code) == (200, 200)


async def test_inputs_of_embeddings_run_as_many_at_once_as_the_key_allows(file: KeyFile) -> None:
    file.add("two", max_concurrent=2)
    begun, go, running, most = asyncio.Event(), asyncio.Event(), 0, 0

    async def waits(request: pb.ModelInferRequest) -> Parts:
        nonlocal running, most
        running += 1
        most = max(most, running)
        if running == 2:
            begun.set()
        await go.wait()
        running -= 1
        chunk = part("", "stop")
        chunk.pooled.append(1)
        yield chunk

    body = {"model": MODEL, "input": ["a"] * 5}
    async with gateway(keys_file=file.path) as (web, server):
        server.behaviour = waits
        first = asyncio.create_task(web.post("/v1/embeddings", json=body, headers=file.bearer("two")))
        await begun.wait()
        second = await web.post("/v1/embeddings", json={**body, "input": "a"}, headers=file.bearer("two"))
        go.set()
        assert len((await first).json()["data"]) == 5
    assert (second.status_code, most) == (429, 2)


async def test_a_request_whose_client_left_counts_until_the_server_has_ended_it(file: KeyFile) -> None:
    file.add("one", max_concurrent=1)
    async with gateway(keys_file=file.path) as (web, server), listening(web._transport.app) as address:  # type: ignore[attr-defined]

        async def ask() -> int:
            return (await web.post("/v1/chat/completions", json=CHAT, headers=file.bearer("one"))).status_code

        server.takes.clear()  # preprocessing is busy
        async with httpx.AsyncClient(headers=file.bearer("one"), timeout=HANG_S) as leaving:
            url = "http://{}:{}/v1/chat/completions".format(*address)
            asked = asyncio.create_task(leaving.post(url, json=CHAT))
            await until(lambda: server.requests)
            asked.cancel()
        await until(lambda: server.actions)
        await asyncio.sleep(0)
        assert await ask() == 429
        server.takes.set()

        async def is_free() -> bool:
            return await ask() == 200

        await until(is_free)


async def test_openais_and_anthropics_clients_know_the_errors(file: KeyFile) -> None:
    file.add("once", requests_per_minute=1)
    file.add("elsewhere", models=("another-model",))

    async with gateway(keys_file=file.path) as (web, _), listening(web._transport.app) as address:  # type: ignore[attr-defined]
        url = "http://{}:{}".format(*address)

        async def ask_openai(key: str) -> Any:
            async with openai.AsyncOpenAI(api_key=key, base_url=f"{url}/v1", max_retries=0) as client:
                return await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hi"}])

        async def ask_anthropic(key: str) -> Any:
            async with anthropic.AsyncAnthropic(api_key=key, base_url=url, max_retries=0) as client:
                return await client.messages.create(**MESSAGES)

        with pytest.raises(openai.AuthenticationError) as wrong:
            await ask_openai("sk-wrong")
        assert wrong.value.code == "invalid_api_key"
        with pytest.raises(openai.PermissionDeniedError) as denied:
            await ask_openai(file.texts["elsewhere"])
        assert denied.value.code == "model_not_allowed" and denied.value.param == "model"
        assert (await ask_openai(file.texts["once"])).choices[0].message.content
        with pytest.raises(openai.RateLimitError) as limited:
            await ask_openai(file.texts["once"])
        assert limited.value.code == "rate_limit_exceeded" and int(limited.value.response.headers["retry-after"]) > 0
        with pytest.raises(anthropic.AuthenticationError):
            await ask_anthropic("wrong")
        with pytest.raises(anthropic.PermissionDeniedError):
            await ask_anthropic(file.texts["elsewhere"])
        with pytest.raises(anthropic.RateLimitError) as limited_too:
            await ask_anthropic(file.texts["once"])
        assert limited_too.value.body["error"]["type"] == "rate_limit_error"  # type: ignore[index]
        assert (await ask_anthropic(file.texts["alice"])).content[0].text
