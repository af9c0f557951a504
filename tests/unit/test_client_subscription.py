"""The client's answers by a subscription, against a server that does as it is told."""

from __future__ import annotations

import asyncio
import contextlib
import json
import struct
import tracemalloc
from collections.abc import AsyncIterator
from typing import Literal

import pytest
from charonia_answers import fingerprint
from charonia_client import (
    BadRequest,
    Client,
    ConnectionLost,
    DeadlineExceeded,
    GenerateRequest,
    GenerateResponse,
    ServerError,
    Unavailable,
    Unresponsive,
    subscription,
)
from charonia_client.subscription import NotOffered, SubscribedStream, TokenPart, unpack
from charonia_client.tensors import encode
from free_ports import free_ports
from triton_double import (
    Double,
    chunk,
    error,
    input_number,
    input_text,
    parsed,
    part,
    process_that_dies_of_requests,
    unknown_tensor,
    with_logprobs,
)
from tritonclient.grpc import service_pb2 as pb

HANG_S = 120
Responses = AsyncIterator[pb.ModelStreamInferResponse]


async def letters(request: pb.ModelInferRequest) -> Responses:
    """The request's text, a letter at a time."""
    text = input_text(request, "text_input")
    for letter in text[:-1]:
        yield part(letter)
        await asyncio.sleep(0)
    yield part(text[-1], "stop")


async def read(client: Client, text: str, **fields: object) -> list[GenerateResponse]:
    return [one async for one in client.generate(GenerateRequest(text=text, **fields))]  # type: ignore[arg-type]


def joined(parts: list[GenerateResponse]) -> str:
    return "".join(one.text for one in parts)


async def test_many_answers_come_by_one_stream() -> None:
    texts = [f"the answer to question {number}" for number in range(40)]
    async with Double() as double:
        double.behaviour = letters
        async with Client(double.target, subscribe=True) as client:
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


async def test_what_a_subscription_does_not_carry_has_calls_of_its_own() -> None:
    async def answer(request: pb.ModelInferRequest) -> Responses:
        yield parsed("?", reason="stop")

    ways: list[str] = []
    async with Double() as double, Client(double.target, subscribe=True, on_way=ways.append) as client:
        double.behaviour = answer
        for fields in ({"prompt_logprobs": 1}, {"logprobs": 1, "prompt_logprobs": 1}):
            await read(client, "a", **fields)
        assert double.opened == 0
        double.behaviour = letters
        await read(client, "a")
        assert ways == ["call"] * 2 + ["subscription"]
    metadata = [("traceparent", "00-1-1-01")]
    async with Double() as double, Client(double.target, subscribe=True, metadata=lambda: metadata) as client:
        assert joined(await read(client, "a")) == double.target
        assert double.opened == 0


async def scored_letters(request: pb.ModelInferRequest) -> Responses:
    """As letters(), with log probabilities as they were asked for."""
    tops = input_number(request, "top_logprobs") or 0
    async for answer in letters(request):
        yield with_logprobs(answer, 1, tops)


def logprobs_of(parts: list[GenerateResponse]) -> list[tuple[float, list[tuple[int, float, bytes | None]]]]:
    """By token."""
    rows = [row for one in parts for row in zip(one.logprobs, one.top_logprobs, strict=True)]
    return [(logprob, [(top.id, top.logprob, top.token) for top in tops]) for logprob, tops in rows]


@pytest.mark.parametrize("tops", [0, 1, 20])
async def test_log_probabilities_come_as_by_calls(tops: int) -> None:
    async def answer(request: pb.ModelInferRequest) -> Responses:
        yield with_logprobs(part("ab"), 2, tops)
        yield with_logprobs(part("cde", "length"), 3, tops)

    ways: list[str] = []
    async with (
        Double() as double,
        Client(double.target) as by_call,
        Client(double.target, subscribe=True, on_way=ways.append) as client,
    ):
        double.behaviour = answer
        answers = [
            [
                (one.token_ids, one.logprobs, one.top_logprobs, one.tokens)
                for one in await read(which, "a", logprobs=tops)
            ]
            for which in (by_call, client)
        ]
    assert answers[0] == answers[1]
    assert [len(row) for _, _, rows, _ in answers[1] for row in rows] == [tops] * 5
    assert ways == ["subscription"]


async def test_answers_with_log_probabilities_are_read_for_calls_and_reasoning_too() -> None:
    async with Double() as double, Client(double.target, subscribe=True) as client:
        double.behaviour = scored_letters
        double.options, double.formats = json.dumps(OPTIONS), {"parser": fingerprint()}
        text = "They think.</think>Paris"
        parts = await read(client, text, parsed=True, logprobs=2)
    assert (joined(parts), "".join(one.content for one in parts)) == (text, "Paris")
    assert logprobs_of(parts) == [(-0.5, [(0, -0.5, b"0"), (1, -0.5, b"1")])] * len(text)


async def test_a_server_whose_subscriptions_have_no_log_probabilities_is_asked_for_these_by_calls() -> None:
    ways: list[str] = []
    refusals: list[str] = []
    told = {"on_way": ways.append, "on_refusal": refusals.append}
    async with Double() as double, Client(double.target, subscribe=True, **told) as client:  # type: ignore[arg-type]
        double.behaviour, double.no_logprobs = scored_letters, True
        answers = await asyncio.wait_for(asyncio.gather(*(read(client, "abc", logprobs=1) for _ in range(8))), HANG_S)
        for parts in answers:
            assert logprobs_of(parts) == [(-0.5, [(0, -0.5, b"0")])] * 3
        assert refusals == ["its version has no log probabilities by subscription"]
        assert ways == ["call"] * 8, "each is counted once"
        ways.clear()
        asked = len(double.requests)
        await read(client, "later", logprobs=0)
        assert (ways, len(double.requests)) == (["call"], asked + 1), "it is not asked again"
        double.behaviour = letters
        await read(client, "others")
        assert ways == ["call", "subscription"]
        double.behaviour, double.no_logprobs = scored_letters, False
        client._refused_until.clear()
        await read(client, "much later", logprobs=0)
        assert ways == ["call", "subscription", "subscription"]


async def test_an_error_that_quotes_a_refusal_of_log_probabilities_is_none() -> None:
    quoted = "[400] subscription is 'mine', and log probabilities do not go through one"
    refusals: list[str] = []
    async with Double() as double, Client(double.target, subscribe=True, on_refusal=refusals.append) as client:
        double.call_error = quoted
        with pytest.raises(BadRequest, match="do not go through one"):
            await asyncio.wait_for(read(client, "a", logprobs=1), HANG_S)
        assert refusals == [] and len(double.requests) == 1


@pytest.mark.parametrize("asked", [True, False])
async def test_an_answer_of_another_kind_than_asked_for_is_an_error_of_its_own(asked: bool) -> None:
    """Half of it with log probabilities and half without would be nobody's to read."""

    async def half(request: pb.ModelInferRequest) -> Responses:
        if input_text(request, "text_input") == "other":
            yield part("fine", "stop")
            return
        yield with_logprobs(part("a"), 1, 1) if asked else part("a")
        double.forgets_logprobs = asked
        ((_, chunks),) = double.subscriptions.items()
        chunks.put_nowait(chunk(1, with_logprobs(part("b"), 1, 1), logprobs=not asked))

    async with Double() as double, Client(double.target, subscribe=True) as client:
        double.behaviour = half
        with pytest.raises(ServerError, match="another kind of answer than was asked for"):
            await asyncio.wait_for(read(client, "a", **({"logprobs": 1} if asked else {})), HANG_S)
        while not double.actions:  # the server hears that nobody waits for it
            await asyncio.sleep(0.001)
        assert joined(await read(client, "other")) == "fine"
        assert double.opened == 1


OPTIONS = {"key": "k", "parser": fingerprint(), "special": {}, "reasoning": "think", "in_reasoning": True}


async def test_answers_are_read_for_calls_and_reasoning_where_the_server_has_the_same_parser() -> None:
    ways: list[str] = []
    async with Double() as double, Client(double.target, subscribe=True, on_way=ways.append) as client:
        double.behaviour, double.options, double.formats = letters, json.dumps(OPTIONS), {"parser": fingerprint()}
        text = "They think.</think>Paris"
        answers = await asyncio.wait_for(
            asyncio.gather(*(read(client, text, parsed=True) for _ in range(8)), read(client, "plain")), HANG_S
        )
        assert double.asked == ["answer_formats"], "once"
    for parts in answers[:8]:
        assert joined(parts) == text
        found = ("".join(one.reasoning for one in parts), "".join(one.content for one in parts))
        assert found == ("They think.", "Paris")
        assert 0 < parts[-1].num_reasoning_tokens < len(text)
    assert joined(answers[8]) == "plain" and not any(one.content for one in answers[8])
    assert ways == ["subscription"] * 9


async def test_a_server_that_cannot_say_yet_how_it_reads_answers_is_asked_again() -> None:
    ways: list[str] = []
    told = {"on_way": ways.append}
    async with Double() as double, Client(double.target, subscribe=True, **told) as client:  # type: ignore[arg-type]
        double.behaviour, double.options, double.formats = letters, json.dumps(OPTIONS), {"parser": fingerprint()}
        double.unloaded.add("preprocessing")
        await read(client, "read by the server", parsed=True)
        double.unloaded.clear()
        client._refused_until.clear()
        await read(client, "read here", parsed=True)
        assert ways == ["call", "subscription"]


@pytest.mark.parametrize("formats", [{}, {"parser": "another"}, {"tool_calls": None, "reasoning": "think"}])
async def test_answers_that_the_server_reads_in_another_way_come_by_calls(formats: dict[str, str | None]) -> None:
    async def answer(request: pb.ModelInferRequest) -> Responses:
        yield parsed("read by the server", reason="stop") if len(request.outputs) > 1 else part("plain", "stop")

    ways: list[str] = []
    refusals: list[str] = []
    told = {"on_way": ways.append, "on_refusal": refusals.append}
    async with Double() as double, Client(double.target, subscribe=True, **told) as client:  # type: ignore[arg-type]
        double.behaviour, double.formats = answer, formats
        for _ in range(3):
            (one,) = await read(client, "a", parsed=True)
            assert one.content == "read by the server"
        assert joined(await read(client, "a")) == "plain"
        assert ways == ["call"] * 3 + ["subscription"]
        assert refusals == ["its parser of answers is of another version"]
        assert double.asked == ["answer_formats"]


@pytest.mark.parametrize(
    ("options", "kind", "named"),
    [
        ("", Unavailable, "without what it is read by: send the request again"),
        (json.dumps({**OPTIONS, "parser": "another"}), Unavailable, "another parser"),
        ("{", ServerError, "no options"),
    ],
)
async def test_an_answer_that_cannot_be_read_is_an_error_of_its_own(
    options: str, kind: type[Exception], named: str
) -> None:
    async def begin(request: pb.ModelInferRequest) -> Responses:
        yield part("begun")

    async with Double() as double, Client(double.target, subscribe=True) as client:
        double.behaviour, double.options, double.formats = begin, options, {"parser": fingerprint()}
        with pytest.raises(kind, match=named):
            await asyncio.wait_for(read(client, "a", parsed=True), HANG_S)
        while not double.actions:  # the server hears that nobody waits for it
            await asyncio.sleep(0.001)
        assert [action for action, _ in double.actions] == ["cancel"] * len(double.actions)
        double.behaviour = letters
        before = len(double.subscriptions), len(double.requests)
        assert joined(await read(client, "by a call", parsed=True)) == "by a call"
        assert (len(double.subscriptions), len(double.requests) - 1) == before
        assert joined(await read(client, "plain")) == "plain"


@pytest.mark.parametrize(
    ("refusal", "old_ensemble", "said"),
    [
        (unknown_tensor("input 'subscription'", "engine"), False, "unexpected inference input 'subscription'"),
        (unknown_tensor("output 'deliveries'", "engine"), False, "unexpected inference output 'deliveries'"),
        ("[429] there are 1024 subscriptions; retry after 1 s", False, "there are 1024 subscriptions"),
        ("", True, "unexpected inference input 'subscription' for model 'ensemble'"),
    ],
)
async def test_a_server_that_takes_no_subscription_answers_by_calls(
    refusal: str, old_ensemble: bool, said: str
) -> None:
    ways: list[str] = []
    refusals: list[str] = []
    told = {"on_way": ways.append, "on_refusal": refusals.append}
    async with Double() as double, Client(double.target, subscribe=True, **told) as client:  # type: ignore[arg-type]
        double.behaviour, double.refusal, double.ensemble_is_old = letters, refusal, old_ensemble
        texts = [f"answer {number}" for number in range(8)]
        answers = await asyncio.wait_for(asyncio.gather(*(read(client, text) for text in texts)), HANG_S)
        assert [joined(parts) for parts in answers] == texts
        assert len(refusals) == 1 and said in refusals[0]
        assert ways == ["call"] * len(texts), "each is counted once"
        ways.clear()
        asked, opened = len(double.requests), double.opened
        assert joined(await read(client, "later")) == "later"
        assert (ways, len(double.requests), double.opened) == (["call"], asked + 1, opened), "it is not asked again"

        client._refused_until.clear()
        double.refusal, double.ensemble_is_old = "", False
        assert joined(await read(client, "much later")) == "much later"
        assert ways[1:] == ["subscription"]
        assert double.opened == 1, "what an engine had opened for an ensemble of another version is still there"


async def test_a_request_that_is_sent_by_a_call_after_a_refusal_has_its_time_limit_and_is_cancelled() -> None:
    async def silent(request: pb.ModelInferRequest) -> Responses:
        await asyncio.Event().wait()
        yield part("")

    async with Double() as double, Client(double.target, subscribe=True) as client:
        double.behaviour, double.refusal = silent, unknown_tensor("input 'subscription'", "engine")
        parts = client.generate(GenerateRequest(text="a"), request_id="mine", timeout_s=0.2)
        with pytest.raises(DeadlineExceeded):
            await asyncio.wait_for(anext(parts), HANG_S)
        while ("cancel", "mine") not in double.actions:
            await asyncio.sleep(0.001)


async def test_answers_of_one_request_are_told_apart() -> None:
    async def answer(request: pb.ModelInferRequest) -> Responses:
        for index in (0, 1, 0, 1):
            yield part(f"{index}", index=index)
        yield part("", "length", index=1)
        yield part("", "stop", index=0)

    async with Double() as double, Client(double.target, subscribe=True) as client:
        double.behaviour = answer
        parts = await read(client, "a", n=2)
    assert [(one.index, one.text, one.finish_reason) for one in parts] == [
        *((0, "0", None), (1, "1", None), (0, "0", None), (1, "1", None)),
        *((1, "", "length"), (0, "", "stop")),
    ]


@pytest.mark.parametrize(("text", "kind"), [("[504] late", DeadlineExceeded), ("[400] no", BadRequest)])
async def test_an_error_of_one_request_is_no_other_ones(text: str, kind: type[Exception]) -> None:
    async def answer(request: pb.ModelInferRequest) -> Responses:
        yield part("begun")
        yield error(text) if input_text(request, "text_input") == "bad" else part("", "stop")

    async with Double() as double, Client(double.target, subscribe=True) as client:
        double.behaviour = answer
        with pytest.raises(kind, match=text[6:]):
            await read(client, "bad")
        assert joined(await read(client, "good")) == "begun"
        assert double.opened == 1
        assert double.actions == []


async def test_an_error_that_quotes_a_refusal_is_none() -> None:
    """What users write may be in an error: it says nothing of the server."""
    quoted = "[400] messages[0]: unexpected inference input 'subscription' for model 'engine'"
    refusals: list[str] = []

    async with Double() as double, Client(double.target, subscribe=True, on_refusal=refusals.append) as client:
        double.call_error = quoted
        with pytest.raises(BadRequest, match="unexpected inference input"):
            await asyncio.wait_for(read(client, "a"), HANG_S)
        assert refusals == [] and len(double.requests) == 1


async def test_a_limit_that_ends_while_a_refusal_waits_for_its_reader_is_kept() -> None:
    async with Double() as double, Client(double.target, subscribe=True) as client:
        double.behaviour = letters
        answer = client.generate(GenerateRequest(text="a", stream=True), request_id="id")
        waiting = asyncio.ensure_future(anext(answer))
        await asyncio.sleep(0)
        client._active["id"].fail(NotOffered("no"))
        assert client.abort("id", "the limit")
        with pytest.raises(Unavailable, match="the limit"):
            await asyncio.wait_for(waiting, HANG_S)


async def test_an_error_of_the_call_is_the_requests() -> None:
    async with Double() as double, Client(double.target, subscribe=True) as client:
        double.unloaded.add("ensemble")
        with pytest.raises(Unavailable):
            await read(client, "a")
        double.unloaded.clear()
        assert joined(await read(client, "a")) == double.target


class Counted(tuple[int, ...]):
    """Ids, of which it is counted how many are copied to put more behind them."""

    copied = 0

    def __radd__(self, before: tuple[int, ...]) -> Counted:
        Counted.copied += len(before)
        return Counted((*before, *self))


class CountedText(str):
    """The same of a text's characters."""

    copied = 0

    def __radd__(self, before: str) -> CountedText:
        CountedText.copied += len(before)
        return CountedText("".join((before, self)))


async def test_a_slow_reader_gets_fewer_parts_and_the_same_text(monkeypatch: pytest.MonkeyPatch) -> None:
    def counting(packed: bytes) -> tuple[int, list[tuple[int, GenerateResponse | str]]]:
        number, found = unpack(packed)
        for _, one in found:
            if isinstance(one, GenerateResponse):
                one.token_ids, one.text = Counted(one.token_ids), CountedText(one.text)
        return number, found

    monkeypatch.setattr("charonia_client.subscription.unpack", counting)
    text = "".join(chr(0x4E00 + number) if number % 50 else "\r\n"[number % 2] for number in range(300))
    async with Double() as double, Client(double.target, subscribe=True) as client:
        double.behaviour = letters
        async with contextlib.aclosing(client.generate(GenerateRequest(text=text))) as parts:
            first = await anext(parts)
            assert len(joined(await read(client, text))) == 300  # nobody waits for the other reader
            rest = [one async for one in parts]
    assert Counted.copied <= 300 and CountedText.copied <= 300, "what waits is not copied for each part that comes"
    assert len(rest) <= 64
    assert first.text + joined(rest) == text
    assert sum(len(one.token_ids) for one in [first, *rest]) == 300
    assert rest[-1].finish_reason == "stop"


@pytest.mark.parametrize("parsed", [None, True])
@pytest.mark.parametrize(("tops", "most"), [(0, 4096), (5, 4096), (5, 100)])
async def test_what_waits_for_a_slow_reader_is_joined_with_its_log_probabilities(
    tops: int, most: int, parsed: Literal[True] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as one part may have."""
    monkeypatch.setattr(subscription, "_MOST_JOINED", most)
    text = "x" * 300

    async def answer(request: pb.ModelInferRequest) -> Responses:
        for number, letter in enumerate(text):
            raw = with_logprobs(part(letter), 1, tops)
            values = raw.infer_response.raw_output_contents
            names = [tensor.name for tensor in raw.infer_response.outputs]
            values[names.index("output_ids")] = struct.pack("<i", number)
            values[names.index("output_log_probs")] = struct.pack("<f", -number)
            yield raw
            await asyncio.sleep(0)
        ended = part("", "cancelled")  # with no token
        ended.infer_response.raw_output_contents[2] = b""
        yield ended

    async with Double() as double, Client(double.target, subscribe=True) as client:
        double.behaviour, double.options, double.formats = answer, json.dumps(OPTIONS), {"parser": fingerprint()}
        request = GenerateRequest(text="a", logprobs=tops, parsed=parsed)
        async with contextlib.aclosing(client.generate(request)) as parts:
            first = await anext(parts)
            assert len(logprobs_of(await read(client, "b", logprobs=tops))) == 300
            rest = [one async for one in parts]
    each = 1 + tops
    assert len(rest) <= 65 + 300 * each // most
    everything = [first, *rest]
    assert max(len(one.token_ids) for one in everything) * each < most + each
    assert [id for one in everything for id in one.token_ids] == list(range(300))
    assert [logprob for logprob, _ in logprobs_of(everything)] == [-number for number in range(300)]
    assert {len(row) for _, row in logprobs_of(everything)} == {tops}
    assert rest[-1].finish_reason == "cancelled"
    assert (joined(everything), "".join(one.reasoning for one in everything)) == (text, text if parsed else "")


def test_what_waits_with_log_probabilities_takes_little_more_than_it_has_on_the_wire() -> None:
    deliveries = [
        struct.pack("<Q", number) + chunk(7, with_logprobs(part(" word"), 1, 20), logprobs=True)
        for number in range(3000)
    ]
    joined: list[subscription._Joined] = []
    tracemalloc.start()
    try:
        for packed in deliveries:
            (_, [(_, one)]) = unpack(packed)
            assert isinstance(one, GenerateResponse)
            if joined and joined[-1].num_packed < subscription._MOST_JOINED:
                joined[-1].add(one)
            else:
                joined.append(subscription._Joined(one))
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(joined) == 3000 * 21 // 4096 + 1
    assert taken < 1.25 * sum(map(len, deliveries))


async def test_who_leaves_cancels_his_request_alone() -> None:
    async def endless(request: pb.ModelInferRequest) -> Responses:
        yield part("begun")
        while ("cancel", request.id) not in double.actions:
            await asyncio.sleep(0.001)
        yield part("", "cancelled")

    async with Double() as double, Client(double.target, subscribe=True) as client:
        double.behaviour = endless
        async with contextlib.aclosing(client.generate(GenerateRequest(text="a"), request_id="left")) as parts:
            await anext(parts)
        double.behaviour = letters
        assert joined(await read(client, "other")) == "other"
        while not double.actions:
            await asyncio.sleep(0.001)
        assert set(double.actions) == {("cancel", "left")}
        assert double.opened == 1


async def test_a_client_that_is_closed_ends_what_it_has() -> None:
    async def endless(request: pb.ModelInferRequest) -> Responses:
        yield part("begun")
        await asyncio.Event().wait()

    async with Double() as double:
        double.behaviour = endless
        client = Client(double.target, subscribe=True)
        parts = client.generate(GenerateRequest(text="a"))
        await anext(parts)
        await client.close(timeout_s=0.2)
        with pytest.raises(Unavailable, match="the client was closed"):
            await anext(parts)
        while double.subscriptions:  # the server hears of it after that
            await asyncio.sleep(0.001)


async def test_a_subscription_that_ends_is_opened_anew() -> None:
    async def begin(request: pb.ModelInferRequest) -> Responses:
        yield part("begun")

    async with Double() as double, Client(double.target, subscribe=True) as client:
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


async def test_a_subscription_that_the_server_does_not_know_takes_no_new_requests() -> None:
    async def begin(request: pb.ModelInferRequest) -> Responses:
        yield part("begun")

    async with Double() as double, Client(double.target, subscribe=True) as client:
        double.behaviour = begin
        parts = client.generate(GenerateRequest(text="a"))
        await anext(parts)
        ((name, chunks),) = double.subscriptions.items()
        del double.subscriptions[name]  # as where the model was loaded anew
        double.behaviour = letters
        assert joined(await read(client, "sent again")) == "sent again"
        assert joined(await read(client, "another")) == "another"
        assert double.opened == 2
        chunks.put_nowait(chunk(1, part("ended", "stop")))
        assert joined([one async for one in parts]) == "ended", "what had begun goes on"
        chunks.put_nowait(None)


async def test_a_request_that_no_subscription_is_known_for_is_sent_twice_and_no_more() -> None:
    async with Double() as double, Client(double.target, subscribe=True) as client:
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
async def test_a_request_on_its_way_to_a_model_that_is_loaded_anew_is_sent_again_if_none_has_it(taken: bool) -> None:
    async def silent(request: pb.ModelInferRequest) -> Responses:
        for _ in ():
            yield part("")

    async with Double() as double, Client(double.target, subscribe=True) as client:
        double.behaviour = letters
        assert joined(await read(client, "a")) == "a"
        old = client._subscription
        assert old
        double.end_of_subscriptions = "[503] model 'engine' was loaded anew"
        held = double.tells if taken else double.takes
        held.clear()
        double.behaviour = silent if taken else letters
        asked = asyncio.create_task(read(client, "b"))
        while len(double.requests) < 2:
            await asyncio.sleep(0.001)
        double.subscriptions[old.name].put_nowait(None)
        while not old.over:
            await asyncio.sleep(0.001)
        held.set()
        if taken:
            with pytest.raises(Unavailable, match="was loaded anew"):
                await asked
        else:
            assert joined(await asked) == "b"
        assert double.opened == 1 + (not taken)
        assert len(double.requests) == 2 + (not taken)


async def test_each_stream_of_a_lost_subscription_has_an_error_of_its_own() -> None:
    async def begin(request: pb.ModelInferRequest) -> Responses:
        yield part("begun")

    async with Double() as double, Client(double.target, subscribe=True) as client:
        double.behaviour = begin
        many = [client.generate(GenerateRequest(text="a")) for _ in range(3)]
        for parts in many:
            await anext(parts)
        (chunks,) = double.subscriptions.values()
        chunks.put_nowait(None)
        errors = await asyncio.gather(*(anext(parts) for parts in many), return_exceptions=True)
    assert {(type(one), str(one)) for one in errors} == {(Unavailable, str(errors[0]))}
    assert len({id(one) for one in errors}) == 3


async def test_a_call_that_fails_in_any_way_ends_its_request() -> None:
    async def broken(message: pb.ModelInferRequest) -> Responses:
        raise AttributeError("no answer")
        yield

    async with Double() as double, Client(double.target, subscribe=True) as client:
        await read(client, "a")
        assert client._subscription
        client._subscription.call = broken
        with pytest.raises(ServerError, match="no answer"):
            await asyncio.wait_for(read(client, "a"), HANG_S)


async def test_an_answer_that_is_whole_stays_so() -> None:
    async with Double() as double, Client(double.target, subscribe=True) as client:
        double.behaviour = letters
        await read(client, "a")
        stream = SubscribedStream(client._open_subscription, encode(GenerateRequest(text="ab"), "id", "ensemble"), 1)
        await stream.task
        stream.lose(ConnectionLost("late"))
        stream.fail(DeadlineExceeded("late"))
        parts = [await stream.next() for _ in range(3)]
    assert [one and one.text for one in parts] == ["a", "b", None]


async def test_a_server_that_dies_loses_all_answers_as_calls_are_lost() -> None:
    with process_that_dies_of_requests() as (_, target):
        async with Client(target, subscribe=True) as client:
            outcomes = await asyncio.wait_for(
                asyncio.gather(*(read(client, "a") for _ in range(8)), return_exceptions=True), HANG_S
            )
    assert {type(one) for one in outcomes} <= {ConnectionLost, Unavailable}


async def test_a_server_that_cannot_be_reached_is_unavailable() -> None:
    async with Client(f"127.0.0.1:{free_ports(1)[0]}", subscribe=True) as client:
        with pytest.raises(Unavailable):
            await read(client, "a")


async def test_a_server_that_hangs_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("charonia_client.client._PROBE_INTERVAL_S", 0.05)

    def patience(seconds: float) -> None:
        monkeypatch.setattr("charonia_client.client._PROBE_TIMEOUT_S", seconds)

    patience(HANG_S / 4)  # a server that is well is looked at, too
    async with Double() as double, Client(double.target, subscribe=True) as client:
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


async def test_the_server_hears_what_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("charonia_client.subscription._READ_DELIVERIES", 4)
    async with Double() as double, Client(double.target, subscribe=True) as client:
        double.behaviour = letters
        for number in range(12):
            await read(client, f"question {number}")
        while not double.read or double.read[-1] < 8:
            await asyncio.sleep(0.01)
        assert double.read == sorted(double.read)


def test_a_delivery_is_unpacked_as_the_contract_says() -> None:
    packed = struct.pack("<Q", 7) + chunk(2**63, part("é", "length", index=3)) + chunk(5, error("[429] full"))
    number, ((key, one), failed) = unpack(packed)
    assert (number, key, failed) == (7, 2**63, (5, "[429] full"))
    assert isinstance(one, GenerateResponse)
    assert (one.text, one.token_ids, one.finish_reason, one.index) == ("é", (1,), "length", 3)
    with pytest.raises(struct.error):
        unpack(packed[:30])


def with_number(chunk: bytes, at: int, value: int) -> bytes:
    """The chunk with another number of four bytes at that place."""
    return chunk[:at] + struct.pack("<i", value) + chunk[at + 4 :]


def test_what_is_no_delivery_is_an_error() -> None:
    """A delivery that ends anywhere in a chunk, or whose numbers are not those of what follows, is not taken for a
    shorter one."""
    scored = chunk(1, with_logprobs(part("abc"), 3, 2), parsed=True, logprobs=True)
    number = struct.pack("<Q", 1)
    ((_, whole),) = unpack(number + scored)[1]
    assert isinstance(whole, TokenPart) and whole.packed and whole.num_packed() == 3 * 3
    assert unpack(number) == (1, [])
    for end in range(1, len(scored)):
        with pytest.raises((struct.error, ValueError)):
            unpack((number + scored)[: 8 + end])
    reason_at, tops_at = 20, 64 + 3 * 4 * 3
    assert struct.unpack_from("<i", scored, reason_at) == (48,) and struct.unpack_from("<I", scored, tops_at) == (2,)
    for at, value in (
        *((reason_at, value) for value in (-1, 4 + 32, 5 + 16, 6, 7, 64, 1 << 30)),
        *((tops_at, value) for value in (3, 1 << 30, -1)),
        (64 + 3 * 4, 4),  # the first token's bytes
        (12, -1),  # ids
    ):
        with pytest.raises((struct.error, ValueError)):
            unpack(number + with_number(scored, at, value))


async def test_a_delivery_that_is_none_ends_the_subscription_and_the_next_request_opens_another() -> None:
    async def begin(request: pb.ModelInferRequest) -> Responses:
        yield with_logprobs(part("begun"), 1, 1)
        ((_, chunks),) = double.subscriptions.items()
        chunks.put_nowait(chunk(1, with_logprobs(part("a"), 1, 20), logprobs=True)[:-5])

    async with Double() as double, Client(double.target, subscribe=True) as client:
        double.behaviour = begin
        with pytest.raises(ServerError, match="is no delivery of a subscription"):
            await asyncio.wait_for(read(client, "a", logprobs=1), HANG_S)
        double.behaviour = letters
        assert joined(await read(client, "again")) == "again"
        assert double.opened == 2
