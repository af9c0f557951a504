"""The client's subscription, against a scripted server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, Literal

import pytest
from charonia_client import (
    BadRequest,
    Client,
    ConnectionLost,
    DeadlineExceeded,
    GenerateRequest,
    GenerateResponse,
    Overloaded,
    ServerError,
    Unavailable,
    Unresponsive,
    stream,
)
from charonia_client.progress import Progress
from charonia_client.stream import Stream
from charonia_client.tensors import encode
from charonia_client.turns import Turns
from free_ports import free_ports
from triton_double import (
    Double,
    error,
    input_number,
    input_text,
    part,
    process_that_dies_of_requests,
    with_logprobs,
)
from tritonclient.grpc import service_pb2 as pb
from waiting import HANG_S, until

Chunks = AsyncIterator[Any]


async def letters(request: pb.ModelInferRequest) -> Chunks:
    """Yield the text of the request, one letter per part."""
    text = input_text(request, "text_input")
    for letter in text[:-1]:
        yield part(letter)
        await asyncio.sleep(0)
    yield part(text[-1], "stop")


async def begin(request: pb.ModelInferRequest) -> Chunks:
    """Yield one part, and no end."""
    yield part("begun")


@pytest.fixture
async def double() -> AsyncIterator[Double]:
    async with Double() as one:
        yield one


@pytest.fixture
async def client(double: Double) -> AsyncIterator[Client]:
    async with Client(double.target) as one:
        yield one


async def read(client: Client, text: str, **fields: object) -> list[GenerateResponse]:
    return [one async for one in client.generate(GenerateRequest(text=text, **fields))]  # type: ignore[arg-type]


def joined(parts: list[GenerateResponse]) -> str:
    return "".join(one.text for one in parts)


async def test_many_responses_arrive_on_one_stream() -> None:
    texts = [f"the answer to question {number}" for number in range(40)]
    async with Double() as double:
        double.behaviour = letters
        async with Client(double.target) as client:
            answers = await asyncio.wait_for(asyncio.gather(*(read(client, text) for text in texts)), HANG_S)
            assert double.opened == 1
            assert len(double.subscriptions) == 1
        assert not double.subscriptions, "it is ended with the client"
    for text, parts in zip(texts, answers, strict=True):
        assert joined(parts) == text
        assert [one.finish_reason for one in parts] == [None] * (len(parts) - 1) + ["stop"]
        assert [one.num_input_tokens for one in parts] == [5] * len(parts)
    for request in double.requests:
        assert [output.name for output in request.outputs] == ["finish_reason"]


def logprobs_of(parts: list[GenerateResponse]) -> list[tuple[float, list[tuple[int, float, bytes | None]]]]:
    """Return the log probabilities of each token."""
    rows = [row for one in parts for row in zip(one.logprobs, one.top_logprobs, strict=True)]
    return [(logprob, [(top.id, top.logprob, top.token) for top in tops]) for logprob, tops in rows]


@pytest.mark.parametrize("tops", [0, 1, 20])
async def test_log_probabilities_have_tokens_and_top_tokens(double: Double, client: Client, tops: int) -> None:
    async def answer(request: pb.ModelInferRequest) -> Chunks:
        yield with_logprobs(part("ab"), 2, tops)
        yield with_logprobs(part("cde", "length"), 3, tops)

    double.behaviour = answer
    parts = await read(client, "a", logprobs=tops)
    assert [one.tokens for one in parts] == [[b"a", b"b"], [b"c", b"d", b"e"]]
    row = [(at, -0.5, str(at).encode()) for at in range(tops)]
    assert logprobs_of(parts)[0][1] == row
    assert [len(tops) for _, tops in logprobs_of(parts)] == [tops] * 5


async def test_prompt_log_probabilities_arrive_in_the_first_part(double: Double, client: Client) -> None:
    async def answer(request: pb.ModelInferRequest) -> Chunks:
        one = part("ab", "stop")
        one.prompt_ids[:] = [7, 8, 9]
        one.prompt_log_probs[:] = [-1, -2]
        one.prompt_token_bytes[:], one.prompt_token_special[:] = [b"<s>", b"8", b"9"], [True, False, False]
        one.prompt_top_log_prob_ids[:] = [1, 2, 3, 4]
        one.prompt_top_token_bytes[:] = [b"1", b"2", b"3", b"4"]
        one.prompt_top_log_probs[:] = [-1, -2, -3, -4]
        yield one

    double.behaviour = answer
    (one,) = await read(client, "a", prompt_logprobs=2)
    assert (one.prompt_ids, one.prompt_logprobs) == ((7, 8, 9), (-1, -2))
    assert (one.prompt_tokens, one.prompt_special) == ([b"<s>", b"8", b"9"], [True, False, False])
    tops = [[(top.id, top.logprob, top.token) for top in row] for row in one.prompt_top_logprobs]
    assert tops == [[(1, -1, b"1"), (2, -2, b"2")], [(3, -3, b"3"), (4, -4, b"4")]]


async def test_metadata_is_sent_with_each_request() -> None:
    async with Double() as double, Client(double.target, metadata=lambda: [("traceparent", "00-1-1-01")]) as client:
        assert joined(await read(client, "a")) == double.target
        assert [dict(one)["traceparent"] for one in double.metadata] == ["00-1-1-01"]


def thinks(text: str, **fields: Any) -> GenerateRequest:
    return GenerateRequest(messages=[{"role": "user", "content": text}], parsed=True, **fields)


async def in_thought(request: pb.ModelInferRequest) -> Chunks:
    """Yield a response that starts in the reasoning, one letter per part, with the requested log probabilities."""
    text = "They think.</think>Paris"
    for at, letter in enumerate(text):
        one = part(letter, "stop" if at == len(text) - 1 else "")
        one.in_reasoning = at == 0
        if input_number(request, "return_log_probs"):
            one = with_logprobs(one, 1, input_number(request, "top_logprobs") or 0)
        yield one
        await asyncio.sleep(0)


async def test_model_info_joins_the_facts_of_preprocessing_and_engine(double: Double, client: Client) -> None:
    found = []
    for change in ({}, {"info": {"fingerprint": "b"}}, {"arithmetic": b"avx2"}, {"deterministic": False}):
        vars(double).update(change)
        for number in range(2):
            if number == 0:
                double.asked.clear()
            info = await client.model_info()
            assert info["deterministic"] is double.deterministic and double.asked == ["model_info"], "once"
        found.append(info["fingerprint"])
        assert client._subscription is not None
        await client._subscription.end(HANG_S)  # as when the model is loaded again
    assert len(set(found)) == len(found)


async def test_responses_are_parsed_by_the_formats_of_the_model(double: Double, client: Client) -> None:
    double.behaviour, double.formats = in_thought, {"tool_calls": None, "reasoning": "think", "special": {}}

    async def ask(**fields: Any) -> list[GenerateResponse]:
        return [one async for one in client.generate(thinks("a", **fields))]

    answers = await asyncio.wait_for(asyncio.gather(*(ask() for _ in range(8)), ask(logprobs=2)), HANG_S)
    assert double.asked == ["model_info", "answer_formats"], "once each"
    plain = await read(client, "a")
    for parts in answers:
        assert joined(parts) == "They think.</think>Paris"
        found = ("".join(one.reasoning for one in parts), "".join(one.content for one in parts))
        assert found == ("They think.", "Paris")
        assert 0 < parts[-1].num_reasoning_tokens < len(joined(parts))
    assert logprobs_of(answers[-1]) == [(-0.5, [(0, -0.5, b"0"), (1, -0.5, b"1")])] * len(joined(answers[-1]))
    assert joined(plain) == joined(answers[0]) and not any(one.content for one in plain)


async def test_failed_request_for_formats_is_repeated(double: Double, client: Client) -> None:
    double.behaviour, double.formats = in_thought, {"reasoning": "think"}
    double.unloaded.add("preprocessing")
    with pytest.raises(Unavailable, match="shutting down"):
        await anext(client.generate(thinks("a")))
    assert not double.requests
    double.unloaded.clear()
    parts = [one async for one in client.generate(thinks("a"))]
    assert "".join(one.content for one in parts) == "Paris"


async def test_unknown_answer_format_fails_the_request(double: Double, client: Client) -> None:
    double.formats = {"reasoning": "of tomorrow"}
    with pytest.raises(ServerError, match="does not know the format 'of tomorrow'"):
        await anext(client.generate(thinks("a")))
    assert joined(await read(client, "plain")) == double.target


@pytest.mark.parametrize(
    ("refusal", "kind"),
    [("[429] there are 1024 subscriptions; retry after 1 s", Overloaded), ("[503] shutting down", Unavailable)],
)
async def test_refused_subscription_fails_its_requests_only(
    double: Double, client: Client, refusal: str, kind: type[Exception]
) -> None:
    double.behaviour, double.refusal = letters, refusal
    failed = await asyncio.gather(*(read(client, "a") for _ in range(4)), return_exceptions=True)
    assert {type(one) for one in failed} == {kind} and not double.requests
    double.refusal = ""
    assert joined(await read(client, "later")) == "later"


async def test_responses_of_one_request_have_their_index(double: Double, client: Client) -> None:
    async def answer(request: pb.ModelInferRequest) -> Chunks:
        for index in (0, 1, 0, 1):
            yield part(f"{index}", index=index)
        yield part("", "length", index=1)
        yield part("", "stop", index=0)

    double.behaviour = answer
    parts = await read(client, "a", n=2)
    assert [(one.index, one.text, one.finish_reason) for one in parts] == [
        *((0, "0", None), (1, "1", None), (0, "0", None), (1, "1", None)),
        *((1, "", "length"), (0, "", "stop")),
    ]


@pytest.mark.parametrize(("text", "kind"), [("[504] late", DeadlineExceeded), ("[400] no", BadRequest)])
async def test_error_of_a_request_leaves_the_others(
    double: Double, client: Client, text: str, kind: type[Exception]
) -> None:
    async def answer(request: pb.ModelInferRequest) -> Chunks:
        yield part("begun")
        yield error(text) if input_text(request, "text_input") == "bad" else part("", "stop")

    double.behaviour = answer
    with pytest.raises(kind, match=text[6:]):
        await read(client, "bad")
    assert joined(await read(client, "good")) == "begun"
    assert double.opened == 1
    assert double.actions == []


async def test_error_of_the_call_fails_the_request(double: Double, client: Client) -> None:
    double.unloaded.add("ensemble")
    with pytest.raises(Unavailable):
        await read(client, "a")
    double.unloaded.clear()
    assert joined(await read(client, "a")) == double.target


@pytest.mark.parametrize("parsed", [None, True])
@pytest.mark.parametrize(("tops", "most"), [(None, 4096), (0, 4096), (5, 4096), (5, 100)])
async def test_chunks_for_a_slow_reader_are_joined(
    double: Double,
    client: Client,
    tops: int | None,
    most: int,
    parsed: Literal[True] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stream, "_MAX_JOINED_LOGPROBS", most)
    text = "ÿ" * 300

    async def answer(request: pb.ModelInferRequest) -> Chunks:
        for number, letter in enumerate(text):
            one = part(letter)
            if tops is not None:
                with_logprobs(one, 1, tops)
                one.output_log_probs[0] = -number
            one.output_ids[0] = number
            one.in_reasoning = number == 0
            yield one
            await asyncio.sleep(0)
        ended = part("", "cancelled")
        del ended.output_ids[:], ended.token_bytes[:]
        yield ended

    double.behaviour, double.formats = answer, {"reasoning": "think"}
    messages = [{"role": "user", "content": "a"}]
    request = GenerateRequest(messages=messages, logprobs=tops, parsed=parsed)
    async with contextlib.aclosing(client.generate(request)) as parts:
        first = await anext(parts)
        await read(client, "b", logprobs=tops)  # its last chunk arrives after the whole other response
        rest = [one async for one in parts]
    everything = [first, *rest]
    assert len(rest) <= 65 + (0 if tops is None else 300 * (1 + tops) // most)
    assert [id for one in everything for id in one.token_ids] == list(range(300))
    assert (joined(everything), "".join(one.reasoning for one in everything)) == (text, text if parsed else "")
    assert b"".join(token for one in everything for token in one.tokens) == text.encode()
    assert rest[-1].finish_reason == "cancelled"
    if tops is not None:
        assert max(len(one.token_ids) for one in everything) * (1 + tops) < most + 1 + tops
        assert [logprob for logprob, _ in logprobs_of(everything)] == [-number for number in range(300)]
        assert {len(row) for _, row in logprobs_of(everything)} == {tops}


async def test_joined_chunks_omit_the_leading_space(
    double: Double, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "_READ_AHEAD", 1)

    async def answer(request: pb.ModelInferRequest) -> Chunks:
        for spelled, begin in ((b"", 0), (b" a", 1), (b"b", 0), (b"c", 0)):
            one = part(spelled[begin:].decode(), "stop" if spelled == b"c" else "")
            one.token_bytes[0], one.text_begin, one.text_end = spelled, begin, len(spelled)
            yield one

    double.behaviour = answer
    parts = client.generate(GenerateRequest(text="a"))
    double.deliveries.clear()  # all chunks come in one delivery
    asked = asyncio.ensure_future(anext(parts))
    await until(lambda: double.requests)
    double.deliveries.set()
    everything = [await asked, *[one async for one in parts]]
    assert joined(everything) == "abc"
    assert b"".join(token for one in everything for token in one.tokens) == b"abc"


async def test_leaving_cancels_only_this_request(double: Double, client: Client) -> None:
    async def endless(request: pb.ModelInferRequest) -> Chunks:
        yield part("begun")
        while ("cancel", request.id) not in double.actions:
            await asyncio.sleep(0.001)
        yield part("", "cancelled")

    double.behaviour = endless
    async with contextlib.aclosing(client.generate(GenerateRequest(text="a"), request_id="left")) as parts:
        await anext(parts)
    double.behaviour = letters
    assert joined(await read(client, "other")) == "other"
    await until(lambda: double.actions)
    assert set(double.actions) == {("cancel", "left")}
    assert double.opened == 1


async def test_a_request_that_reaches_the_engine_late_is_rejected_there(double: Double, client: Client) -> None:
    double.takes.clear()  # preprocessing is busy
    asked = asyncio.create_task(read(client, "late"))
    await until(lambda: double.requests)
    asked.cancel()
    await until(lambda: double.actions)
    ((subscription, key),) = double.refused
    assert subscription in double.subscriptions and key == 1
    double.takes.set()
    await client.until_over(double.requests[0].id)
    assert len(double.actions) == 1


async def test_requests_wait_in_the_client_while_preprocessing_is_busy(double: Double, client: Client) -> None:
    double.info = {"instances": 3}
    await client.model_info()
    double.takes.clear()
    asked = [asyncio.create_task(read(client, "x")) for _ in range(20)]
    await until(lambda: len(double.requests) == 16)
    left = asyncio.create_task(read(client, "left"))
    large = [asyncio.create_task(read(client, "l" * (1 << 17))) for _ in range(3)]
    await until(lambda: len(double.requests) == 18)  # one of three processes gets no large request
    left.cancel()
    await asyncio.wait((left,))
    double.takes.set()
    await asyncio.gather(*asked, *large)
    assert len(double.requests) == 23 and not double.actions  # the server does not know the request that left


async def test_closing_the_client_ends_its_requests() -> None:
    async def endless(request: pb.ModelInferRequest) -> Chunks:
        yield part("begun")
        await asyncio.Event().wait()

    async with Double() as double:
        double.behaviour = endless
        client = Client(double.target)
        parts = client.generate(GenerateRequest(text="a"))
        await anext(parts)
        await client.close(timeout_s=0.2)
        with pytest.raises(Unavailable, match="the client was closed"):
            await anext(parts)
        await until(lambda: not double.subscriptions)  # the server receives the end later


async def test_ended_subscription_is_opened_again(double: Double, client: Client) -> None:
    double.behaviour = begin
    parts = client.generate(GenerateRequest(text="a"))
    await anext(parts)
    (chunks,) = double.subscriptions.values()
    chunks.put_nowait(None)
    with pytest.raises(Unavailable, match="ended the subscription"):
        await anext(parts)
    double.behaviour = letters
    assert joined(await read(client, "again")) == "again"
    assert double.opened == 2


async def test_unknown_subscription_takes_no_new_requests(double: Double, client: Client) -> None:
    double.behaviour = begin
    parts = client.generate(GenerateRequest(text="a"))
    await anext(parts)
    ((name, chunks),) = double.subscriptions.items()
    del double.subscriptions[name]  # as if the model was loaded again
    double.behaviour = letters
    assert joined(await read(client, "sent again")) == "sent again"
    assert joined(await read(client, "another")) == "another"
    assert double.opened == 2
    ended = part("ended", "stop")
    ended.subscription_key = 1
    chunks.put_nowait(ended)
    assert joined([one async for one in parts]) == "ended", "what had begun goes on"
    chunks.put_nowait(None)


async def test_request_without_known_subscription_is_sent_twice(double: Double, client: Client) -> None:
    double.behaviour = letters
    assert joined(await read(client, "a")) == "a"
    double.forgets_subscriptions = True
    with pytest.raises(Unavailable, match="there is no subscription"):
        await read(client, "b")
    assert double.opened == 2
    double.forgets_subscriptions = False
    assert joined(await read(client, "c")) == "c"
    assert double.opened == 3


@pytest.mark.parametrize("taken", [False, True])
async def test_request_to_a_reloaded_model_is_sent_again_if_not_taken(
    double: Double, client: Client, taken: bool
) -> None:
    async def silent(request: pb.ModelInferRequest) -> Chunks:
        for _ in ():
            yield part("")

    double.behaviour = letters
    assert joined(await read(client, "a")) == "a"
    old = client._subscription
    assert old
    double.end_of_subscriptions = "[503] model 'engine' was loaded again"
    held = double.tells if taken else double.takes
    held.clear()
    double.behaviour = silent if taken else letters
    asked = asyncio.create_task(read(client, "b"))
    await until(lambda: len(double.requests) == 2)
    double.subscriptions[old.name].put_nowait(None)
    await until(lambda: old.over)
    held.set()
    if taken:
        with pytest.raises(Unavailable, match="was loaded again"):
            await asked
    else:
        assert joined(await asked) == "b"
    assert double.opened == 1 + (not taken)
    assert len(double.requests) == 2 + (not taken)


async def test_streams_of_a_lost_subscription_have_separate_errors(double: Double, client: Client) -> None:
    double.behaviour = begin
    many = [client.generate(GenerateRequest(text="a")) for _ in range(3)]
    for parts in many:
        await anext(parts)
    (chunks,) = double.subscriptions.values()
    chunks.put_nowait(None)
    errors = await asyncio.gather(*(anext(parts) for parts in many), return_exceptions=True)
    assert {(type(one), str(one)) for one in errors} == {(Unavailable, str(errors[0]))}
    assert len({id(one) for one in errors}) == 3


@pytest.mark.slow
async def test_unexpected_exception_of_a_call_ends_its_request(double: Double, client: Client) -> None:
    async def broken(message: pb.ModelInferRequest, **_: Any) -> Chunks:
        raise AttributeError("no answer")
        yield

    await read(client, "a")
    assert client._subscription
    client._subscription.call = broken
    with pytest.raises(ServerError, match="no answer"):
        await asyncio.wait_for(read(client, "a"), HANG_S)


async def test_complete_response_ignores_later_errors(double: Double, client: Client) -> None:
    double.behaviour = letters
    await read(client, "a")
    request = GenerateRequest(text="ab")
    made = Stream(client._open_subscription, request, encode(request, "id", "ensemble"), Progress(request), Turns(1))
    await made.task
    made.lose(ConnectionLost("late"))
    made.fail(DeadlineExceeded("late"))
    parts = [await made.next() for _ in range(3)]
    assert [one and one.text for one in parts] == ["a", "b", None]


async def test_killed_server_loses_all_responses() -> None:
    with process_that_dies_of_requests() as (_, target):
        async with Client(target) as client:
            outcomes = await asyncio.wait_for(
                asyncio.gather(*(read(client, "a") for _ in range(8)), return_exceptions=True), HANG_S
            )
    assert {type(one) for one in outcomes} <= {ConnectionLost, Unavailable}


async def test_unreachable_server_is_unavailable() -> None:
    async with Client(f"127.0.0.1:{free_ports(1)[0]}") as client:
        with pytest.raises(Unavailable):
            await read(client, "a")


async def test_hanging_server_is_unresponsive(double: Double, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("charonia_client.client._PROBE_INTERVAL_S", 0.05)

    def patience(seconds: float) -> None:
        monkeypatch.setattr("charonia_client.client._PROBE_TIMEOUT_S", seconds)

    patience(HANG_S / 4)  # the client probes healthy servers too
    assert joined(await read(client, "a")) == double.target
    left = client._subscription
    assert left
    del double.subscriptions[left.name]
    assert joined(await read(client, "a")) == double.target
    double.fall_asleep()
    patience(0.2)
    with pytest.raises(Unresponsive):
        await asyncio.wait_for(read(client, "a"), HANG_S)
    await asyncio.wait_for(asyncio.wait((left.task,)), HANG_S)
    patience(HANG_S / 4)
    double.wake_up()
    assert joined(await read(client, "a")) == double.target
    assert double.opened == 3


async def test_read_deliveries_are_acknowledged(
    double: Double, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("charonia_client.subscription._ACKNOWLEDGED_DELIVERIES", 4)
    double.behaviour = letters
    for number in range(12):
        await read(client, f"question {number}")
    await until(lambda: double.read and double.read[-1] >= 8)
    assert double.read == sorted(double.read)


async def test_invalid_delivery_ends_the_subscription(double: Double, client: Client) -> None:
    async def begin(request: pb.ModelInferRequest) -> Chunks:
        yield part("begun")
        ((_, chunks),) = double.subscriptions.items()
        chunks.put_nowait(b"\x08")

    double.behaviour = begin
    with pytest.raises(ServerError, match="sent an invalid delivery"):
        await asyncio.wait_for(read(client, "a"), HANG_S)
    double.behaviour = letters
    assert joined(await read(client, "again")) == "again"
    assert double.opened == 2
