"""Responses continue at another server when theirs is killed or shuts down. The client sees a pause."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import engine_metrics
import httpx
import openai
import pytest
from gateway_process import gateway
from stack import DEMO_MODEL, HANG_S, SLOW, Stack, running
from streams import gateway_metric
from waiting import until

pytestmark = pytest.mark.slow

# The proof of a release runs 50, in parts with other seeds.
ROUNDS = int(os.environ.get("CHARONIA_FAILOVER_ROUNDS", "2"))
SEED = int(os.environ.get("CHARONIA_FAILOVER_SEED", "1"))
STREAMS = 64
TOKENS = 900
USER: Any = [{"role": "user", "content": "Tell me about Triton and his conch shell."}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "parameters": {
                "type": "object",
                "properties": {"words": {"type": "array", "items": {"type": "string"}, "minItems": 8, "maxItems": 12}},
                "required": ["words"],
            },
        },
    }
]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 40, "maxLength": 80},
        "ages": {"type": "array", "items": {"type": "integer"}, "minItems": 30},
    },
    "required": ["name", "ages"],
    "additionalProperties": False,
}
CHAT, TEXT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
LONG: dict[str, Any] = {"max_tokens": TOKENS, "ignore_eos": True, "temperature": 1.0}
STREAM: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
# Each kind of response: its route, and the fields of its request besides model and seed.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, {"messages": USER, **LONG, **STREAM}),
    "greedy": (CHAT, {"messages": USER, **LONG, **STREAM, "temperature": 0}),
    "several": (CHAT, {"messages": USER, "max_tokens": TOKENS, "n": 3, **STREAM}),
    "logprobs": (CHAT, {"messages": USER, **LONG, **STREAM, "logprobs": True, "top_logprobs": 3}),
    "schema with logprobs": (CHAT, {
        "messages": USER, "max_tokens": TOKENS, **STREAM, "logprobs": True,
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
    }),
    "penalties": (CHAT, {"messages": USER, **LONG, **STREAM, "frequency_penalty": 0.7, "repetition_penalty": 1.2}),
    "stop": (CHAT, {"messages": USER, **LONG, **STREAM, "stop": ["and the", "of a", "xyz"], "min_tokens": 400}),
    "tools": (CHAT, {"messages": USER, "max_tokens": TOKENS, **STREAM, "tools": TOOLS, "tool_choice": "required"}),
    "schema": (CHAT, {
        "messages": USER, "max_tokens": TOKENS, **STREAM,
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
    }),
    "whole": (CHAT, {"messages": USER, **LONG}),
    "whole with several": (CHAT, {"messages": USER, "max_tokens": TOKENS, "n": 3, "logprobs": True}),
    "whole with tools": (CHAT, {"messages": USER, "max_tokens": TOKENS, "tools": TOOLS, "tool_choice": "required"}),
    "best of": (TEXT, {"prompt": "The sea", **LONG, "best_of": 3}),
    "text": (TEXT, {"prompt": ["The sea is", "A shell is"], **LONG, **STREAM, "echo": True, "logprobs": 2}),
    "whole text": (TEXT, {"prompt": "The sea is", **LONG, "logprobs": 1, "echo": True}),
    "echo of several": (TEXT, {"prompt": "The sea is", **LONG, **STREAM, "echo": True, "n": 2, "stop": ["e ", "xyz"]}),
    # These APIs have no seed.
    "responses": (RESPONSES, {"input": USER, "max_output_tokens": TOKENS, "stream": True, "temperature": 0}),
    "messages": (MESSAGES, {"messages": USER, "max_tokens": TOKENS, "stream": True, "temperature": 0}),
}  # fmt: skip


def request_of(number: int) -> tuple[str, dict[str, Any]]:
    path, fields = list(KINDS.values())[number % len(KINDS)]
    return path, {"model": "model", "seed": number, **fields}


PIECES = {"content", "reasoning_content", "arguments", "text", "delta", "partial_json"}  # parts of a longer text
PIECES |= {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
# Fields that differ between two equal responses. Cached tokens depend on what the server computed before.
VOLATILE = {"id", "created", "created_at", "completed_at", "item_id", "call_id", "timings", "sequence_number"}
VOLATILE |= {"prompt_tokens_details", "input_tokens_details", "input_tokens", "cache_read_input_tokens", "metadata"}


def stable(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: stable(one) for key, one in value.items() if key not in VOLATILE}
    return [stable(one) for one in value] if isinstance(value, list) else value


def joined(events: list[Any]) -> Any:
    """A stream's events without their boundaries: PIECES of the same place are joined; of other fields the last value
    counts."""
    found: dict[str, Any] = {}

    def see(place: str, value: Any) -> None:
        if isinstance(value, dict):
            kind = f"{place}/{value.get('type', '')}/{value.get('index', value.get('output_index', ''))}"
            for key, one in value.items():
                see(f"{kind}/{key}", one)
        elif isinstance(value, list) and value and all(isinstance(one, dict) and "index" in one for one in value):
            for one in value:
                see(place, one)
        elif value is not None:
            pieces = place.rpartition("/")[2] in PIECES and place in found
            found[place] = found[place] + value if pieces else value

    for event in events:
        if event.get("type") in ("response.completed", "response.incomplete"):
            found[event["type"]] = event
        elif event.get("type") != "message_start" and ("choices" in event or "delta" in event):
            see("", event)
    return found


class Counter:
    """Counts the events of all streams, and calls `then` at a number."""

    def __init__(self, at: int = 0, then: Callable[[], None] = lambda: None) -> None:
        self.count, self.at, self.then = 0, at, then

    def see(self) -> None:
        self.count += 1
        if self.count == self.at:
            self.then()


async def response_to(http: httpx.AsyncClient, path: str, body: dict[str, Any], counter: Counter) -> Any:
    """The response without what differs between two equal responses."""
    if not body.get("stream"):
        answer = await http.post(path, json=body)
        while "best_of" in body and answer.status_code == 503:  # nothing can be continued, and clients retry
            answer = await http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return stable(answer.json())
    events = []
    async with http.stream("POST", path, json=body) as answer:
        assert answer.status_code == 200, (await answer.aread()).decode()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                counter.see()
                events.append(stable(json.loads(line.removeprefix("data: "))))
                assert "error" not in events[-1] or events[-1].get("error") is None, line
    return joined(events)


async def text_with_openai(http: httpx.AsyncClient) -> str:
    """The text of a stream that OpenAI's client reads."""
    async with openai.AsyncOpenAI(base_url=f"{http.base_url}/v1", api_key="none", max_retries=0) as client:
        stream = await client.chat.completions.create(
            model="model", messages=USER, max_tokens=TOKENS, seed=5, stream=True, extra_body={"ignore_eos": True}
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


async def all_responses(http: httpx.AsyncClient, counter: Counter) -> list[Any]:
    responses = (response_to(http, *request_of(number), counter) for number in range(STREAMS))
    return await asyncio.gather(*responses, text_with_openai(http))


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Stack]]:
    folder = tmp_path_factory.mktemp("failover")
    env = {
        "CHARONIA_STREAM_INTERVAL_MS": "0",
        "CHARONIA_MAX_RESTARTS": "1000",
        "CHARONIA_MAX_BATCH_SIZE": "256",
        "CHARONIA_CACHE_MAX_ENTRY_COUNT": "2048",
    }
    with running(Stack(DEMO_MODEL, folder / "a", env)) as a, running(Stack(DEMO_MODEL, folder / "b", env)) as b:
        yield [a, b]


@asynccontextmanager
async def in_front_of(servers: list[Stack], log: Path, **env: str) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a gateway in front of the servers, which are all up."""
    settings = {
        "CHARONIA_TRITON_ENDPOINTS": ",".join(one.grpc for one in servers),
        "CHARONIA_ENDPOINT_CHECK_INTERVAL_S": "0.1",
        "CHARONIA_ENDPOINT_CHECK_TIMEOUT_S": str(HANG_S),
        "CHARONIA_GATEWAY_MAX_LOGPROBS": "0",
        **env,
    }
    with gateway("127.0.0.1:1", log, **settings) as own:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=own.url, timeout=HANG_S, limits=limits) as http:
            await all_up(http, servers)
            yield http


async def all_up(http: httpx.AsyncClient, servers: list[Stack]) -> None:
    async def up() -> bool:
        return all([await gateway_metric(http, "endpoint_up", endpoint=one.grpc) for one in servers])

    await until(up)


async def test_killed_servers_change_no_byte_of_any_response(servers: list[Stack], tmp_path: Path) -> None:
    chance = random.Random(SEED)
    async with in_front_of(servers, tmp_path / "gateway.log") as http:
        counter = Counter()
        expected = await all_responses(http, counter)
        num_events = counter.count
        assert await gateway_metric(http, "resumes_total") == 0
        for number in itertools.count():
            if number >= ROUNDS and await gateway_metric(http, "resumes_total"):
                break
            victim = chance.choice(servers)
            # Most responses have begun. The servers are ahead of the client, so most have ended at half of the events.
            at = chance.randrange(num_events // 20, num_events // 4)
            counter = Counter(at, partial(os.kill, victim.pid_of("tritonserver"), signal.SIGKILL))
            for index, (got, wanted) in enumerate(zip(await all_responses(http, counter), expected, strict=True)):
                assert got == wanted, f"round {number}, {list(KINDS)[index % len(KINDS)]}, {request_of(index)}"
            await asyncio.to_thread(victim.until_ready)
            await all_up(http, servers)


async def test_a_server_that_shuts_down_hands_its_responses_over(slow_model: Path, tmp_path: Path) -> None:
    """The drain would take as long as the longest response. No text changes."""
    env = {**SLOW, "CHARONIA_DRAIN_TIMEOUT_S": str(HANG_S), "CHARONIA_MAX_BATCH_SIZE": "64"}
    with (
        running(Stack(slow_model, tmp_path / "leaving", env)) as leaving,
        running(Stack(slow_model, tmp_path / "staying", env)) as staying,
    ):
        async with in_front_of([leaving, staying], tmp_path / "gateway.log") as http:

            async def all_of_them() -> list[Any]:
                fields = {"model": "model", "prompt": "Hello", "max_tokens": 1200, "ignore_eos": True}
                bodies = [{**fields, "seed": seed, **(STREAM if seed % 2 else {})} for seed in range(8)]
                return await asyncio.gather(*(response_to(http, TEXT, body, Counter()) for body in bodies))

            expected = await all_of_them()
            moved = asyncio.create_task(all_of_them())

            async def running_there() -> int:
                assert not moved.done(), moved.result()
                return int((await engine_metrics.read(leaving.metrics)).running)

            there = await until(running_there)
            leaving.signal(signal.SIGTERM)
            assert await asyncio.to_thread(leaving.wait) == 0
            assert await moved == expected
            assert await gateway_metric(http, "resumes_total") >= there
