"""The gateway's answers come from the server by one stream, as by default, or by calls (CHARONIA_GATEWAY_SUBSCRIBE)."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import engine_metrics
import httpx
import psutil
import pytest
from gateway_process import gateway
from stack import ENDLESS, HANG_S, Stack, answers
from worker_client import client_of

CHAT = [{"role": "user", "content": "Name five colours and describe each."}]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def by_calls(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a gateway before `stack` that has calls for its answers."""
    log = tmp_path_factory.mktemp("by_calls") / "gateway.log"
    with gateway(stack.grpc, log, CHARONIA_GATEWAY_SUBSCRIBE="false", CHARONIA_MODEL_NAME="demo") as own:
        yield own.url


@pytest.fixture(scope="module", params=["true", "false"], ids=["subscribed", "calls"])
def before_slow(request: pytest.FixtureRequest, slow: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of one before `slow`."""
    log = tmp_path_factory.mktemp("before_slow") / "gateway.log"
    with gateway(slow.grpc, log, CHARONIA_GATEWAY_SUBSCRIBE=request.param) as own:
        yield own.url


async def until(holds: Callable[[], Awaitable[Any]]) -> None:
    async def wait() -> None:
        while not await holds():
            await asyncio.sleep(0.02)

    await asyncio.wait_for(wait(), HANG_S)


def without_names(text: str) -> list[Any]:
    """The events of a stream, or the body, without what no two answers share."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line and line != "data: [DONE]"]
    found = [json.loads(line) for line in lines]
    for one in found:
        for name in ("id", "created", "model", "timings", "system_fingerprint"):
            one.pop(name, None)
        one.get("usage", None) and one["usage"].pop("prompt_tokens_details", None)
    return found


def joined(events: list[Any]) -> dict[int, tuple[str, list[Any], list[Any]]]:
    """By choice: the text, all that comes once, and the log probabilities of its tokens; where a text is cut depends on
    when it was made."""
    texts: dict[int, tuple[str, list[Any], list[Any]]] = {}
    for event in events:
        for choice in event["choices"]:
            text, rest, tokens = texts.get(choice["index"], ("", [], []))
            delta = choice.pop("delta", None) or {}
            text += delta.pop("content", None) or choice.pop("text", None) or ""
            rest += [one for one in (delta, choice["finish_reason"]) if one]
            if logprobs := choice["logprobs"]:
                tokens += logprobs["content"] if "content" in logprobs else zip(*logprobs.values(), strict=True)
            texts[choice["index"]] = (text, rest, tokens)
    return texts


async def test_it_answers_as_one_with_calls_does(stack: Stack, by_calls: str) -> None:
    chat = {"messages": CHAT, "max_tokens": 40, "temperature": 1.0}
    asked: list[tuple[str, dict[str, Any]]] = [
        *(("chat/completions", {**chat, "seed": seed, "stream": True}) for seed in range(8)),
        ("chat/completions", {**chat, "seed": 1, "n": 3, "stream": True}),
        ("chat/completions", {**chat, "seed": 1, "n": 2}),
        ("chat/completions", {**chat, "seed": 2, "stop": ["e", " the"], "stream": True}),
        ("chat/completions", {**chat, "seed": 2, "tools": [TOOL], "stream": True}),
        ("completions", {"prompt": ["One two", "Red"], "echo": True, "seed": 3, "max_tokens": 8, "stream": True}),
        ("completions", {"prompt": "One two", "best_of": 4, "n": 2, "seed": 3, "max_tokens": 8}),
    ]
    scored = {**chat, "seed": 2, "logprobs": True, "top_logprobs": 5}
    prompts = {"prompt": ["One two", "Red"], "seed": 3, "max_tokens": 12, "temperature": 1.0}
    asked += [
        (path, {**fields, "stream": stream})
        for stream in (True, False)
        for path, fields in (
            ("chat/completions", scored),
            ("chat/completions", {**scored, "top_logprobs": 20, "n": 2}),
            ("chat/completions", {**scored, "top_logprobs": 0, "stop": ["e", " the"]}),
            ("chat/completions", {**scored, "tools": [TOOL]}),
            ("completions", {**prompts, "logprobs": 5, "n": 2}),
            ("completions", {**prompts, "logprobs": 0}),
            ("completions", {**prompts, "logprobs": 1, "echo": True}),  # of the prompt, too: by calls
        )
    ]
    asked.append(("completions", {**prompts, "best_of": 4, "n": 2, "logprobs": 2}))

    async def answers(url: str) -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=url, timeout=HANG_S) as http:
            return await asyncio.gather(
                *(http.post(f"/v1/{path}", json={"model": "demo", **fields}) for path, fields in asked)
            )

    async def count_calls() -> float:
        async with httpx.AsyncClient(timeout=HANG_S) as http:
            text = (await http.get(f"{stack.gateway}/metrics")).text
        return float(text.partition('\ncharonia_gateway_triton_requests_total{way="call"} ')[2].split()[0])

    calls = await count_calls()
    subscribed = await answers(stack.gateway)
    assert await count_calls() == calls + 4, "those with log probabilities of their two prompts"
    for (_, fields), by_stream, by_call in zip(asked, subscribed, await answers(by_calls), strict=True):
        assert by_stream.status_code == by_call.status_code == 200, by_stream.text
        if fields.get("stream"):
            assert joined(without_names(by_stream.text)) == joined(without_names(by_call.text))
            assert by_stream.text.endswith("data: [DONE]\n\n")
        else:
            assert without_names(by_stream.text) == without_names(by_call.text)
        assert ("top_logprobs" in by_stream.text) == ("logprobs" in fields)


async def test_the_log_and_the_engines_metrics_say_whether_it_subscribes(slow: Stack, tmp_path: Path) -> None:
    async with httpx.AsyncClient(base_url=slow.gateway, timeout=HANG_S) as http:  # which then has one
        (await http.post("/v1/completions", json={"model": "slow", "prompt": "a", "max_tokens": 2})).raise_for_status()
    await engine_metrics.until(slow.metrics, lambda metrics: metrics.subscriptions == 1, "no other subscription")
    for subscribes, says, subscriptions in (
        ("false", "each answer comes from Triton by a stream of its own", 0),
        ("", "answers come from Triton by one stream for each process and model", 1),
    ):
        log = tmp_path / "gateway.log"
        given = {"CHARONIA_GATEWAY_SUBSCRIBE": subscribes} if subscribes else {}
        with gateway(slow.grpc, log, **given) as own:
            assert log.read_text().count(f"{says} (CHARONIA_GATEWAY_SUBSCRIBE={subscribes or 'true'})") == 1
            async with httpx.AsyncClient(base_url=own.url, timeout=HANG_S) as http:
                asked = {"model": "model", "prompt": "a", "max_tokens": 2}
                (await http.post("/v1/completions", json=asked)).raise_for_status()
                counted = (await http.get("/metrics")).text
            assert (await engine_metrics.read(slow.metrics)).subscriptions == 1 + subscriptions
            for way, count in (("call", 1 - subscriptions), ("subscription", subscriptions)):
                assert f'charonia_gateway_triton_requests_total{{way="{way}"}} {count}.0\n' in counted
            own.process.terminate()
            assert own.process.wait(HANG_S) == 0
    await engine_metrics.until(slow.metrics, lambda metrics: metrics.subscriptions == 1, "ended in order")


@pytest.mark.parametrize("way", ["by default", "by calls"])
async def test_an_error_has_its_status(stack: Stack, by_calls: str, way: str) -> None:
    url = by_calls if way == "by calls" else stack.gateway
    async with httpx.AsyncClient(base_url=url, timeout=HANG_S) as http:
        for fields, status in (
            ({"prompt": "word " * 100_000}, 400),
            ({"prompt": "a", "guided_regex": "("}, 400),
            ({"prompt": "a", "max_tokens": 4}, 200),
        ):
            for stream in (False, True):
                body = {"model": "demo", "stream": stream, **fields}
                assert (await http.post("/v1/completions", json=body)).status_code == status


LONG: dict[str, Any] = {"model": "model", "ignore_eos": True, "max_tokens": ENDLESS, "stream": True, "messages": CHAT}


def text_of(line: str) -> str:
    """What an event's line adds to the answer."""
    if not line.startswith("data: {"):
        return ""
    choices = json.loads(line.removeprefix("data: "))["choices"]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


async def test_clients_that_leave_cancel_their_requests_and_no_others(slow: Stack, before_slow: str) -> None:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=before_slow, timeout=HANG_S, limits=limits) as http:
        before = await engine_metrics.idle(slow.metrics)

        async def leave(number: int) -> None:
            async with http.stream("POST", "/v1/chat/completions", json={**LONG, "seed": number}) as answer:
                async for line in answer.aiter_lines():
                    if text_of(line):
                        return

        stays = asyncio.create_task(http.post("/v1/chat/completions", json={**LONG, "max_tokens": 200}))
        await asyncio.gather(*(leave(number) for number in range(24)))
        assert json.loads((await stays).text.splitlines()[-4].removeprefix("data: "))["choices"][0][
            "finish_reason"
        ] == ("length")
        after = await engine_metrics.idle(slow.metrics)
        assert after.cancelled - before.cancelled == 24


@pytest.mark.parametrize("subscribes", [True])
async def test_a_killed_worker_takes_its_own_streams_with_it_and_no_others(
    slow: Stack, tmp_path: Path, subscribes: bool
) -> None:
    settings = {"CHARONIA_GATEWAY_SUBSCRIBE": str(subscribes).lower(), "CHARONIA_GATEWAY_WORKERS": "2"}
    settings["CHARONIA_GATEWAY_MAX_RESPONSES"] = "0"
    with gateway(slow.grpc, tmp_path / "gateway.log", **settings) as own:
        await until(lambda: asyncio.to_thread(answers, f"{own.url}/health/ready"))
        before = await engine_metrics.idle(slow.metrics)
        supervisor = psutil.Process(own.process.pid)
        dies, lives = (child.pid for child in supervisor.children())
        async with AsyncExitStack() as opened:
            webs = [await opened.enter_async_context(client_of(own.url, pid)) for pid in [dies] * 4 + [lives] * 4]
            begun = [asyncio.Event() for _ in webs]

            async def read(number: int, max_tokens: int) -> tuple[str, int]:
                """Text and number of tokens."""
                more = {"max_tokens": max_tokens, "seed": 1, "stream_options": {"include_usage": True}}
                asked, lines = {**LONG, **more}, []
                async with webs[number].stream("POST", "/v1/chat/completions", json=asked) as answer:
                    async for line in answer.aiter_lines():
                        lines.append(line)
                        if text_of(line):
                            begun[number].set()
                usage, done = [line for line in lines if line][-2:]
                assert done == "data: [DONE]"
                tokens = json.loads(usage.removeprefix("data: "))["usage"]["completion_tokens"]
                return "".join(map(text_of, lines)), tokens

            lost = [asyncio.create_task(read(number, ENDLESS)) for number in range(4)]
            kept = [asyncio.create_task(read(number, 400)) for number in range(4, 8)]
            await asyncio.wait_for(asyncio.gather(*(one.wait() for one in begun)), HANG_S)
            assert (await engine_metrics.read(slow.metrics)).subscriptions == before.subscriptions + 2 * subscribes
            os.kill(dies, signal.SIGKILL)
            for error in await asyncio.gather(*lost, return_exceptions=True):
                assert isinstance(error, httpx.TransportError)
            await engine_metrics.until(
                slow.metrics,
                lambda now: (
                    (now.subscriptions, now.cancelled) == (before.subscriptions + subscribes, before.cancelled + 4)
                ),
                "its requests have ended, and its subscription",
            )
            first, *others = await asyncio.gather(*kept)
            assert first[1] == 400 and others == [first] * 3

        async def new() -> int | None:
            return next((child.pid for child in supervisor.children() if child.pid not in (dies, lives)), None)

        await until(new)
        async with client_of(own.url, await new() or 0) as web:
            asked = {**LONG, "max_tokens": 2, "stream": False}
            (await web.post("/v1/chat/completions", json=asked)).raise_for_status()
        assert (await engine_metrics.read(slow.metrics)).subscriptions == before.subscriptions + 2 * subscribes
        assert (await engine_metrics.idle(slow.metrics)).cancelled == before.cancelled + 4
