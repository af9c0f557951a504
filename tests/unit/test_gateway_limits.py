"""Limits of API keys: requests, tokens and requests at once; in this process and in a Redis that gateways share."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from charonia_gateway import limiter
from charonia_gateway.keys import Key
from charonia_gateway.limiter import Limiter, LimitExceeded
from charonia_gateway.settings import Settings
from free_ports import free_ports
from gateway_in_process import MODEL, gateway, listening
from key_files import PAST, KeyFile
from missing_tools import missing_tool
from triton_double import error, part
from tritonclient.grpc import service_pb2 as pb

ROOT = Path(__file__).resolve().parents[2]

CHAT: dict[str, Any] = {"model": MODEL, "messages": "hi"}
MESSAGES: dict[str, Any] = {"model": MODEL, "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}
Parts = AsyncIterator[pb.ModelStreamInferResponse]
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


async def tell(request: pb.ModelInferRequest) -> Parts:
    """5 tokens of prompt and 1 of answer."""
    yield part("x", "stop")


async def break_off(request: pb.ModelInferRequest) -> Parts:
    yield part("x")
    yield error("[503] the engine ends")


async def stop(request: pb.ModelInferRequest) -> Parts:
    """As when the session's client stops it by another request."""
    yield part("x", "cancelled")


async def tell_of_the_second(request: pb.ModelInferRequest) -> Parts:
    yield part("x", index=1)
    yield error("[503] the engine ends")


async def refuse(request: pb.ModelInferRequest) -> Parts:
    yield error("[400] top_k: wrong")


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
    """What the engine has said; where that is nothing, the prompt is estimated, at four characters a token."""
    file.add("hasty", tokens_per_minute=100)
    begun, left = asyncio.Event(), asyncio.Event()

    async def goes_on(request: pb.ModelInferRequest) -> Parts:
        if stream:
            yield part("x")
        begun.set()
        await left.wait()
        yield part("x", "stop")

    body = json.dumps({**CHAT, "messages": "x" * 40, "stream": stream}).encode()
    async with gateway(keys_file=file.path) as (web, server):
        server.behaviour = goes_on
        app: Any = web._transport.app  # type: ignore[attr-defined]
        sent = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if sent:
                return sent.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            if message.get("body"):
                left.set()

        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/chat/completions",
            "headers": [(b"authorization", file.bearer("hasty")["Authorization"].encode())],
            "query_string": b"",
        }
        asked = asyncio.create_task(app(scope, receive, send))
        await asyncio.wait_for(begun.wait(), HANG_S)
        if not stream:
            left.set()
        await asyncio.wait_for(asked, HANG_S)
        after = await web.post("/tokenize", json={"prompt": "hi"}, headers=file.bearer("hasty"))
    assert after.headers["x-ratelimit-remaining-tokens"] == str(100 - charged)


async def test_a_key_has_as_many_requests_at_once_as_it_may(file: KeyFile) -> None:
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
    assert (second.status_code, second.headers["retry-after"], third.status_code) == (429, "1", 200)


async def test_openais_and_anthropics_clients_know_the_errors(file: KeyFile) -> None:
    file.add("once", requests_per_minute=1)
    file.add("elsewhere", models=("another-model",))

    async with gateway(keys_file=file.path) as (web, _), listening(web._transport.app) as url:  # type: ignore[attr-defined]

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


# --- a storage that gateways share


@contextlib.contextmanager
def redis_server(folder: Path, port: int) -> Iterator[str]:
    """Its URI, until the block is left. It keeps nothing on disk."""
    found = subprocess.run([ROOT / "scripts" / "get_redis.sh"], capture_output=True, text=True)
    if found.returncode:
        missing_tool(found.stderr.removeprefix("skipped: "))
    program = found.stdout.strip()
    options = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
    process = subprocess.Popen([program, *options], stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + HANG_S
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        yield f"redis://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(HANG_S)


def limited_key(**limits: int) -> Key:
    return Key(id="0123456789ab", name="shared", sha256="0" * 64, created=PAST, **limits)


def test_gateways_that_share_a_storage_share_the_limits_and_count_alone_while_it_is_away(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a busy machine 300 connections take this process more than the second that a storage has.
    monkeypatch.setattr(limiter, "_STORAGE_TIMEOUT_S", HANG_S)
    (port,) = free_ports(1)
    key = limited_key(requests_per_minute=3, tokens_per_minute=50)
    other = limited_key(requests_per_minute=3).model_copy(update={"id": "ba9876543210"})

    async def use(uri: str, times: int) -> list[str]:
        limiter = Limiter(uri)
        left = []
        for _ in range(times):
            headers = await limiter.begin(key)
            left.append(headers["x-ratelimit-remaining-requests"] + " " + headers["x-ratelimit-remaining-tokens"])
            await limiter.end(key, 10)
        return left

    async def burst(uri: str) -> tuple[int, int]:
        """Requests that were taken, and lines in the log."""
        limiter = Limiter(uri)
        caplog.clear()
        begun = await asyncio.gather(*(limiter.begin(other) for _ in range(300)), return_exceptions=True)
        return sum(isinstance(one, dict) for one in begun), len(caplog.records)

    with redis_server(tmp_path, port) as uri:
        assert asyncio.run(burst(uri)) == (3, 0), "more at once than a client has connections"
        assert asyncio.run(use(uri, 2)) == ["2 50", "1 40"]
        assert asyncio.run(use(uri.replace("redis", "valkey"), 1)) == ["0 30"]
        with pytest.raises(LimitExceeded) as exceeded:
            asyncio.run(use(uri, 1))
        assert exceeded.value.limit == "requests" and 0 < int(exceeded.value.headers["Retry-After"]) <= 60
    assert asyncio.run(use(uri, 2)) == ["2 50", "1 40"], "it is gone, and nobody is turned away for that"
    assert asyncio.run(burst(uri)) == (3, 1), "it is said once"


@pytest.mark.parametrize("uri", ["memcached://h:1", "redis", "http://user:secret@h"])
def test_a_storage_that_is_none_is_refused_and_its_password_is_not_shown(uri: str) -> None:
    with pytest.raises(ValueError, match="redis://HOST:PORT") as refused:
        Settings(_env_file=None, limits_storage=uri)
    assert "secret" not in refused.value.errors()[0]["msg"]  # type: ignore[attr-defined]


@pytest.mark.parametrize("uri", ["redis://user:sec/ret@h", "redis://h:secret", "valkey://u:secret/@h:x"])
def test_an_address_that_is_none_is_refused_and_its_password_is_not_shown(uri: str) -> None:
    with pytest.raises(ValueError, match="CHARONIA_GATEWAY_LIMITS_STORAGE") as refused:
        Limiter(uri)
    assert "ret" not in str(refused.value).replace("CHARONIA_GATEWAY_LIMITS_STORAGE", "")
    assert refused.value.__suppress_context__


@pytest.mark.parametrize("scheme", ["redis", "valkey"])
async def test_a_storage_may_be_on_a_host_that_is_called_valkey(scheme: str) -> None:
    storage: Any = limiter._open(f"{scheme}://:valkey-password@valkey:6379")
    options = storage.bridge.storage.connection_pool.connection_kwargs
    assert (options["host"], options["password"]) == ("valkey", "valkey-password")
