"""Responses of /v1/responses in the background, with the openai client, and their log probabilities."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from gateway_in_process import MODEL, ask, gateway, listening
from key_files import KeyFile
from triton_double import Double, error, input_text, part, says, scripted_parse, with_logprobs
from tritonclient.grpc import service_pb2 as pb
from waiting import until

ASKED: dict[str, Any] = {"model": MODEL, "input": "hi", "background": True}


class Pauses:
    """A server's behaviour: two texts. The second text waits for `go_on`."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()

    async def __call__(self, request: pb.ModelInferRequest) -> AsyncIterator[Any]:
        yield part("One. ")
        await self.go_on.wait()
        yield part("Two.", "stop")


@asynccontextmanager
async def served(key: str = "any", **settings: Any) -> AsyncIterator[tuple[openai.AsyncOpenAI, Double, Pauses]]:
    """Yield a client of a gateway on a port, the gateway's server, and the server's behaviour."""
    async with gateway(**settings) as (web, server):
        server.behaviour = pauses = Pauses()
        app: Any = web._transport
        async with (
            listening(app.app) as (host, port),
            openai.AsyncOpenAI(base_url=f"http://{host}:{port}/v1", api_key=key, max_retries=0) as client,
        ):
            yield client, server, pauses


async def ended(client: openai.AsyncOpenAI, id: str) -> Any:
    async def found() -> Any:
        response = await client.responses.retrieve(id)
        return None if response.status in ("queued", "in_progress") else response

    return await until(found)


async def test_background_response_is_polled_and_continued() -> None:
    async with served() as (client, server, pauses):
        begun = await client.responses.create(**ASKED)
        assert (begun.status, begun.background, begun.output) == ("queued", True, [])
        await until(lambda: server.requests)
        with pytest.raises(openai.BadRequestError, match="is still generated"):
            await client.responses.create(**ASKED, previous_response_id=begun.id)
        pauses.go_on.set()
        response = await ended(client, begun.id)
        assert (response.status, response.output_text, response.store) == ("completed", "One. Two.", True)
        assert response.usage and response.usage.output_tokens == 1
        assert (await client.responses.cancel(begun.id)).status == "completed", "it has ended before"
        after = await client.responses.create(model=MODEL, input="And?", previous_response_id=begun.id)
        assert after.status == "completed" and "One. Two." in input_text(server.requests[-1], "messages")
        await client.responses.delete(begun.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(begun.id)


@pytest.mark.parametrize("leaves", [False, True])
async def test_background_response_has_one_entry_in_the_access_log(
    caplog: pytest.LogCaptureFixture, leaves: bool
) -> None:
    with caplog.at_level("INFO", "charonia_gateway.access"):
        async with served(access_log=True) as (client, server, pauses):
            own = {"x-request-id": "mine"}
            if leaves:
                async with await client.responses.create(**ASKED, extra_headers=own, stream=True) as stream:
                    begun = (await anext(aiter(stream))).response  # type: ignore[union-attr]
            else:
                begun = await client.responses.create(**ASKED, extra_headers=own)
            pauses.go_on.set()
            assert (await ended(client, begun.id)).status == "completed"
    entries = [vars(one) for one in caplog.records if getattr(one, "method", "") == "POST"]
    assert [(one["status"], one["completion_tokens"]) for one in entries] == [(200, 1)]
    (request,) = server.requests
    assert request.id.startswith(f"mine#{begun.id}"), "the client's id is in the lines of other processes"


async def test_background_stream_continues_after_an_event() -> None:
    async with served() as (client, _, pauses):
        first: list[Any] = []
        async with await client.responses.create(**ASKED, stream=True) as stream:
            async for event in stream:
                first.append(event)
                if event.type == "response.output_text.delta":
                    break  # the connection closes, and the response goes on
        id = first[0].response.id
        pauses.go_on.set()
        last = first[-1].sequence_number
        rest = [event async for event in await client.responses.retrieve(id, stream=True, starting_after=last)]
        again = [event async for event in await client.responses.retrieve(id, stream=True)]
    assert first + rest == again and [event.sequence_number for event in again] == list(range(len(again)))
    begin = ["response.created", "response.queued", "response.in_progress"]
    assert [event.type for event in again][:3] == begin and again[-1].type == "response.completed"
    assert again[-1].response.output_text == "One. Two."


async def test_cancelled_background_response_ends_its_request() -> None:
    async with served() as (client, server, _):
        stream = await client.responses.create(**ASKED, stream=True)
        id = (await anext(aiter(stream))).response.id  # type: ignore[union-attr]
        await until(lambda: server.requests)
        for _ in range(2):
            assert (await client.responses.cancel(id)).status == "cancelled"
        await until(lambda: any(action == "cancel" for action, _ in server.actions))
        assert (await client.responses.retrieve(id)).status == "cancelled"
        assert (await client.responses.create(**ASKED)).status == "queued", "no response is running"
        server.behaviour = says(part("x", "stop"))
        stored = await client.responses.create(model=MODEL, input="hi", store=True)
        with pytest.raises(openai.BadRequestError, match="began with background = true can be cancelled"):
            await client.responses.cancel(stored.id)
        with pytest.raises(openai.BadRequestError, match="has no events"):
            await client.responses.retrieve(stored.id, stream=True)


@pytest.mark.parametrize(
    ("said", "code"),
    [
        ("[429] full; retry after 3 s", "rate_limit_exceeded"),
        ("[400] input: wrong", "invalid_prompt"),
        ("[503] gone", "server_error"),
    ],
)
async def test_failed_background_response_has_an_error(said: str, code: str) -> None:
    async with served() as (client, server, _):
        server.behaviour = says(part("x"), error(said))
        stream = await client.responses.create(**ASKED, stream=True)
        events = [event async for event in stream]
        assert [event.type for event in events[-2:]] == ["response.output_text.delta", "response.failed"]
        response = await client.responses.retrieve(events[0].response.id)  # type: ignore[union-attr]
        assert response == events[-1].response and response.status == "failed"  # type: ignore[union-attr]
        assert response.error and response.error.code == code and response.error.message


async def test_background_responses_are_limited() -> None:
    async with served(max_background=1) as (client, _, pauses):
        first = await client.responses.create(**ASKED)
        with pytest.raises(openai.RateLimitError, match="the most this server takes") as caught:
            await client.responses.create(**ASKED)
        assert caught.value.response.headers["retry-after"]
        pauses.go_on.set()
        assert (await ended(client, first.id)).status == "completed"
        assert (await client.responses.create(**ASKED)).status == "queued"
    for given in ({"max_background": 0}, {"max_responses": 0}, {"redis_url": "redis://127.0.0.1:1"}):
        answer = await ask("/v1/responses", ASKED, **given)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "background", answer.text


async def test_ended_responses_are_kept_within_a_number_of_bytes() -> None:
    """Also those without events: each has its instructions, which may be megabytes."""
    async with served(max_response_bytes=5000) as (client, server, _):
        server.behaviour = says(error("[400] input: wrong"))
        ids = []
        for _ in range(3):
            ids.append((await client.responses.create(**ASKED, instructions="x" * 3000)).id)
            assert (await ended(client, ids[-1])).status == "failed"
        for id in ids[:-1]:
            with pytest.raises(openai.NotFoundError):
                await client.responses.retrieve(id)


async def test_background_response_belongs_to_its_key_and_counts_for_it(tmp_path: Path) -> None:
    keys = KeyFile(tmp_path / "keys.json", alice={"max_concurrent": 1, "requests_per_minute": 2}, bob={})
    async with served(keys.texts["alice"], keys_file=keys.path) as (client, _, pauses):
        begun = await client.responses.create(**ASKED)
        with pytest.raises(openai.RateLimitError, match="sequences running"):
            await client.responses.create(**ASKED)
        bob = client.with_options(api_key=keys.texts["bob"])
        for call in (bob.responses.retrieve, bob.responses.cancel, bob.responses.delete):
            with pytest.raises(openai.NotFoundError):
                await call(begun.id)
        pauses.go_on.set()
        assert (await ended(client, begun.id)).status == "completed"
        await client.responses.create(model=MODEL, input="hi")
        with pytest.raises(openai.RateLimitError, match="its 2 requests per minute"):
            await client.responses.create(model=MODEL, input="hi")


async def test_responses_have_the_log_probabilities_of_their_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("charonia_client.parsing.ResponseParser.parse", scripted_parse)
    body = {"model": MODEL, "input": "hi", "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    async with served() as (client, server, _):
        server.behaviour = says(with_logprobs(part("Hel"), 2, 2), with_logprobs(part("lo", "stop"), 1, 2))
        whole = await client.responses.create(**body)
        events = [event async for event in await client.responses.create(**body, stream=True)]
        plain = await client.responses.create(model=MODEL, input="hi")
    content: Any = whole.output[0].content[0]  # type: ignore[union-attr]
    assert "".join(one.token for one in content.logprobs) == content.text == "Hello"
    assert [len(one.top_logprobs) for one in content.logprobs] == [2, 2, 2] and content.logprobs[0].logprob == -0.5
    deltas: Any = [event for event in events if event.type == "response.output_text.delta"]
    assert [["".join(one.token for one in event.logprobs), event.delta] for event in deltas] == [
        ["Hel"] * 2,
        ["lo"] * 2,
    ]
    done: Any = next(event for event in events if event.type == "response.output_text.done")
    assert len(done.logprobs) == 3
    assert plain.output[0].content[0].logprobs == [] and (whole.top_logprobs, plain.top_logprobs) == (2, 0)  # type: ignore[union-attr]


async def test_log_probabilities_leave_out_reasoning_and_calls() -> None:
    """Each character is a token, in whole responses and in streams."""
    text = '<think>I add.</think>\n\nWell: <tool_call>{"name": "add", "arguments": {}}</tool_call>'
    tool: Any = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}}
    body: Any = {"model": MODEL, "input": "hi", "tools": [tool], "include": ["message.output_text.logprobs"]}
    async with served() as (client, server, _):
        server.formats = {"reasoning": "think", "tool_calls": "hermes", "special": {}}
        server.behaviour = says(with_logprobs(part(text, "stop"), len(text), 0))
        whole = await client.responses.create(**body)
        server.behaviour = says(
            *(with_logprobs(part(one), 1, 0) for one in text), with_logprobs(part("", "stop"), 0, 0)
        )
        events = [event async for event in await client.responses.create(**body, stream=True)]
    streamed: Any = events[-1].response  # type: ignore[union-attr]
    for response in (whole, streamed):
        assert [item.type for item in response.output] == ["reasoning", "message", "function_call"]
        content = response.output[1].content[0]
        assert content.text == "Well:" and "".join(one.token for one in content.logprobs) == "Well:"
