"""A response that is continued by another server: what the client sends there, and how it joins the parts."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import AsyncIterator
from typing import Any
from unittest.mock import AsyncMock

import pytest
from charonia_client import (
    Client,
    GenerateRequest,
    GenerateResponse,
    Moved,
    NotFound,
    Progress,
    Unavailable,
)
from charonia_gateway.endpoints.pool import Pool
from charonia_gateway.engine import Engine
from charonia_gateway.record import Record, current_record
from gateway_in_process import MODEL, ask
from triton_double import Behaviour, Double, error, input_number, input_text, part, progress, says
from tritonclient.grpc import service_pb2 as pb
from waiting import until

HANG_S = 120
WORDS = ["One ", "two ", "three ", "four ", "five."]


def resumed(request: pb.ModelInferRequest) -> tuple[list[int], list[int]] | None:
    """The tensors resumed_ids and resumed_lengths."""
    inputs = {one.name: raw for one, raw in zip(request.inputs, request.raw_input_contents, strict=True)}
    if "resumed_ids" not in inputs:
        return None
    ids, lengths = (inputs[name] for name in ("resumed_ids", "resumed_lengths"))
    return list(struct.unpack(f"<{len(ids) // 4}i", ids)), list(struct.unpack(f"<{len(lengths) // 4}i", lengths))


def chunk(at: int, last: bool, index: int = 0) -> Any:
    made = part(WORDS[at], "stop" if last else "", index)
    made.output_ids[:] = [10 + at]
    made.num_output_tokens = at + 1
    made.queue_ms, made.first_token_ms, made.total_ms, made.cum_log_probs = 1, 2, 3 + at, -at
    return made


def counting(stop_at: int, seen: list[Any], failure: str = "[503] it ends", sequences: int = 1) -> Behaviour:
    """A model that says WORDS in each sequence, after the words that a request has. It fails before word `stop_at`."""

    async def behave(request: pb.ModelInferRequest) -> AsyncIterator[Any]:
        seen.append(resumed(request))
        _, lengths = seen[-1] or ([], [0] * sequences)
        for index, length in enumerate(lengths):
            for at in range(length if length >= 0 else len(WORDS), len(WORDS)):
                if at == stop_at + index:
                    yield error(failure)
                    return
                yield chunk(at, at == len(WORDS) - 1, index)

    return behave


async def read(client: Client, request: GenerateRequest, progress: Progress) -> list[GenerateResponse]:
    return [part async for part in client.generate(request, progress=progress)]


@pytest.mark.parametrize("stream", [True, False])
async def test_the_second_server_gets_the_tokens_and_the_parts_are_joined(stream: bool) -> None:
    async with Double() as one, Double() as two, Client(one.target) as first, Client(two.target) as second:
        seen: list[Any] = []
        one.behaviour, two.behaviour = counting(3, seen), counting(9, seen)
        request = GenerateRequest(text="Count", seed=1, stream=stream)
        progress = Progress(request, joins=True)
        begun = []
        with pytest.raises(Unavailable):
            async for got in first.generate(request, progress=progress):
                begun.append(got)
        assert (progress.num_tokens, progress.num_running, progress.begun) == (3, 1, True)
        parts = begun + await read(second, request, progress)
        assert seen == [None, ([10, 11, 12], [3])]
        assert "".join(one.text for one in parts) == "".join(WORDS)
        assert [token for one in parts for token in one.token_ids] == [10, 11, 12, 13, 14]
        assert len(parts) == 1 or stream
        last = parts[-1]
        assert (last.finish_reason, last.num_output_tokens) == ("stop", 5)
        assert last.timings and (last.timings.queue_ms, last.timings.first_token_ms) == (1, 2)
        assert last.timings.total_ms > 7, "it counts from the first submission"
        assert last.cum_logprob == -2 - 4
        assert progress.num_running == 0


async def test_a_sequence_that_has_ended_is_not_computed_again() -> None:
    async with Double() as one, Double() as two, Client(one.target) as first, Client(two.target) as second:
        seen: list[Any] = []
        one.behaviour, two.behaviour = counting(2, seen, sequences=2), counting(9, seen)
        request = GenerateRequest(text="Count", seed=1, n=2)
        progress = Progress(request)

        async def ends_the_first(sent: pb.ModelInferRequest) -> AsyncIterator[Any]:
            seen.append(None)
            for at in range(len(WORDS)):
                yield chunk(at, at == len(WORDS) - 1)
            yield chunk(0, False, 1)
            yield error("[503] it ends")

        one.behaviour = ends_the_first
        with pytest.raises(Unavailable):
            await read(first, request, progress)
        parts = await read(second, request, progress)
        assert seen == [None, ([10], [-1, 1])]
        assert {one.index for one in parts} == {1}


async def test_move_ends_a_request_after_the_parts_that_have_arrived() -> None:
    async with Double() as one, Client(one.target) as client:
        goes_on = asyncio.Event()

        async def behave(_: pb.ModelInferRequest) -> AsyncIterator[Any]:
            yield chunk(0, False)
            await goes_on.wait()
            yield chunk(4, True)

        one.behaviour = behave
        parts = []
        with pytest.raises(Moved):
            async for got in client.generate(GenerateRequest(text="Count", seed=1), request_id="a"):
                parts.append(got.text)
                client.move("another")
                client.move("a")
                goes_on.set()
        assert parts == [WORDS[0]]


# --- the gateway


class Two:
    """A gateway's pool in front of two servers with these behaviours."""

    def __init__(self, first: Behaviour, second: Behaviour, **options: Any) -> None:
        self.doubles = [Double(), Double()]
        self.behaviours = [first, second]
        self.options = {"check_interval_s": 0.05, "resume_timeout_s": HANG_S, **options}
        self.resumes = 0

    async def __aenter__(self) -> Two:
        for double in self.doubles:
            await double.__aenter__()
        self.pool = Pool([one.target for one in self.doubles], on_resume=self._count, **self.options)
        await self.pool.__aenter__()
        await until(lambda: all(one.usable for one in self.pool.endpoints))
        # The first request goes to the first server.
        for double, behaviour in zip(self.doubles, self.behaviours, strict=True):
            double.behaviour = behaviour
        self.pool.endpoints[1].turn = 1
        self.record = Record()
        current_record.set(self.record)
        return self

    def _count(self) -> None:
        self.resumes += 1

    async def __aexit__(self, *_: object) -> None:
        await self.pool.__aexit__()
        for double in self.doubles:
            await double.__aexit__()

    async def text(self, **fields: Any) -> str:
        given = {} if "messages" in fields else {"text": "Count"}
        parts = Engine(self.pool).answer(GenerateRequest(**given, **fields), "id")
        return "".join([part.text async for part in parts])


@pytest.mark.parametrize("stream", [True, False])
async def test_another_server_continues(stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    seen: list[Any] = []
    async with Two(counting(2, seen), counting(9, seen)) as two:
        assert await two.text(stream=stream) == "".join(WORDS)
        assert seen == [None, ([10, 11], [2])]
        assert (two.resumes, two.record.num_resumes) == (1, 1)
    assert f"continues at server {two.doubles[1].target} after 2 tokens: it ends" in caplog.text


async def test_both_servers_show_the_time_of_the_request() -> None:
    async with Two(counting(2, []), counting(9, [])) as two:
        two.record.prompt_time = "2020-12-31T23:59:59"
        await two.text(messages=[{"role": "user", "content": "Count"}])
        sent = [input_text(request, "prompt_time") for double in two.doubles for request in double.requests]
        assert sent == ["2020-12-31T23:59:59"] * 2


async def test_other_server_begins_again_after_progress_of_the_prompt() -> None:
    seen: list[Any] = []
    two = Two(says(progress(3), error("[503] it ends")), counting(9, seen), resume_timeout_s=0)
    two.doubles[1].deterministic = False
    async with two:
        assert await two.text(prompt_progress=True) == "".join(WORDS)
        assert (seen, two.resumes) == ([None], 0)


async def test_chat_stream_has_progress_of_the_prompt() -> None:
    async def behave(request: pb.ModelInferRequest) -> AsyncIterator[Any]:
        if input_number(request, "prompt_progress"):
            yield progress(2)
            yield progress(4)
        yield part("Hi", "stop")

    body = {"model": MODEL, "messages": "hi", "stream": True}
    for asked in (True, False):
        answer = await ask("/v1/chat/completions", {**body, "return_progress": asked}, behaviour=behave)
        lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
        chunks = [json.loads(line) for line in lines]
        found = [one["prompt_progress"] for one in chunks if "prompt_progress" in one]
        numbers = {"total": 5, "cache": 1, "time_ms": 24}
        assert found == ([{**numbers, "processed": 2}, {**numbers, "processed": 4}] if asked else [])
        deltas = [one["choices"][0]["delta"] for one in chunks]
        assert deltas[0]["role"] == "assistant" and sum("role" in delta for delta in deltas) == 1
        assert "".join(delta.get("content") or "" for delta in deltas) == "Hi"


@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_moves_at_most_16_times(stream: bool) -> None:
    seen: list[Any] = []

    async def one_token(request: pb.ModelInferRequest) -> AsyncIterator[Any]:
        seen.append(resumed(request))
        yield chunk(0, False)
        yield error("[503] it ends")

    async with Two(one_token, one_token) as two:
        with pytest.raises(Unavailable, match="it ends"):
            await two.text(stream=stream)
    assert len(seen) == 17


async def test_a_full_server_is_asked_until_it_has_room() -> None:
    seen: list[Any] = []
    full = counting(2, seen, "[429] it is full; retry after 1 s")
    behaviours = iter([counting(2, seen), full, full, full, full, counting(9, seen)])
    async with Two(lambda request: next(behaviours)(request), lambda request: next(behaviours)(request)) as two:
        assert await two.text() == "".join(WORDS)
        assert (len(seen), two.resumes) == (6, 1)


async def test_a_request_that_breaks_every_server_ends_with_the_first_error() -> None:
    seen: list[Any] = []
    async with Two(counting(2, seen, "[503] the first"), counting(2, seen, "[503] the second")) as two:
        with pytest.raises(Unavailable, match="the first"):
            await two.text()
        assert len(seen) == 3, "without a new token, three servers are tried"


@pytest.mark.parametrize("different", [{"arithmetic": b"gpu"}, {"deterministic": False}])
async def test_server_with_another_fingerprint_does_not_continue(
    different: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[Any] = []
    two = Two(counting(2, seen), counting(9, seen), resume_timeout_s=0)
    for name, value in different.items():
        setattr(two.doubles[1], name, value)
    async with two:
        with pytest.raises(Unavailable, match="it ends"):
            await two.text()
        assert seen == [None]
        await asyncio.wait_for(two.pool.endpoints[0].checked.wait(), HANG_S)
    async with two:
        assert await two.text(stream=False) == "".join(WORDS)
        assert seen == [None, None, None], "the client has nothing yet, so it begins again"
        await until(lambda: "the servers differ in weights, settings or processor" in caplog.text)


@pytest.mark.parametrize("fields", [{"session_id": "s", "interactive": True}, {"stream": False, "best_of": 2}])
async def test_turns_and_the_best_of_several_are_not_continued(fields: dict[str, Any]) -> None:
    seen: list[Any] = []
    async with Two(counting(2, seen), counting(2, seen)) as two:
        with pytest.raises(Unavailable, match="it ends"):
            await two.text(**fields)
        assert set(map(str, seen)) == {"None"}


@pytest.mark.parametrize("stream", [True, False])
async def test_the_only_server_continues_after_its_restart(stream: bool) -> None:
    seen: list[Any] = []
    async with Double() as one, Pool([one.target], check_interval_s=0.05, resume_timeout_s=HANG_S) as pool:
        await until(lambda: pool.usable)
        one.behaviour = counting(2, seen)

        async def restart() -> None:
            while not seen:
                await asyncio.sleep(0.01)
            await one.go()
            async with Double(port=int(one.target.rpartition(":")[2])) as again:
                again.behaviour = counting(9, seen)
                await over.wait()

        over = asyncio.Event()
        restarting = asyncio.create_task(restart())
        answer = Engine(pool).answer(GenerateRequest(text="Count", stream=stream), "id")
        assert "".join([part.text async for part in answer]) == "".join(WORDS)
        over.set()
        await restarting
        assert seen == [None, ([10, 11], [2])]


async def test_server_with_new_weights_does_not_continue() -> None:
    seen: list[Any] = []
    async with Two(counting(2, seen), counting(9, seen), resume_timeout_s=0, check_interval_s=HANG_S) as two:
        reloaded = two.doubles[1]
        reloaded.info = {"fingerprint": "other weights"}
        reloaded.subscriptions.clear()
        with pytest.raises(Unavailable, match="it ends"):
            await two.text()
        assert (seen, len(reloaded.requests)) == ([None], 1), "it received the request and did not take it"
        two.pool.endpoints[0].failed("it is away")
        answer = await two.pool.begin(GenerateRequest(text="Count"), "another")
        now = await two.pool.endpoints[1].client.model_info()
        assert answer.fingerprint == now["fingerprint"] != two.pool.endpoints[1].promise
        await answer.aclose()


async def test_stream_without_a_server_that_has_its_adapter_ends_with_its_name() -> None:
    async with Two(counting(2, []), counting(9, []), resume_timeout_s=0) as two:
        two.doubles[0].adapters["engine"] = {"sql": "/sql"}
        engine = Engine(two.pool).with_adapter("sql=of/sql", AsyncMock())
        parts = engine.answer(GenerateRequest(text="Count"), "id")
        with pytest.raises(NotFound, match="the LoRA adapter 'sql' is not loaded any more"):
            [part async for part in parts]


class Moving(Two):
    """A request of a session whose first server has failed after two tokens. The other server is away."""

    async def __aenter__(self) -> Moving:
        await super().__aenter__()
        self.other = self.pool.endpoints[1]
        self.other.failed("it is away")
        request = GenerateRequest(text="Count", session_id="s")
        self.parts = Engine(self.pool).answer(request, "id", may_be_cancelled=True)
        assert [(await anext(self.parts)).text for _ in range(2)] == WORDS[:2]
        self.next = asyncio.create_task(anext(self.parts))
        await until(lambda: self.pool.endpoints[0].requests == 0)
        return self


def moving() -> Moving:
    return Moving(counting(2, []), counting(9, []), check_interval_s=HANG_S, resume_timeout_s=HANG_S)


async def test_a_stop_request_ends_a_response_that_waits_for_a_server() -> None:
    async with moving() as move:
        await move.pool.stop_session("s")
        assert (await move.next).finish_reason == "cancelled"
        assert [part async for part in move.parts] == [] and not move.doubles[1].requests


async def test_a_stop_request_that_overtakes_a_moved_request_ends_it() -> None:
    async with moving() as move:
        server = move.doubles[1]
        server.takes.clear()
        for _ in range(2):
            move.other.passed()
        await until(lambda: server.requests)
        await move.pool.stop_session("s")
        assert (await move.next).finish_reason == "cancelled"
        await until(lambda: server.refused)
        server.takes.set()


async def test_a_client_that_leaves_during_a_move_ends_the_request() -> None:
    async with moving() as move:
        move.next.cancel()
        with pytest.raises(asyncio.CancelledError):
            await move.next
        await move.parts.aclose()
        for _ in range(2):
            move.other.passed()
        assert not move.pool.answers and [one.requests for one in move.pool.endpoints] == [0, 0]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("field", ["timings", "timings_per_token"])
async def test_timings_of_a_stream_count_resumes(path: str, field: str) -> None:
    behaviours = iter([counting(2, []), counting(9, [])])
    body = {"model": MODEL, "stream": True, field: True}
    body |= {"prompt": "Count"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "Count"}]}
    response = await ask(
        path, body, lambda sent: next(behaviours)(sent), resume_timeout_s=HANG_S, check_interval_s=0.05
    )
    chunks = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    resumes = [chunk["timings"].get("resumes") for chunk in chunks if chunk.get("timings")]
    assert resumes[-1] == 1
    if field == "timings_per_token":
        assert resumes[0] is None


async def test_request_waits_for_another_server_before_its_first_token() -> None:
    seen: list[Any] = []
    async with Two(counting(0, seen), counting(9, seen)) as two:
        other = two.pool.endpoints[1]
        other.failed("it is away for a moment")
        assert await two.text() == "".join(WORDS)
        assert (seen[0], seen[-1]) == (None, None)
        assert other.up
