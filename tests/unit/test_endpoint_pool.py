"""A pool of servers: retries before the response begins, sessions, removed servers, and questions about the model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from charonia_client import (
    BadRequest,
    CharoniaError,
    ConnectionLost,
    DeadlineExceeded,
    GenerateRequest,
    GenerateResponse,
    NotFound,
    NotReady,
    Overloaded,
    Progress,
    Tokenized,
    TokenizeRequest,
    Unavailable,
    Unresponsive,
)
from charonia_client.delivery import Chunk
from charonia_gateway.endpoints import endpoint as endpoints
from charonia_gateway.endpoints.endpoint import Endpoint
from charonia_gateway.endpoints.pool import NotLoaded, Pool, SessionLost
from charonia_gateway.engine import Engine
from charonia_gateway.record import Record, current_record
from waiting import until

HANG_S = 120


UNKNOWN: dict[str, Any] = {
    "tokenize": Tokenized([], "", 10, None),
    "quality": [],
    "model_info": {},
    "answer_formats": {},
    "adapters": [],
}


class Fake:
    """A server whose responses and errors a test sets."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.parts: list[GenerateResponse | CharoniaError] = [GenerateResponse(target, (1,), finish_reason="stop")]
        self.requests: list[GenerateRequest] = []
        self.timeouts: list[float | None] = []
        self.actions: list[tuple[str, str]] = []
        self.action_error: CharoniaError | None = None
        self.check_error: CharoniaError | None = None
        self.answers: dict[str, Any] = {}
        self.asked: list[str] = []
        self.closed = asyncio.Event()
        self.go_on = asyncio.Event()  # to the parts after the first
        self.go_on.set()

    def fail(self, error: CharoniaError) -> None:
        self.parts = [error]

    async def generate(
        self,
        request: GenerateRequest,
        *,
        request_id: str | None = None,
        timeout_s: float | None = None,
        progress: Progress | None = None,
    ) -> AsyncGenerator[GenerateResponse, None]:
        self.requests.append(request)
        self.timeouts.append(timeout_s)
        for part in self.parts:
            if isinstance(part, CharoniaError):
                raise part
            if progress:
                progress.take(Chunk(output_ids=part.token_ids))
            yield part
            await self.go_on.wait()

    async def _act(self, action: str, id: str) -> None:
        if self.action_error:
            raise self.action_error
        self.actions.append((action, id))

    async def stop(self, *, session_id: str) -> None:
        await self._act("stop", session_id)

    async def cancel(self, *, session_id: str) -> None:
        await self._act("cancel", session_id)

    async def end_session(self, session_id: str) -> None:
        await self._act("end", session_id)

    async def load_adapter(self, name: str, path: str) -> None:
        await self._act("load", f"{name}={path}")

    async def unload_adapter(self, name: str) -> None:
        await self._act("unload", name)

    async def until_over(self, request_id: str) -> None: ...

    def __getattr__(self, name: str) -> Any:
        """The questions about the model."""
        if name not in UNKNOWN:
            raise AttributeError(name)

        async def say(*_: object) -> Any:
            self.asked.append(name)
            await asyncio.sleep(0)  # as a call to another process does
            answer = self.answers.get(name, UNKNOWN[name])
            if isinstance(answer, CharoniaError):
                raise answer
            return answer

        return say

    async def check(self, timeout_s: float = 0) -> None:
        if self.check_error:
            raise self.check_error

    async def close(self) -> None:
        self.closed.set()


class Servers:
    """A pool in front of fakes that are up. No check runs by itself."""

    def __init__(self, count: int = 3, **options: Any) -> None:
        self.fakes = [Fake(name) for name in "abcdef"[:count]]
        self.retries = 0
        self.pool = Pool([], on_retry=self._count, **options)
        self.pool.endpoints = [Endpoint(fake) for fake in self.fakes]
        for one in self.pool.endpoints:
            one.passed()

    def _count(self) -> None:
        self.retries += 1

    def endpoint(self, fake: Fake) -> Endpoint:
        return next(one for one in self.pool.endpoints if one.target == fake.target)

    def fake(self, target: str) -> Fake:
        return next(one for one in self.fakes if one.target == target)

    async def text(self, request: GenerateRequest, timeout_s: float | None = None) -> str:
        """The whole text of the response."""
        answer = await self.pool.begin(request, "id", timeout_s)
        try:
            return "".join([part.text for part in answer.first] + [part.text async for part in answer.rest])
        finally:
            await answer.aclose()

    def check_integrity(self) -> None:
        assert [one.requests for one in self.pool.endpoints] == [0] * len(self.fakes)


def ask(**fields: Any) -> GenerateRequest:
    return GenerateRequest(**{"text": "hi", "stream": False, **fields})


def turn(session: str = "s") -> GenerateRequest:
    return ask(session_id=session, interactive=True)


# --- LoRA adapters


async def test_an_adapter_is_loaded_by_all_servers_or_by_none() -> None:
    servers = Servers()
    await servers.pool.load_adapter("x", "/x")
    assert [fake.actions for fake in servers.fakes] == [[("load", "x=/x")]] * 3
    servers.fakes[2].action_error = BadRequest("no memory")
    with pytest.raises(BadRequest, match="no memory"):
        await servers.pool.load_adapter("y", "/y")
    assert [fake.actions[1:] for fake in servers.fakes] == [[("load", "y=/y"), ("unload", "y")]] * 2 + [[]]


async def test_a_server_that_had_the_adapter_keeps_it_when_another_one_fails() -> None:
    servers = Servers()
    servers.fakes[0].answers["adapters"] = [{"name": "x", "fingerprint": "1"}]
    servers.fakes[2].action_error = BadRequest("no memory")
    with pytest.raises(BadRequest, match="no memory"):
        await servers.pool.load_adapter("x", "/x")
    assert [fake.actions[1:] for fake in servers.fakes] == [[], [("unload", "x")], []]


async def test_a_request_is_answered_by_the_server_that_has_the_adapter() -> None:
    servers = Servers()
    for fake in servers.fakes[:2]:
        fake.fail(NotFound("no x"))
    for _ in range(3):
        assert await servers.text(ask(lora_name="x=1")) == "c"
    servers.fakes[2].fail(NotFound("no x"))
    with pytest.raises(NotFound):
        await servers.text(ask(lora_name="x=1"))
    servers.check_integrity()


async def test_adapters_of_all_servers_are_listed() -> None:
    servers = Servers()
    for fake in servers.fakes[1:]:
        fake.answers["adapters"] = [{"name": fake.target, "fingerprint": "1"}]
    listed, known = await servers.pool.adapters()
    assert list(listed) == ["b", "c"] and known
    servers.fakes[2].answers["adapters"] = Unavailable("away")
    listed, known = await servers.pool.adapters()
    assert list(listed) == ["b", "c"] and not known


async def test_an_adapter_is_unloaded_where_it_is() -> None:
    servers = Servers()
    servers.fakes[0].action_error = NotFound("no x")
    await servers.pool.unload_adapter("x")  # a server that was started later does not have it
    assert [fake.actions for fake in servers.fakes] == [[], [("unload", "x")], [("unload", "x")]]
    servers.fakes[1].action_error = Unavailable("away")
    with pytest.raises(Unavailable, match="away"):
        await servers.pool.unload_adapter("x")
    servers.fakes[1].action_error = None
    servers.endpoint(servers.fakes[1]).failed("it is down")
    with pytest.raises(Unavailable, match="not from b,"):
        await servers.pool.unload_adapter("x")
    servers.endpoint(servers.fakes[1]).draining = True
    for fake in servers.fakes:
        fake.action_error = NotFound("no x")
    with pytest.raises(NotFound):
        await servers.pool.unload_adapter("x")


# --- retries


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("error", [Unavailable("it ends"), Overloaded("full", 9)], ids=repr)
async def test_a_request_is_retried_until_a_server_takes_it(error: CharoniaError, stream: bool) -> None:
    servers = Servers()
    for fake in servers.fakes[:2]:
        fake.fail(error)
    assert await servers.text(ask(stream=stream)) == "c"
    assert servers.retries == 2
    failed = isinstance(error, Unavailable)
    assert [one.doubtful for one in servers.pool.endpoints] == [failed, failed, False]
    servers.check_integrity()


async def test_the_client_gets_the_shortest_wait_if_all_servers_are_full() -> None:
    servers = Servers()
    for fake, seconds in zip(servers.fakes, (7, 2, 5), strict=True):
        fake.fail(Overloaded("full", seconds))
    with pytest.raises(Overloaded) as caught:
        await servers.text(ask())
    assert caught.value.retry_after == 2 and [len(fake.requests) for fake in servers.fakes] == [1, 1, 1]


async def test_every_request_keeps_its_own_seed_at_the_next_server() -> None:
    servers = Servers(2)
    servers.fakes[0].fail(Unavailable("away"))
    record = Record()
    token = current_record.set(record)
    try:
        sent = [GenerateRequest(text="hi", stream=False, seed=seed) for seed in (None, None, 0)]
        await Engine(servers.pool).complete(sent, "id")
    finally:
        current_record.reset(token)
    seeds = [one.seed for one in servers.fakes[1].requests]
    assert sorted(seeds) == sorted(record.seeds.values())
    assert len(set(seeds)) == 3
    assert record.seeds[2] == 0
    assert {one.seed for one in servers.fakes[0].requests} <= set(seeds)


async def test_requests_at_the_same_time_are_spread() -> None:
    servers = Servers()
    answers = await asyncio.gather(*(servers.pool.begin(ask(), f"id{at}") for at in range(9)))
    assert [len(fake.requests) for fake in servers.fakes] == [3, 3, 3]
    for answer in answers:
        await answer.aclose()
    servers.check_integrity()


async def test_a_wrong_request_is_not_retried() -> None:
    servers = Servers()
    for fake in servers.fakes:
        fake.fail(BadRequest("top_p = 7"))
    with pytest.raises(BadRequest):
        await servers.text(ask())
    assert sum(len(fake.requests) for fake in servers.fakes) == 1 and not servers.retries
    servers.check_integrity()


async def test_a_stream_that_has_begun_is_not_retried() -> None:
    servers = Servers()
    for fake in servers.fakes:
        fake.parts = [GenerateResponse("begin", (1,)), ConnectionLost("gone")]
    said = []
    with pytest.raises(ConnectionLost):
        async for part in Engine(servers.pool).answer(ask(stream=True), "id"):
            said.append(part.text)
    assert said == ["begin"] and not servers.retries
    assert sum(one.doubtful for one in servers.pool.endpoints) == 1, "it is checked at once"
    servers.check_integrity()


async def test_a_whole_response_is_retried_until_its_last_part() -> None:
    servers = Servers(2)
    first, second = servers.fakes
    first.parts = [GenerateResponse("one", (1,), finish_reason="stop"), Unavailable("it ends")]
    second.parts = [
        GenerateResponse("one", (1,), finish_reason="stop"),
        GenerateResponse("two", (1,), finish_reason="stop", index=1),
    ]
    assert await servers.text(ask(n=2)) == "onetwo"


async def test_a_request_breaks_at_most_two_connections() -> None:
    servers = Servers()
    for fake in servers.fakes:
        fake.fail(ConnectionLost("it died"))
    with pytest.raises(ConnectionLost):
        await servers.text(ask())
    assert sum(len(fake.requests) for fake in servers.fakes) == 2


async def test_all_attempts_share_the_time_of_a_request() -> None:
    servers = Servers()
    servers.fakes[0].fail(Unavailable("it ends"))
    assert await servers.text(ask(timeout_ms=60_000), HANG_S) == "b"
    sent, left = servers.fakes[1].requests[0].timeout_ms, servers.fakes[1].timeouts[0]
    assert sent is not None and sent <= 60_000 and left is not None and left < HANG_S
    for fake in servers.fakes:
        fake.fail(Unavailable("it ends"))
    retries = servers.retries
    with pytest.raises(Unavailable):
        await servers.text(ask(), 0)
    servers.fakes[0].fail(DeadlineExceeded("late"))
    servers.pool.endpoints = servers.pool.endpoints[:1]
    with pytest.raises(DeadlineExceeded):
        await servers.text(ask())
    assert servers.retries == retries


async def test_leaving_a_request_releases_its_server() -> None:
    servers = Servers()
    servers.fakes[0].parts = [GenerateResponse("begin", (1,)), GenerateResponse("end", (1,), finish_reason="stop")]
    servers.fakes[0].go_on.clear()
    answer = await servers.pool.begin(ask(stream=True), "id")
    assert answer.endpoint.requests == 1
    await answer.aclose()
    waiting = asyncio.create_task(servers.text(ask(session_id="x")))
    for fake in servers.fakes:
        fake.parts = [GenerateResponse("begin", (1,))]
        fake.go_on.clear()
    while not any(one.requests for one in servers.pool.endpoints):
        await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    servers.check_integrity()


async def test_without_a_server_the_error_and_readiness_name_the_reasons() -> None:
    servers = Servers(2)
    for one in servers.pool.endpoints:
        one.failed("its port is closed")
    with pytest.raises(Unavailable, match="no server can take requests: a: its port is closed; b: its"):
        await servers.text(ask())
    assert "b: its port is closed" in str(await servers.pool.why_not_ready())
    servers.pool.endpoints[1].passed()
    servers.pool.endpoints[1].passed()
    assert await servers.pool.why_not_ready() is None and await servers.text(ask()) == "b"


async def test_the_only_server_gets_requests_whatever_its_checks_say() -> None:
    servers = Servers(1)
    servers.pool.endpoints[0].failed("its port is closed")
    assert await servers.text(ask()) == "a" and await servers.pool.why_not_ready() is None
    servers.fakes[0].check_error = Unavailable("still closed")
    assert await servers.pool.why_not_ready() == "still closed"


async def test_a_model_that_no_server_has_loaded_has_an_error_of_its_own() -> None:
    servers = Servers(2)
    servers.pool.model = "one"
    for fake in servers.fakes:
        fake.fail(Unavailable("unknown model"))
    with pytest.raises(Unavailable) as caught:
        await servers.text(ask())
    assert not isinstance(caught.value, NotLoaded)
    for fake in servers.fakes:
        fake.check_error = NotReady("not loaded")
    with pytest.raises(NotLoaded, match="'one' is not loaded"):
        await servers.text(ask())


# --- sessions


@pytest.mark.parametrize("how", ["drains", "goes", "is removed"])
async def test_a_turn_is_rejected_once_if_its_server_is_away(how: str) -> None:
    servers = Servers()
    home = servers.fake(await servers.text(turn()))
    assert await servers.text(turn()) == home.target
    endpoint = servers.endpoint(home)
    if how == "is removed":
        endpoint.remove(True)
    else:
        endpoint.failed("it is away", draining=how == "drains")
    with pytest.raises(SessionLost, match="history of session 's' is lost"):
        await servers.text(turn())
    moved = servers.fake(await servers.text(turn()))
    assert moved is not home and moved.actions == [("end", "s")], "an outdated history there is not continued"
    endpoint.remove(False)
    for _ in range(2):
        endpoint.passed()
    assert await servers.text(turn()) == moved.target and moved.actions == [("end", "s")]
    assert not servers.retries
    # It is lost once more: the first server is next by hashing, and has an outdated history.
    servers.endpoint(moved).failed("it is away")
    with pytest.raises(SessionLost):
        await servers.text(turn())
    assert await servers.text(turn()) == home.target and home.actions == [("end", "s")]


async def test_a_whole_conversation_goes_on_at_another_server() -> None:
    servers = Servers()
    home = servers.fake(await servers.text(turn()))
    usual = home.parts
    home.fail(Overloaded("full", 9))
    with pytest.raises(Overloaded):
        await servers.text(turn())
    moved = await servers.text(ask(session_id="s"))
    assert moved != home.target
    home.parts = usual
    assert await servers.text(turn()) == moved


async def test_sessions_are_spread_and_stay_when_servers_come() -> None:
    servers = Servers()
    before = {str(at): await servers.text(turn(str(at))) for at in range(60)}
    assert set(before.values()) == set("abc")
    more = Endpoint(Fake("d"))
    more.passed()
    servers.pool.endpoints.insert(0, more)
    assert {session: await servers.text(turn(session)) for session in before} == before


async def test_session_begins_again_at_the_server_of_its_hash() -> None:
    servers = Servers()
    home = servers.fake(await servers.text(turn()))
    await servers.pool.end_session("s")
    assert all(fake.actions == [("end", "s")] for fake in servers.fakes)
    servers.endpoint(home).failed("it is away")
    assert await servers.text(turn()) != home.target, "nothing is lost"
    assert await servers.text(ask(session_id="t", end_session=True))
    assert await servers.pool.owner("t") is None


async def test_end_of_a_session_is_repeated_when_its_server_returns() -> None:
    servers = Servers()
    home = servers.fake(await servers.text(turn()))
    endpoint = servers.endpoint(home)
    endpoint.failed("it is away")
    await servers.pool.end_session("s")
    for _ in range(2):
        endpoint.passed()
    assert home.actions == []
    assert await servers.text(turn()) == home.target
    assert home.actions == [("end", "s")], "before the turn"


async def test_stop_and_cancel_reach_all_servers_that_also_drain() -> None:
    servers = Servers()
    home = servers.fake(await servers.text(turn()))
    servers.endpoint(home).failed("it drains", draining=True)
    gone = next(fake for fake in servers.fakes if fake is not home)
    servers.endpoint(gone).failed("closed")
    await servers.pool.stop_session("s")
    await servers.pool.cancel_session("s")
    for fake in servers.fakes:
        assert fake.actions == ([] if fake is gone else [("stop", "s"), ("cancel", "s")])
    home.action_error = Unavailable("the session's server fails")
    with pytest.raises(Unavailable, match="session's server fails"):
        await servers.pool.stop_session("s")
    await servers.pool.stop_session("unknown")
    for fake in servers.fakes:
        fake.action_error = Unavailable("all fail")
    with pytest.raises(Unavailable, match="all fail"):
        await servers.pool.stop_session("unknown")


# --- servers that come and go


async def test_checks_take_a_server_out_and_back_and_go_on_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, changes = Fake("a"), []
    one = Endpoint(fake, lambda endpoint: changes.append(endpoint.up))
    outcomes: list[CharoniaError | Exception | None] = [None, NotReady("drains"), None, None]
    outcomes += [Unresponsive("late")] * 3 + [RuntimeError("a fault of the gateway"), None, None]
    seen: list[tuple[bool, bool]] = []

    async def check(timeout_s: float) -> None:
        seen.append((one.up, one.draining))
        if not outcomes:
            one.remove(True)
        elif (outcome := outcomes.pop(0)) is not None:
            raise outcome

    monkeypatch.setattr(fake, "check", check)

    async def no_wait(event: asyncio.Event, timeout_s: float) -> bool:
        return False

    monkeypatch.setattr(endpoints, "comes_within", no_wait)
    await asyncio.wait_for(one.watch(0, 0), HANG_S)
    assert changes == [True, False, True, False, True]
    assert [up for up, _ in seen] == [False, True, False, False, True, True, True, False, False, False, True]
    assert [at for at, (_, draining) in enumerate(seen) if draining] == [2]


@pytest.mark.parametrize(
    ("info", "promise"),
    [
        ({"fingerprint": "f", "deterministic": True}, "f"),
        ({"fingerprint": "f", "deterministic": False}, None),
        ({}, None),
    ],
)
async def test_a_server_is_up_when_it_has_described_itself(
    info: dict[str, Any], promise: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = Fake("a")
    one, seen = Endpoint(fake), []
    fake.answers["model_info"] = Unresponsive("it is busy")

    async def described(event: asyncio.Event, timeout_s: float) -> bool:
        seen.append(one.up)
        fake.answers["model_info"] = info
        one.remove(one.up)
        return False

    monkeypatch.setattr(endpoints, "comes_within", described)
    await asyncio.wait_for(one.watch(0, 0), HANG_S)
    assert seen == [False, False, True] and one.promise == promise


async def test_a_removed_server_finishes_its_streams_and_a_new_one_gets_requests() -> None:
    made: dict[str, Fake] = {}
    changes: list[tuple[str, bool | None]] = []

    def connect(target: str) -> Fake:
        made[target] = Fake(target)
        return made[target]

    pool = Pool(
        ["a"], connect=connect, check_interval_s=HANG_S, on_change=lambda target, up: changes.append((target, up))
    )
    async with pool:
        await until(lambda: pool.usable)
        made["a"].parts = [GenerateResponse("begin", (1,)), GenerateResponse("end", (1,), finish_reason="stop")]
        stream = await pool.begin(ask(stream=True), "id")
        pool.set_targets(["b"])
        await until(lambda: pool.usable)
        for _ in range(3):
            answer = await pool.begin(ask(), "id")
            assert answer.endpoint.target == "b"
            await answer.aclose()
        assert not made["a"].closed.is_set()
        assert [part.text async for part in stream.rest] == ["end"]
        await stream.aclose()
        await asyncio.wait_for(made["a"].closed.wait(), HANG_S)
        while changes[-1] != ("a", None):
            await asyncio.sleep(0)
        assert changes == [("a", False), ("a", True), ("b", False), ("b", True), ("a", None)]
        pool.set_targets(["a", "b"])
        assert [one.target for one in pool.endpoints] == ["b", "a"]
    assert made["b"].closed.is_set()


async def test_first_checks_do_not_wait_for_a_server_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("charonia_gateway.endpoints.pool._FIRST_CHECK_S", 0.01)
    fake = Fake("a")

    async def hang(timeout_s: float) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(fake, "check", hang)
    async with Pool(["a"], connect=lambda _: fake) as pool:
        await asyncio.wait_for(pool.first_checks(), HANG_S)
        assert not pool.usable


# --- questions


async def test_a_text_is_tokenized_by_a_server_that_can() -> None:
    servers = Servers(2)
    first, second = servers.fakes
    first.answers["tokenize"] = Unavailable("it ends")
    second.answers["tokenize"] = Tokenized([1, 2], "hi", 10, None)
    assert (await servers.pool.tokenize(TokenizeRequest(text="hi"))).token_ids == [1, 2]
    second.answers["tokenize"] = BadRequest("text: wrong")
    with pytest.raises(BadRequest):
        await servers.pool.tokenize(TokenizeRequest(text="hi"))
    second.answers["tokenize"] = Unavailable("it ends, too")
    with pytest.raises(Unavailable, match="too"):
        await servers.pool.tokenize(TokenizeRequest(text="hi"))


async def test_descriptions_are_asked_once_and_again_in_the_background(monkeypatch: pytest.MonkeyPatch) -> None:
    servers = Servers(2)
    first, second = servers.fakes
    first.answers["answer_formats"] = second.answers["answer_formats"] = Unavailable("it ends")
    assert await servers.pool.answer_formats() == {}, "no server knows"
    second.answers["answer_formats"] = {"reasoning": "think"}
    monkeypatch.setattr("charonia_gateway.endpoints.pool._UNKNOWN_AGE_S", 0)
    found = await asyncio.gather(*(servers.pool.answer_formats() for _ in range(5)))
    assert found == [{"reasoning": "think"}] * 5 and second.asked == ["answer_formats"] * 2
    assert await servers.pool.reasons() and len(second.asked) == 2
    second.answers["answer_formats"] = {"reasoning": None}
    monkeypatch.setattr("charonia_gateway.endpoints.pool._DESCRIPTION_AGE_S", 0)
    assert await servers.pool.reasons(), "the old answer, while it is asked again"
    while await servers.pool.reasons():
        await asyncio.sleep(0)
    first.answers["model_info"], second.answers["model_info"] = Unavailable("it ends"), {"context_length": 7}
    assert await servers.pool.model_info() == {"context_length": 7} and await servers.pool.quality() == []


async def test_a_server_that_hangs_does_not_delay_a_description(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("charonia_gateway.endpoints.pool._UNKNOWN_AGE_S", 0)
    servers = Servers(2)
    first, second = servers.fakes
    go_on = asyncio.Event()
    ends = []

    async def hang(timeout_s: float) -> list[dict[str, Any]]:
        try:
            await go_on.wait()
            ends.append("itself")
        except asyncio.CancelledError:
            ends.append("cancelled")
            raise
        raise Unavailable("it hung")

    monkeypatch.setattr(first, "quality", hang, raising=False)
    for _ in range(2):
        assert await asyncio.wait_for(servers.pool.quality(), HANG_S) == []
    assert second.asked == ["quality"], "an empty result is known, too"
    go_on.set()
    while not ends:
        await asyncio.sleep(0)
    assert ends == ["itself"]
