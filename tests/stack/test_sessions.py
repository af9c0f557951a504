"""Sessions: the server stores a conversation, and only the speed depends on whether it is still stored."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import engine_metrics
import httpx
import openai
import pytest
from charonia_client import BadRequest, Client, GenerateRequest, GenerateResponse
from stack import ENDLESS, HANG_S, Stack

FIRST, SECOND = "What is the capital of France?", "And of Italy?"


@pytest.fixture
async def client(stack: Stack) -> AsyncIterator[Client]:
    async with Client(stack.grpc) as client:
        yield client


@pytest.fixture
async def slow_client(slow: Stack) -> AsyncIterator[Client]:
    async with Client(slow.grpc) as client:
        yield client


@pytest.fixture
def session() -> str:
    return f"test {uuid.uuid4()}"


def turn(text: str, session_id: str, **fields: Any) -> GenerateRequest:
    """The new turn of a stored conversation."""
    fields = {"temperature": 0, "stream": False, "interactive": True, **fields}
    return GenerateRequest(messages=[{"role": "user", "content": text}], session_id=session_id, **fields)


def history_after(answer: GenerateResponse) -> int:
    """Tokens of a session's history after this last turn."""
    return answer.num_input_tokens + answer.num_output_tokens


async def test_text_continues_session(client: Client, session: str) -> None:
    fields: dict[str, Any] = {"temperature": 0, "stream": False, "max_tokens": 5, "ignore_eos": True}
    first = await client.complete(GenerateRequest(text="The capital", session_id=session, interactive=True, **fields))
    second = await client.complete(GenerateRequest(text=" of", session_id=session, interactive=True, **fields))
    assert second.num_session_tokens == history_after(first)


async def test_repeated_system_message_counts_once(client: Client, session: str) -> None:
    async def ask(text: str) -> GenerateResponse:
        messages = [{"role": "system", "content": "You answer briefly."}, {"role": "user", "content": text}]
        return await client.complete(
            GenerateRequest(messages=messages, session_id=session, interactive=True, temperature=0, stream=False)
        )

    first, second = await ask(FIRST), await ask(SECOND)
    plain = await client.complete(turn(SECOND, f"{session} other"))
    assert second.num_input_tokens - second.num_session_tokens <= plain.num_input_tokens
    assert second.num_session_tokens == history_after(first)


async def test_interactive_without_session_is_rejected(stack: Stack) -> None:
    from triton_stream import collect
    from tritonclient.grpc.aio import InferenceServerClient
    from tritonclient.utils import InferenceServerException

    async with InferenceServerClient(stack.grpc) as raw:
        with pytest.raises(InferenceServerException, match=r"\[400\] interactive: true without a session"):
            await collect(raw, {"messages": FIRST, "interactive": True})
        with pytest.raises(InferenceServerException, match=r"\[400\] session_id has 300 bytes"):
            await collect(raw, {"messages": FIRST, "session_id": "x" * 300})


async def begun(client: Client, session: str) -> tuple[asyncio.Task[GenerateResponse], asyncio.Event]:
    """A long turn that has begun. The task returns its last part."""
    speaks = asyncio.Event()

    async def listen() -> GenerateResponse:
        request = turn("Talk", session, stream=True, max_tokens=ENDLESS, ignore_eos=True)
        async with aclosing(client.generate(request)) as parts:
            async for part in parts:
                if part.num_output_tokens >= 3:
                    speaks.set()
        return part

    task = asyncio.create_task(listen())
    await asyncio.wait_for(speaks.wait(), HANG_S)
    return task, speaks


async def test_client_disconnect_drops_turn(slow: Stack, slow_client: Client, session: str) -> None:
    first = await slow_client.complete(turn("Hello", session, max_tokens=8))
    long, _ = await begun(slow_client, session)
    long.cancel()
    await asyncio.gather(long, return_exceptions=True)
    await engine_metrics.idle(slow.metrics)
    after = await slow_client.complete(turn("And?", session, max_tokens=4))
    assert after.num_session_tokens == history_after(first)


async def test_end_session_keeps_running_response(slow_client: Client, session: str) -> None:
    long = asyncio.create_task(slow_client.complete(turn("Talk", session, max_tokens=60, ignore_eos=True)))
    await slow_client.end_session(session)
    assert (await asyncio.wait_for(long, HANG_S)).finish_reason == "length"


# ---- the gateway


@pytest.fixture
async def http(stack: Stack) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=stack.gateway, timeout=HANG_S) as http:
        yield http


async def interactive(http: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    answer = await http.post("/v1/chat/interactive", json={"temperature": 0, **fields})
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    assert set(body) == {"text", "tokens", "input_tokens", "history_tokens", "finish_reason"}
    return body


async def test_interactive_chat_keeps_conversation(http: httpx.AsyncClient, session: str) -> None:
    fields = {"session_id": session, "interactive_mode": True}
    first = await interactive(http, prompt=FIRST, **fields)
    second = await interactive(http, prompt=[{"role": "user", "content": SECOND}], **fields)
    assert first["history_tokens"] == 0 and first["finish_reason"] == "stop"
    assert second["history_tokens"] == first["input_tokens"] + first["tokens"]
    name = (await http.get("/v1/models")).json()["data"][0]["id"]
    whole = [
        {"role": "user", "content": FIRST},
        {"role": "assistant", "content": first["text"]},
        {"role": "user", "content": SECOND},
    ]
    same = await http.post("/v1/chat/completions", json={"model": name, "messages": whole, "temperature": 0})
    assert same.json()["choices"][0]["message"]["content"] == second["text"]
    last = await interactive(http, prompt=FIRST, session_id=session)
    assert last["history_tokens"] == second["history_tokens"] + second["input_tokens"] + second["tokens"]
    assert (await interactive(http, prompt=FIRST, **fields))["history_tokens"] == 0


async def test_interactive_chat_streams_one_object_per_line(http: httpx.AsyncClient, session: str) -> None:
    fields = {"prompt": FIRST, "temperature": 0}
    whole = await interactive(http, **fields)
    answer = await http.post("/v1/chat/interactive", json={**fields, "session_id": session, "stream": True})
    parts = [json.loads(line) for line in answer.text.splitlines()]
    assert "".join(part["text"] for part in parts) == whole["text"]
    assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + ["stop"]
    assert parts[-1]["tokens"] == whole["tokens"] and parts[-1]["input_tokens"] == whole["input_tokens"]


@pytest.mark.parametrize("action", ["stop", "cancel"])
async def test_another_client_ends_running_response_of_session(slow: Stack, session: str, action: str) -> None:
    async with httpx.AsyncClient(base_url=slow.gateway, timeout=HANG_S) as http:
        fields = {"session_id": session, "interactive_mode": True, "ignore_eos": True}
        first = await interactive(http, prompt="Hello", request_output_len=8, **fields)
        body = {"prompt": "Talk", "request_output_len": ENDLESS, "stream": True, **fields}
        async with http.stream("POST", "/v1/chat/interactive", json=body) as answer:
            parts = []
            async for line in answer.aiter_lines():
                parts.append(json.loads(line))
                if len(parts) == 1:
                    await interactive(http, session_id=session, **{action: True})
        assert parts[-1]["finish_reason"] == "cancelled"
        assert parts[-1]["tokens"] < ENDLESS
        after = await interactive(http, prompt="And?", request_output_len=4, **fields)
        kept = first if action == "cancel" else parts[-1]
        assert after["history_tokens"] == kept["history_tokens"] + kept["input_tokens"] + kept["tokens"]


async def test_chat_completions_session_is_a_hint(stack: Stack, session: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{stack.gateway}/v1", api_key="none", max_retries=0) as api:
        model = (await api.models.list()).data[0].id
        messages: list[Any] = [{"role": "user", "content": FIRST}]

        async def ask(**extra: Any) -> Any:
            return await api.chat.completions.create(
                model=model, messages=messages, temperature=0, extra_body={"session_id": session, **extra}
            )

        first = await ask()
        messages += [{"role": "assistant", "content": first.choices[0].message.content}]
        messages += [{"role": "user", "content": SECOND}]
        second = await ask()
        renewed = await ask(renew_session=True)
        assert renewed.choices[0].message.content == second.choices[0].message.content
        plain = await api.chat.completions.create(model=model, messages=messages, temperature=0)
        assert plain.choices[0].message.content == second.choices[0].message.content


async def test_cache_salt_separates_prefix_caches(stack: Stack, client: Client) -> None:
    """Over REST and gRPC: requests with another salt are not visible, and the responses are the same."""
    text = f"{uuid.uuid4()} " + "One two three four five six. " * 20
    fields: dict[str, Any] = {"prompt": text, "temperature": 0, "max_tokens": 4}

    async with openai.AsyncOpenAI(base_url=f"{stack.gateway}/v1", api_key="none", max_retries=0) as api:
        model = (await api.models.list()).data[0].id

        async def over_rest(**salt: str) -> tuple[int, str]:
            answer = await api.completions.create(model=model, **fields, extra_body=salt)
            assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
            return answer.usage.prompt_tokens_details.cached_tokens or 0, answer.choices[0].text

        async def over_grpc(salt: str | None) -> int:
            asked = GenerateRequest(text=text, temperature=0, max_tokens=4, stream=False, cache_salt=salt)
            return (await client.complete(asked)).num_cached_tokens

        first, said = await over_rest()
        (found, again), other, own = await over_rest(), await over_rest(cache_salt="a"), await over_rest(cache_salt="a")
        assert first < 64 <= found and other[0] == 0 and own[0] == found
        assert said == again == other[1] == own[1]
        assert [await over_grpc(salt) for salt in (None, "a", "b", "b", "ä" * 128)] == [found, found, 0, found, 0]
        with pytest.raises(openai.BadRequestError, match="cache_salt"):
            await over_rest(cache_salt="ä" * 129)
    with pytest.raises(BadRequest, match="cache_salt has 257 bytes and must have at most 256"):
        await over_grpc("x" * 257)
