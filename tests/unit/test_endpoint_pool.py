"""A request's way over several servers: servers that refuse, fail, hang, go and come back, over real gRPC."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from charonia_client import (
    BadRequest,
    DeadlineExceeded,
    GenerateRequest,
    GenerateResponse,
    Overloaded,
    ServerError,
    TokenizeRequest,
    Unavailable,
    Unresponsive,
)
from charonia_gateway import shared
from charonia_gateway.endpoints import pool, sessions
from charonia_gateway.endpoints.affinity import Affinity, rendezvous
from charonia_gateway.endpoints.calls import Calls
from charonia_gateway.endpoints.endpoint import Endpoint
from charonia_gateway.endpoints.exposition import EndpointMetrics
from charonia_gateway.endpoints.health import State
from charonia_gateway.endpoints.pool import Pool, SessionLost
from charonia_gateway.endpoints.sessions import SharedSessions, SharedStaleSessions
from charonia_gateway.engine import Engine
from charonia_gateway.shared import Shared, create
from triton_double import Behaviour, Double, error, input_number, part, process_that_dies_of_requests, with_logprobs
from tritonclient.grpc import service_pb2 as pb

HANG_S = 120
CHECK_INTERVAL_S = 0.05
HUNG_S = 0.05  # after which a server that has fallen asleep is said to hang; one that this process keeps waiting is not
Responses = AsyncIterator[pb.ModelStreamInferResponse]


def ask(**fields: Any) -> GenerateRequest:
    return GenerateRequest(**{"text": "hi", "stream": False, **fields})


async def until(holds: Callable[[], bool], what: str) -> None:
    async def wait() -> None:
        while not holds():
            await asyncio.sleep(0.01)

    try:
        await asyncio.wait_for(wait(), HANG_S)
    except asyncio.TimeoutError:
        raise AssertionError(f"after {HANG_S} s still not: {what}") from None


class Gateway:
    """A pool in front of `servers`, with what it told."""

    def __init__(self, servers: Sequence[Double], shared: Shared | None = None) -> None:
        self.servers = list(servers)
        self.choices: list[str] = []
        self.retries = 0
        self.pool = Pool(
            [server.target for server in servers],
            check_interval_s=CHECK_INTERVAL_S,
            check_timeout_s=HANG_S,
            on_choice=self.choices.append,
            on_retry=self._count_retry,
            shared=shared,
        )
        self.engine = Engine(self.pool)
        self._ids = 0

    def _count_retry(self) -> None:
        self.retries += 1

    def state(self, server: Double) -> State:
        (state,) = [endpoint.health.state for endpoint in self.pool.endpoints if endpoint.target == server.target]
        return state

    async def until_all_are(self, state: State, *servers: Double) -> None:
        await until(lambda: all(self.state(server) is state for server in servers or self.servers), state.value)

    def stream(self, request: GenerateRequest, id: str = "", **options: Any) -> Any:
        self._ids += 1
        return self.engine.answer(request, id or f"request-{self._ids}", **options)

    async def parts(self, request: GenerateRequest, **options: Any) -> list[GenerateResponse]:
        async with aclosing(self.stream(request, **options)) as parts:
            return [part async for part in parts]

    async def text(self, request: GenerateRequest, **options: Any) -> str:
        return "".join(part.text for part in await self.parts(request, **options))

    def other(self, *servers: Double) -> Double:
        return next(server for server in self.servers if server not in servers)

    def sessions_of(self, server: Double, count: int) -> list[str]:
        """Session ids that begin on that server."""
        targets = [one.target for one in self.servers]
        found = (id for at in range(10_000) if rendezvous(id := f"begins-{at}", targets) == server.target)
        return [next(found) for _ in range(count)]

    def server_of(self, target: str) -> Double:
        return next(server for server in self.servers if server.target == target)

    def find_those_that_hang(self) -> None:
        """From now on its checks do."""
        for endpoint in self.pool.endpoints:
            check = partial(check_or_hang, self.server_of(endpoint.target), endpoint.client.check)
            endpoint.client.check = check  # type: ignore[method-assign]


async def check_or_hang(server: Double, check: Callable[[float], Awaitable[None]], timeout_s: float) -> None:
    asked, asleep = asyncio.ensure_future(check(timeout_s)), asyncio.ensure_future(server.asleep.wait())
    try:
        await asyncio.wait((asked, asleep), return_when=asyncio.FIRST_COMPLETED)
        if not asked.done() and not (await asyncio.wait((asked,), timeout=HUNG_S))[0]:
            raise Unresponsive("it has fallen asleep")
        asked.result()
    finally:
        asked.cancel()
        asleep.cancel()


@asynccontextmanager
async def several(count: int = 3, *, some_hang: bool = False) -> AsyncIterator[Gateway]:
    """That many servers, all up."""
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(Double()) for _ in range(count)]
        gateway = Gateway(servers)
        await stack.enter_async_context(gateway.pool)
        if some_hang:
            gateway.find_those_that_hang()
        await gateway.until_all_are(State.UP)
        yield gateway
        for endpoint in gateway.pool.endpoints:
            endpoint.check_integrity()
            assert not endpoint.in_flight


def refuse(text: str) -> Behaviour:
    async def behaviour(request: pb.ModelInferRequest) -> Responses:
        yield error(text)

    return behaviour


def hold(release: asyncio.Event, begin: Sequence[pb.ModelStreamInferResponse] = ()) -> Behaviour:
    """Says `begin`, and the rest once it may."""

    async def behaviour(request: pb.ModelInferRequest) -> Responses:
        for answer in begin:
            yield answer
        await release.wait()
        yield part("end", "stop")

    return behaviour


@contextmanager
def all_but_one(gateway: Gateway, behaviour: Behaviour) -> Any:
    for server in gateway.servers[:-1]:
        server.behaviour = behaviour
    yield gateway.servers[-1]


async def test_its_first_request_finds_the_servers_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that hangs is not waited for."""
    monkeypatch.setattr(pool, "_FIRST_CHECK_S", HANG_S)
    async with Double() as one, Double() as two:
        gateway = Gateway([one, two])
        async with gateway.pool:
            await gateway.pool.first_checks()
            assert gateway.state(one) is gateway.state(two) is State.UP
            assert await gateway.text(ask()) in (one.target, two.target)
        monkeypatch.setattr(pool, "_FIRST_CHECK_S", 0.05)
        two.fall_asleep()
        gateway = Gateway([two])
        async with gateway.pool:
            await gateway.pool.first_checks()
            assert gateway.state(two) is State.DOWN
            two.wake_up()
            await gateway.until_all_are(State.UP)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("refusal", ["[503] the engine is shutting down", "[429] the queue is full; retry after 300 s"])
async def test_what_one_server_does_not_take_another_answers(refusal: str, stream: bool) -> None:
    async with several() as gateway:
        with all_but_one(gateway, refuse(refusal)) as willing:
            assert await gateway.text(ask(stream=stream)) == willing.target
            assert gateway.retries == 2
            # Known to have no room, or suspect: the next request goes where there is.
            asked = sum(len(server.requests) for server in gateway.servers)
            if "429" in refusal:
                assert await gateway.text(ask(stream=stream)) == willing.target
                assert sum(len(server.requests) for server in gateway.servers) == asked + 1


async def test_when_no_server_has_room_the_client_hears_the_shortest_wait() -> None:
    async with several() as gateway:
        for seconds, server in zip((7, 2, 5), gateway.servers, strict=True):
            server.behaviour = refuse(f"[429] the queue is full; retry after {seconds} s")
        with pytest.raises(Overloaded) as caught:
            await gateway.text(ask())
        assert caught.value.retry_after == 2
        assert [len(server.requests) for server in gateway.servers] == [1, 1, 1]


async def test_what_the_client_did_wrong_is_asked_once() -> None:
    async with several() as gateway:
        for server in gateway.servers:
            server.behaviour = refuse("[400] top_p = 7: send at most 1")
        with pytest.raises(BadRequest):
            await gateway.text(ask())
        assert sum(len(server.requests) for server in gateway.servers) == 1 and gateway.retries == 0


async def test_an_answer_that_has_begun_is_not_begun_again() -> None:
    async def break_off(request: pb.ModelInferRequest) -> Responses:
        yield part("begin ")
        yield error("[503] the engine is shutting down")

    async with several() as gateway:
        for server in gateway.servers:
            server.behaviour = break_off
        said = []
        with pytest.raises(Unavailable):
            async with aclosing(gateway.stream(ask(stream=True))) as parts:
                async for piece in parts:
                    said.append(piece.text)
        assert said == ["begin "] and gateway.retries == 0


async def test_of_answers_that_are_sent_whole_nothing_is_lost_before_the_last() -> None:
    async def break_off(request: pb.ModelInferRequest) -> Responses:
        yield part("one", "stop", 0)
        yield error("[503] the engine is shutting down")

    async def both(request: pb.ModelInferRequest) -> Responses:
        yield part("one", "stop", 0)
        yield part("two", "stop", 1)

    async with several() as gateway:
        with all_but_one(gateway, break_off) as willing:
            willing.behaviour = both
            answers = await gateway.parts(ask(n=2))
            assert [(answer.index, answer.text) for answer in answers] == [(0, "one"), (1, "two")]


async def test_a_killed_server_takes_no_request_with_it_that_had_not_begun() -> None:
    never = asyncio.Event()
    async with several() as gateway:
        gone = gateway.servers[0]
        gone.behaviour = hold(never)
        waiting = [asyncio.create_task(gateway.text(ask(stream=bool(at % 2)))) for at in range(9)]
        await until(lambda: len(gone.requests) == 3, "each server has its share")
        await gone.go()
        answers = await asyncio.wait_for(asyncio.gather(*waiting), HANG_S)
        assert set(answers) == {server.target for server in gateway.servers[1:]}
        await gateway.until_all_are(State.DOWN, gone)
        assert await gateway.pool.why_not_ready() is None


@pytest.mark.parametrize("how", ["hangs", "ends"])
async def test_what_waits_at_a_server_that_is_found_down_moves_and_what_has_begun_stays(how: str) -> None:
    release = asyncio.Event()
    async with several(some_hang=True) as gateway:
        for server in gateway.servers:
            server.behaviour = hold(release, [part("begin ")])
        async with AsyncExitStack() as streams:
            begun = [
                await streams.enter_async_context(aclosing(gateway.stream(ask(stream=True)))) for _ in gateway.servers
            ]
            assert [(await anext(stream)).text for stream in begun] == ["begin "] * 3
            assert [len(server.requests) for server in gateway.servers] == [1, 1, 1]
            down = gateway.servers[0]
            for server in gateway.servers:
                server.behaviour = server.say_name
            down.behaviour = hold(release)
            waiting = [asyncio.create_task(gateway.text(ask(stream=bool(at % 2)))) for at in range(6)]
            await until(lambda: len(down.requests) > 1, "requests wait there")
            if how == "hangs":
                down.fall_asleep()
            else:
                down.exiting = True
            answers = await asyncio.wait_for(asyncio.gather(*waiting), HANG_S)
            assert down.target not in answers
            assert gateway.state(down) is State.DOWN
            # Its answers that have begun come to their end when it does.
            release.set()
            down.wake_up()
            for stream in begun:
                assert "".join([piece.text async for piece in stream]) == "end"
        down.exiting = False
        await gateway.until_all_are(State.UP)
        # What went elsewhere was cancelled there.
        await until(lambda: any(action == "cancel" for action, _ in down.actions), "a cancel")


async def test_a_server_that_drains_keeps_what_it_has_begun() -> None:
    async with several() as gateway:
        draining, *others = gateway.servers
        release = asyncio.Event()
        draining.behaviour = hold(release)
        asked = [ask(stream=bool(at % 2), session_id=f"s{at}") for at in range(40)]
        waiting = [asyncio.create_task(gateway.text(request)) for request in asked]
        await until(lambda: sum(task.done() for task in waiting) + len(draining.requests) == 40, "the rest waits there")
        assert len(draining.requests) > 1
        draining.ready = False
        await gateway.until_all_are(State.NOT_READY, draining)
        # What is new goes elsewhere, what it has waits on there.
        assert {await gateway.text(ask()) for _ in range(4)} == {server.target for server in others}
        release.set()
        answers = await asyncio.wait_for(asyncio.gather(*waiting), HANG_S)
        assert answers.count("end") == len(draining.requests)
        assert gateway.retries == 0 and not draining.actions


@pytest.mark.parametrize("how", ["drains", "goes", "is removed"])
async def test_a_turn_whose_history_is_on_a_server_that_is_away_is_refused_once(how: str) -> None:
    async with several() as gateway:
        pool, turn = gateway.pool, ask(session_id="s", interactive=True)
        assigned = gateway.server_of(await gateway.text(turn))
        # Of the others the one has ended, and the other was never answered there: nothing is lost with them.
        ended, fresh = gateway.sessions_of(assigned, 2)
        await gateway.text(ask(session_id=ended, interactive=True))
        await pool.end_session(ended)
        answering, assigned.behaviour = assigned.behaviour, refuse("[429] the queue is full; retry after 9 s")
        with pytest.raises(Overloaded):
            await gateway.text(ask(session_id=fresh, interactive=True))
        assigned.behaviour = answering
        if how == "drains":
            assigned.ready = False
            await gateway.until_all_are(State.NOT_READY, assigned)
        elif how == "goes":
            await assigned.go()
            await gateway.until_all_are(State.DOWN, assigned)
        else:
            pool.set_targets([server.target for server in gateway.servers if server is not assigned])
        for session_id in (ended, fresh):
            assert await gateway.text(ask(session_id=session_id, interactive=True)) != assigned.target
        asked = sum(len(server.requests) for server in gateway.servers)
        with pytest.raises(SessionLost, match="history of session 's' is lost"):
            await gateway.text(turn)
        assert sum(len(server.requests) for server in gateway.servers) == asked
        moved = await gateway.text(turn)
        assert moved != assigned.target and await gateway.text(turn) == moved
        assert gateway.retries == 0


@pytest.mark.parametrize("turns", range(5))
async def test_a_pool_closes_also_in_the_moment_in_which_a_check_is_asked_for(turns: int) -> None:
    """turns: of the event loop, between the two."""
    pool = Pool(["127.0.0.1:1"], check_interval_s=HANG_S)
    await pool.__aenter__()
    (endpoint,) = pool.endpoints
    await endpoint.checked()
    await asyncio.sleep(0.1)  # the watch waits now
    endpoint.look_again()
    for _ in range(turns):
        await asyncio.sleep(0)
    closing = asyncio.ensure_future(pool.__aexit__())
    done, _ = await asyncio.wait((closing,), timeout=HANG_S / 6)
    closing.cancel()
    assert done, "the pool does not close"


async def test_a_pool_closes_also_where_a_call_swallows_its_cancellation(monkeypatch: pytest.MonkeyPatch) -> None:
    """As gRPC's calls do when the answer comes in the same moment."""
    called = asyncio.Event()

    async def check(timeout_s: float) -> None:
        if not called.is_set():
            called.set()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()

    pool = Pool(["127.0.0.1:1"], check_interval_s=HANG_S)
    await pool.__aenter__()
    monkeypatch.setattr(pool.endpoints[0].client, "check", check)
    pool.endpoints[0].look_again()
    await asyncio.wait_for(called.wait(), HANG_S)
    await asyncio.wait_for(pool.__aexit__(), HANG_S / 6)


async def test_a_conversation_that_is_sent_whole_goes_on_elsewhere_when_its_server_drains() -> None:
    async with several() as gateway:
        assigned = gateway.server_of(await gateway.text(ask(session_id="s")))
        assigned.ready = False
        await gateway.until_all_are(State.NOT_READY, assigned)
        assert await gateway.text(ask(session_id="s")) != assigned.target


async def test_a_server_whose_checks_have_no_answer_in_time_is_down_until_it_answers() -> None:
    async with several(2) as gateway:
        hangs, well = gateway.servers
        (endpoint,) = [endpoint for endpoint in gateway.pool.endpoints if endpoint.target == hangs.target]
        check = endpoint.client.check
        endpoint.client.check = lambda _: check(HUNG_S)  # type: ignore[method-assign]
        await endpoint.checked()  # those with the long limit are over
        hangs.fall_asleep()
        with pytest.raises(Unresponsive):
            await check(HUNG_S)
        await gateway.until_all_are(State.DOWN, hangs)
        assert await gateway.text(ask()) == well.target
        endpoint.client.check = check  # type: ignore[method-assign]
        hangs.wake_up()
        await gateway.until_all_are(State.UP)


async def test_when_all_hang_requests_wait_for_the_first_that_comes_back() -> None:
    async with several(2, some_hang=True) as gateway:
        for server in gateway.servers:
            server.fall_asleep()
        waiting = asyncio.create_task(gateway.text(ask()))
        await gateway.until_all_are(State.DOWN)
        assert "no server can take requests" in str(await gateway.pool.why_not_ready())
        with pytest.raises(Unavailable, match="no server can take requests"):
            await gateway.text(ask())
        (has,) = [server for server in gateway.servers if server.requests]
        back = gateway.other(has)
        back.wake_up()
        assert await asyncio.wait_for(waiting, HANG_S) == back.target


async def test_a_request_that_brings_servers_down_does_not_bring_down_all() -> None:
    with (
        process_that_dies_of_requests() as one,
        process_that_dies_of_requests() as two,
        process_that_dies_of_requests() as three,
    ):
        processes = [process for process, _ in (one, two, three)]
        targets = [target for _, target in (one, two, three)]
        pool = Pool(targets, check_interval_s=CHECK_INTERVAL_S, check_timeout_s=HANG_S)
        async with pool:
            await until(lambda: all(endpoint.usable for endpoint in pool.endpoints), "up")
            with pytest.raises(Unavailable):
                await pool.begin(ask(), "poison")
            await until(lambda: sum(process.poll() is not None for process in processes) == 2, "two have died")
            await until(lambda: sum(endpoint.usable for endpoint in pool.endpoints) == 1, "one is up")
            assert await pool.why_not_ready() is None


async def test_the_time_of_a_request_is_that_of_all_its_tries() -> None:
    async with several() as gateway:
        first = gateway.servers[0]

        async def late(request: pb.ModelInferRequest) -> Responses:
            await asyncio.sleep(0.2)
            yield error("[503] the engine is shutting down")

        first.behaviour = late
        await gateway.text(ask(timeout_ms=60_000))
        (moved,) = [request for server in gateway.servers[1:] for request in server.requests]
        left = input_number(moved, "timeout_ms")
        assert left is not None and left <= 59_800
        first.behaviour = hold(asyncio.Event())
        gateway.engine = Engine(gateway.pool, timeout_s=0.2)
        for server in gateway.servers:
            server.behaviour = hold(asyncio.Event())
        retries = gateway.retries
        with pytest.raises(DeadlineExceeded, match="did not answer in time"):
            await gateway.text(ask())
        assert gateway.retries == retries


async def test_an_interactive_turn_waits_for_its_own_server_while_that_is_up(caplog: pytest.LogCaptureFixture) -> None:
    async with several() as gateway:
        turn = ask(session_id="s", interactive=True)
        assigned = gateway.server_of(await gateway.text(turn))
        assigned.behaviour = refuse("[429] the queue is full; retry after 9 s")
        with pytest.raises(Overloaded):
            await gateway.text(turn)
        assigned.behaviour = refuse("[503] only this time")
        with pytest.raises(Unavailable, match="only this time"):
            await gateway.text(turn)
        # A conversation that is sent whole is answered elsewhere and goes on there: the old history is out of date.
        moved = gateway.server_of(await gateway.text(ask(session_id="s")))
        assert moved is not assigned
        assert "which did not take the request, to" in caplog.text
        assigned.behaviour = assigned.say_name
        assert await gateway.text(turn) == moved.target
        await until(lambda: ("end_session", "s") in assigned.actions, "the old server forgets it")


async def test_a_session_whose_home_is_lost_moves_and_the_old_home_forgets_it() -> None:
    async with several(some_hang=True) as gateway:
        turn = ask(session_id="s", interactive=True)
        assigned = gateway.server_of(await gateway.text(turn))
        assigned.fall_asleep()
        with pytest.raises(SessionLost):
            await asyncio.wait_for(gateway.text(turn), HANG_S)
        moved = gateway.server_of(await gateway.text(turn))
        assert moved is not assigned and gateway.retries == 0
        assigned.wake_up()
        await gateway.until_all_are(State.UP)
        assert ("end_session", "s") in assigned.actions
        assert await gateway.text(turn) == moved.target


async def test_a_turn_that_no_other_server_takes_leaves_the_session_where_it_is() -> None:
    async with several(some_hang=True) as gateway:
        turn = ask(session_id="s", interactive=True)
        assigned = gateway.server_of(await gateway.text(turn))
        for server in gateway.servers:
            if server is not assigned:
                server.behaviour = refuse("[429] the queue is full; retry after 9 s")
        assigned.fall_asleep()
        with pytest.raises(Overloaded):
            await asyncio.wait_for(gateway.text(ask(session_id="s")), HANG_S)
        assigned.wake_up()
        await gateway.until_all_are(State.UP)
        assert await gateway.text(turn) == assigned.target
        assert ("end_session", "s") not in assigned.actions


async def test_a_sessions_end_is_told_where_it_is() -> None:
    async with several() as gateway:
        pool, turn = gateway.pool, ask(session_id="s", interactive=True)
        await pool.cancel_session("unknown")
        assert all(server.actions == [("cancel", "unknown")] for server in gateway.servers)
        assigned = gateway.server_of(await gateway.text(turn))
        await pool.stop_session("s")
        await pool.cancel_session("s")
        await pool.end_session("s")
        assert assigned.actions[1:] == [("stop", "s"), ("cancel", "s"), ("end_session", "s")]
        assert all(len(server.actions) == 1 for server in gateway.servers if server is not assigned)
        assigned.ready = False
        await gateway.until_all_are(State.NOT_READY, assigned)
        await pool.end_session("s")
        assert len(assigned.actions) == 4
        assigned.ready = True
        await gateway.until_all_are(State.UP)
        assert assigned.actions[4:] == [("end_session", "s")]


@pytest.mark.parametrize("away", [False, True])
async def test_what_ends_a_session_that_moves_is_told_where_its_request_runs(away: bool) -> None:
    async with several(2) as gateway:
        pool = gateway.pool
        assigned = gateway.server_of(await gateway.text(ask(session_id="s", interactive=True)))
        moved, release = gateway.other(assigned), asyncio.Event()
        moved.behaviour = hold(release)
        assigned.ready = False
        await gateway.until_all_are(State.NOT_READY, assigned)
        whole = asyncio.create_task(gateway.text(ask(session_id="s")))
        await until(lambda: len(moved.requests) == 1, "the new server has the request")
        if not away:
            assigned.ready = True
            await gateway.until_all_are(State.UP)
        await pool.stop_session("s")
        await pool.cancel_session("s")
        await pool.end_session("s")
        assert moved.actions == [("stop", "s"), ("cancel", "s"), ("end_session", "s")]
        release.set()
        assert await whole == "end"
        await until(lambda: moved.actions.count(("end_session", "s")) == 2, "the first end may have come too early")
        assigned.ready = True
        await gateway.until_all_are(State.UP)
        await until(lambda: ("end_session", "s") in assigned.actions, "the old server is told of the end, too")
        # The answer came after the end, so it has not moved the session: the next turn begins where sessions do.
        assert await gateway.text(ask(session_id="s", interactive=True)) == assigned.target
        assert assigned.actions.count(("end_session", "s")) == 1


async def test_an_end_is_not_said_again_where_the_session_has_begun_anew() -> None:
    async with several(1) as gateway:
        (server,), release = gateway.servers, asyncio.Event()
        server.behaviour = hold(release)
        before = asyncio.create_task(gateway.text(ask(session_id="s")))
        await until(lambda: len(server.requests) == 1, "it has the request")
        await gateway.pool.end_session("s")
        after = asyncio.create_task(gateway.text(ask(session_id="s", interactive=True)))
        await until(lambda: len(server.requests) == 2, "it has the next one")
        release.set()
        await asyncio.gather(before, after)
        for _ in range(2):
            await gateway.pool.endpoints[0].checked()
        assert server.actions == [("end_session", "s")]


async def test_an_end_does_not_wait_for_a_server_that_hangs_with_a_request_of_the_session() -> None:
    async with several(some_hang=True) as gateway:
        assigned = gateway.server_of(await gateway.text(ask(session_id="s", interactive=True)))
        assigned.behaviour = hold(asyncio.Event(), [part("begin ")])
        async with aclosing(gateway.stream(ask(session_id="s", stream=True))) as parts:
            await anext(parts)
            assigned.fall_asleep()
            await gateway.until_all_are(State.DOWN, assigned)
            await asyncio.wait_for(gateway.pool.end_session("s"), HANG_S)
        assigned.wake_up()
        await until(lambda: ("end_session", "s") in assigned.actions, "it is told when it is back")


async def test_the_end_of_a_session_of_unknown_place_is_told_to_all_also_to_one_that_is_down() -> None:
    async with several() as gateway:
        away = gateway.servers[0]
        away.ready = False
        await gateway.until_all_are(State.NOT_READY, away)
        await gateway.pool.end_session("unknown")
        assert away.actions == []
        away.ready = True
        await until(lambda: away.actions == [("end_session", "unknown")], "it is told when it is back")


async def test_a_request_that_is_not_taken_does_not_replace_a_history_that_was_to_end() -> None:
    async with several() as gateway:
        assigned = gateway.server_of(await gateway.text(ask(session_id="s", interactive=True)))
        assigned.action_error = "[503] not now"
        with pytest.raises(Unavailable):
            await gateway.pool.end_session("s")
        answering, assigned.behaviour = assigned.behaviour, refuse("[400] top_p = 7: send at most 1")
        with pytest.raises(BadRequest):
            await gateway.text(ask(session_id="s"))
        assigned.behaviour, assigned.action_error = answering, ""
        await until(lambda: ("end_session", "s") in assigned.actions, "it is still told to forget it")


@pytest.mark.parametrize(("said", "raised"), [("[503] not now", Unavailable), ("not now", ServerError)])
async def test_a_session_whose_end_could_not_be_told_is_ended_later(said: str, raised: type[Exception]) -> None:
    async with several() as gateway:
        pool, turn = gateway.pool, ask(session_id="s", interactive=True)
        assigned = gateway.server_of(await gateway.text(turn))
        assigned.action_error = said
        with pytest.raises(raised, match="not now"):
            await pool.end_session("s")
        # What has been ended does not go on, neither here nor as if it were new elsewhere.
        asked = sum(len(server.requests) for server in gateway.servers)
        with pytest.raises(raised, match="not now"):
            await gateway.text(turn)
        assert sum(len(server.requests) for server in gateway.servers) == asked
        assigned.action_error = ""
        await until(lambda: ("end_session", "s") in assigned.actions, "it is told again")
        assert await gateway.text(turn) == assigned.target
        assert assigned.actions == [("end_session", "s")]


async def test_of_sessions_that_went_on_elsewhere_none_is_left_out_when_telling_fails() -> None:
    async with several(2) as gateway:
        first = gateway.servers[0]
        (endpoint,) = [one for one in gateway.pool.endpoints if one.target == first.target]
        first.ready = False
        await gateway.until_all_are(State.NOT_READY, first)
        sessions = [f"s{number}" for number in range(40)]
        for session_id in sessions:
            endpoint.stale_sessions.remember(session_id, None)
        first.action_error = "[503] not yet"
        first.ready = True
        await gateway.until_all_are(State.UP)
        assert sorted(endpoint.stale_sessions) == sorted(sessions)
        first.action_error = ""
        await until(lambda: not endpoint.stale_sessions, "all are told")
        assert sorted(first.actions) == sorted(("end_session", session_id) for session_id in sessions)


async def test_checks_go_on_after_an_error_of_the_gateways_own(monkeypatch: pytest.MonkeyPatch) -> None:
    async with several(2) as gateway:
        endpoint, failed = gateway.pool.endpoints[0], asyncio.Event()

        async def fails(timeout_s: float) -> None:
            failed.set()
            raise RuntimeError("a bug")

        with monkeypatch.context() as patched:
            patched.setattr(endpoint.client, "check", fails)
            await asyncio.wait_for(failed.wait(), HANG_S)
        server = gateway.server_of(endpoint.target)
        server.ready = False
        await gateway.until_all_are(State.NOT_READY, server)
        server.ready = True
        await gateway.until_all_are(State.UP)


async def test_leaving_a_request_cancels_it_where_it_is() -> None:
    async with several() as gateway:
        for server in gateway.servers:
            server.behaviour = hold(asyncio.Event())
        waiting = asyncio.create_task(gateway.text(ask(), id="left"))
        await until(lambda: any(server.requests for server in gateway.servers), "asked")
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        (has,) = [server for server in gateway.servers if server.requests]
        await until(lambda: ("cancel", "left") in has.actions, "cancelled")
        assert all(not server.actions for server in gateway.servers if server is not has)
        assert gateway.retries == 0


async def test_servers_are_removed_and_returned_without_a_failed_request() -> None:
    release = asyncio.Event()
    async with several() as gateway:
        pool, targets = gateway.pool, [server.target for server in gateway.servers]
        removed = gateway.servers[0]
        removed.behaviour = hold(release, [part("begin ")])
        running = asyncio.create_task(gateway.text(ask(stream=True)))
        await until(lambda: len(removed.requests) == 1, "it has a request")
        pool.set_targets(targets[1:])
        assert {await gateway.text(ask()) for _ in range(6)} == set(targets[1:])
        # Taken back while it still works, it goes on.
        pool.set_targets(targets)
        removed.behaviour = removed.say_name
        assert {await gateway.text(ask()) for _ in range(6)} == set(targets[1:])
        pool.set_targets(targets[1:])
        release.set()
        assert await running == "begin end"
        await until(lambda: len(pool.endpoints) == 2, "it is gone")
        series = [
            sample.labels["endpoint"] for family in EndpointMetrics({"m": pool}).collect() for sample in family.samples
        ]
        assert series == targets[1:] * 2
        await removed.go()
        pool.set_targets(targets)
        assert {await gateway.text(ask()) for _ in range(6)} == set(targets[1:])


async def test_metrics_show_each_servers_state_and_load() -> None:
    release = asyncio.Event()
    async with several() as gateway:
        for server in gateway.servers:
            server.behaviour = hold(release)
        waiting = asyncio.create_task(gateway.text(ask(max_tokens=100)))
        await until(lambda: bool(gateway.servers[0].requests), "asked")
        gateway.servers[1].ready = False
        await gateway.until_all_are(State.NOT_READY, gateway.servers[1])
        values = {
            (sample.name.removeprefix("charonia_gateway_endpoint_"), sample.labels["endpoint"]): sample.value
            for family in EndpointMetrics({"model": gateway.pool}).collect()
            for sample in family.samples
        }
        first, second, third = (server.target for server in gateway.servers)
        assert [values["up", target] for target in (first, second, third)] == [1, 0, 1]
        assert [values["outstanding_tokens", target] for target in (first, second, third)] == [101, 0, 0]
        release.set()
        await waiting


async def test_one_server_is_asked_whatever_its_checks_say() -> None:
    async with several(1) as gateway:
        (only,) = gateway.servers
        only.ready = False
        await gateway.until_all_are(State.NOT_READY)
        assert "is not ready" in str(await gateway.pool.why_not_ready())
        assert await gateway.text(ask(session_id="s")) == only.target
        await gateway.pool.end_session("s")
        assert only.actions == [("end_session", "s")]
        only.behaviour = refuse("[429] the queue is full; retry after 4 s")
        with pytest.raises(Overloaded, match="queue is full"):
            await gateway.text(ask())
        assert gateway.retries == 0 and gateway.choices == []


async def test_a_turn_whose_history_was_on_a_removed_server_is_refused_once_also_by_the_only_one_left() -> None:
    async with several(2) as gateway:
        turn = ask(session_id="s", interactive=True)
        assigned = gateway.server_of(await gateway.text(turn))
        other = gateway.other(assigned)
        gateway.pool.set_targets([other.target])
        await until(lambda: len(gateway.pool.endpoints) == 1, "it is gone")
        with pytest.raises(SessionLost):
            await gateway.text(turn)
        assert other.requests == []
        assert await gateway.text(turn) == other.target


async def test_a_listed_server_is_told_however_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("charonia_gateway.endpoints.pool._MAX_TARGETS", 1)
    async with several(2) as gateway:
        first = gateway.servers[0]
        (session_id,) = gateway.sessions_of(first, 1)
        assert await gateway.text(ask(session_id=session_id, interactive=True)) == first.target
        first.ready = False
        await gateway.until_all_are(State.NOT_READY, first)
        assert await gateway.text(ask(session_id=session_id)) != first.target
        first.ready = True
        await gateway.until_all_are(State.UP)
        assert first.actions == [("end_session", session_id)]


@pytest.mark.parametrize("whole", [False, True])
async def test_a_server_that_was_removed_is_told_of_the_end_when_it_comes_back(whole: bool) -> None:
    async with several(2) as gateway:
        pool, targets = gateway.pool, [server.target for server in gateway.servers]
        assigned = gateway.server_of(await gateway.text(ask(session_id="s", interactive=True)))
        other = gateway.other(assigned)
        pool.set_targets([other.target])
        await until(lambda: len(pool.endpoints) == 1, "it is gone")
        if whole:  # the session goes on elsewhere
            assert await gateway.text(ask(session_id="s")) == other.target
        else:
            await pool.end_session("s")
        assert assigned.actions == []
        pool.set_targets(targets)
        await until(lambda: ("end_session", "s") in assigned.actions, "it is told")


async def test_a_stream_that_is_left_does_not_replace_a_history_that_was_to_end() -> None:
    async with several() as gateway:
        assigned = gateway.server_of(await gateway.text(ask(session_id="s", interactive=True)))
        assigned.action_error = "[503] not now"
        with pytest.raises(Unavailable):
            await gateway.pool.end_session("s")
        answering, assigned.behaviour = assigned.behaviour, hold(asyncio.Event(), [part("begin ")])
        async with aclosing(gateway.stream(ask(session_id="s", stream=True))) as parts:
            await anext(parts)
        assigned.behaviour, assigned.action_error = answering, ""
        await until(lambda: ("end_session", "s") in assigned.actions, "it is still told to forget it")


async def test_the_models_quality_is_asked_of_a_server_that_works_and_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool, "_DESCRIPTION_TIMEOUT_S", HANG_S)
    async with several(2) as gateway:
        gone, working = gateway.servers
        await gone.go()
        working.quality = [{"perplexity": 5.0}, "no record"]
        assert await gateway.pool.quality() == [{"perplexity": 5.0}]
        working.quality = []
        assert await gateway.pool.quality() == [{"perplexity": 5.0}]


async def test_a_text_is_tokenized_by_a_server_that_can_and_an_error_of_the_clients_is_told() -> None:
    async with several(2) as gateway:
        ending, working = gateway.servers
        ending.tokenizer_error = "Request for unknown model: 'preprocessing' has no available versions"
        for _ in range(2):
            found = await gateway.pool.tokenize(TokenizeRequest(text="hello"))
            assert (found.token_ids, found.context_length, found.strings) == ([0, 1, 2, 3, 4], 10, None)
        working.tokenizer_error = "[400] text_input: wrong"
        with pytest.raises(BadRequest, match="wrong"):
            await gateway.pool.tokenize(TokenizeRequest(text="hello"))
        working.tokenizer_error = ending.tokenizer_error
        with pytest.raises(Unavailable):
            await gateway.pool.tokenize(TokenizeRequest(text="hello"))


async def test_formats_of_answers_are_asked_once_for_all_and_waited_for_until_they_are_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool, "_DESCRIPTION_TIMEOUT_S", HANG_S)
    async with several(1) as gateway:
        (server,) = gateway.servers
        server.formats = {"tool_calls": "hermes", "reasoning": "think"}
        server.describes.clear()
        asking = [asyncio.create_task(gateway.pool.answer_formats()) for _ in range(5)]
        await until(lambda: server.asked == ["answer_formats"], "it is asked")
        asking[0].cancel()
        server.describes.set()
        found = await asyncio.gather(*asking, return_exceptions=True)
        assert found[1:] == [server.formats] * 4
        assert server.asked == ["answer_formats"]
        # What is known is given at once, whatever the server does.
        monkeypatch.setattr(pool, "_DESCRIPTION_AGE_S", 0.0)
        known, server.formats = server.formats, {"tool_calls": None, "reasoning": None}
        server.describes.clear()
        assert await asyncio.wait_for(gateway.pool.answer_formats(), HANG_S / 2) == known
        await until(lambda: len(server.asked) == 2, "it is asked again")
        server.describes.set()
        while await gateway.pool.answer_formats() != server.formats:
            await asyncio.sleep(0.01)


async def test_formats_that_no_server_could_tell_are_asked_for_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_DESCRIPTION_TIMEOUT_S", 0.05)
    async with several(1) as gateway:
        (server,) = gateway.servers
        server.formats = {"tool_calls": None, "reasoning": "think"}
        server.describes.clear()
        assert await gateway.pool.answer_formats() == {}
        server.describes.set()
        monkeypatch.setattr(pool, "_DESCRIPTION_TIMEOUT_S", HANG_S)
        gateway.pool._formats_at -= HANG_S
        assert await gateway.pool.answer_formats() == server.formats


async def test_names_of_tokens_that_a_server_has_no_more_are_asked_of_another() -> None:
    async def answer(request: pb.ModelInferRequest) -> Responses:
        yield with_logprobs(part("012", "stop"), 3, 1)

    async with several(2) as gateway:
        for server in gateway.servers:
            server.behaviour = answer
        gateway.servers[0].vocabulary_gone = True
        for _ in range(4):  # to each of them
            (whole,) = await gateway.parts(ask(logprobs=1))
            assert whole.tokens == [b"0", b"1", b"2"]
            assert [top.token for (top,) in whole.top_logprobs] == [b"0", b"1", b"2"]
        assert [len(server.requests) > 0 for server in gateway.servers] == [True, True]
        assert [server.lookups for server in gateway.servers] == [1, 2], "each client asks once"


# --- the workers of one gateway


@asynccontextmanager
async def two_workers(folder: Path) -> AsyncIterator[tuple[Gateway, Gateway]]:
    """Two in front of the same two servers, which share what workers of one gateway do."""
    create(folder)
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(Double()) for _ in range(2)]
        here, there = (Gateway(servers, Shared(folder, number)) for number in (1, 2))
        for one in (here, there):
            await stack.enter_async_context(one.pool)
            await one.until_all_are(State.UP)
        yield here, there


async def test_a_session_that_moved_is_found_by_the_other_worker(tmp_path: Path) -> None:
    async with two_workers(tmp_path) as (here, there):
        first = here.servers[0]
        (session,) = here.sessions_of(first, 1)
        turn = ask(session_id=session, interactive=True)
        assert await here.text(turn) == first.target
        first.ready = False
        for one in (here, there):
            await one.until_all_are(State.NOT_READY, first)
        with pytest.raises(SessionLost):  # the history that this one never asked for is elsewhere
            await there.text(turn)
        moved = here.other(first)
        assert [await one.text(turn) for one in (here, there)] == [moved.target] * 2
        first.ready = True
        for one in (here, there):
            await one.until_all_are(State.UP)
        assert first.actions == [("end_session", session)], "it is told once, by one of them"
        assert [await one.text(turn) for one in (here, there)] == [moved.target] * 2
        await there.pool.end_session(session)
        assert moved.actions == [("end_session", session)]
        assert await here.text(turn) == first.target, "it begins anew"


async def test_no_worker_goes_on_with_a_history_that_the_other_is_having_forgotten(tmp_path: Path) -> None:
    async with two_workers(tmp_path) as (here, there):
        first = here.servers[0]
        session, another = here.sessions_of(first, 2)
        stale, theirs = (
            next(endpoint for endpoint in one.pool.endpoints if endpoint.target == first.target).stale_sessions
            for one in (here, there)
        )
        for name in (session, another):
            stale.remember(name, None)
            assert stale.claim(name) == "mine" and theirs.claim(name) == "theirs"
        waits = [
            asyncio.create_task(there.text(ask(session_id=session, interactive=True))),
            asyncio.create_task(there.text(ask(session_id=another))),  # with the whole conversation
        ]
        await asyncio.wait(waits, timeout=5 * CHECK_INTERVAL_S)
        assert not first.requests and not any(wait.done() for wait in waits)
        stale.pop(session)  # the server was told
        stale.release(session)
        stale.release(another)  # it could not be
        assert await asyncio.gather(*waits) == [first.target] * 2
        assert ("end_session", session) not in first.actions
        assert not theirs, "whoever has the whole conversation has replaced the other"


async def test_an_end_by_the_other_worker_is_said_again_where_it_may_have_come_before_the_turn(tmp_path: Path) -> None:
    async with two_workers(tmp_path) as (here, there):
        first = here.servers[0]
        (session,) = here.sessions_of(first, 1)
        release = asyncio.Event()
        first.behaviour = hold(release)
        turn = asyncio.create_task(here.text(ask(session_id=session, interactive=True)))
        await until(lambda: bool(first.requests), "it has the turn")
        await there.pool.end_session(session)
        assert first.actions == [("end_session", session)]
        release.set()
        assert await turn == "end"
        await until(lambda: len(first.actions) == 2, "the first end may have come too early")
        assert await there.text(ask(session_id=session, interactive=True)) == "end"
        assert first.actions == [("end_session", session)] * 2, "what came later is not ended"


@pytest.mark.parametrize("by", ["the other", "its own"])
async def test_an_end_by_a_worker_is_not_said_again_where_the_session_has_begun_anew(tmp_path: Path, by: str) -> None:
    async with two_workers(tmp_path) as (here, there):
        first = here.servers[0]
        (session,) = here.sessions_of(first, 1)
        release = asyncio.Event()
        first.behaviour = hold(release)
        before = asyncio.create_task(here.text(ask(session_id=session)))
        await until(lambda: len(first.requests) == 1, "it has the request")
        await (here if by == "its own" else there).pool.end_session(session)
        after = asyncio.create_task(there.text(ask(session_id=session, interactive=True)))
        await until(lambda: len(first.requests) == 2, "it has the next one")
        release.set()
        await asyncio.gather(before, after)
        for one in (here, there):
            for endpoint in one.pool.endpoints:
                await endpoint.checked()
        assert first.actions == [("end_session", session)]


async def test_what_a_worker_that_died_has_at_a_server_is_cancelled_once_the_server_takes_that(tmp_path: Path) -> None:
    async with two_workers(tmp_path) as (here, there):
        first, second = here.servers
        release = asyncio.Event()
        first.behaviour = second.behaviour = hold(release)
        lost = [asyncio.create_task(here.text(ask())) for _ in range(3)]
        kept = asyncio.create_task(there.text(ask(), id="kept"))
        await until(lambda: len(first.requests) + len(second.requests) == 4, "they have the requests")
        first.action_error = second.action_error = "[503] not now"
        first.ready = False  # it drains, and takes that too
        Shared(tmp_path).forget(1)
        for _ in range(2):
            for endpoint in (*here.pool.endpoints, *there.pool.endpoints):
                await endpoint.checked()
        assert not any(task.done() for task in (*lost, kept))
        first.action_error = second.action_error = ""
        await until(lambda: len(first.actions) + len(second.actions) == 3, "they are cancelled")
        cancelled = {*first.actions, *second.actions}
        asked = {("cancel", request.id) for request in (*first.requests, *second.requests)}
        assert cancelled < asked and len(cancelled) == 3
        release.set()
        await asyncio.gather(*lost, kept)
        await until(lambda: not Shared(tmp_path).run("SELECT * FROM calls").fetchall(), "nothing runs")
        for endpoint in (*here.pool.endpoints, *there.pool.endpoints):
            await endpoint.checked()
        assert len(first.actions) + len(second.actions) == 3


async def test_cancels_that_hang_or_fail_hold_up_no_check_and_are_made_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    create(tmp_path)
    ids = {f"request-{number}" for number in range(40)}
    may_answer = asyncio.Event()
    cancelled: set[str] = set()
    failures = [RuntimeError("the gateway's own")]

    class Server:
        target = "some:1"
        checks = 0
        asked = 0

        async def check(self, timeout_s: float) -> None:
            self.checks += 1

        async def cancel(self, request_id: str) -> None:
            self.asked += 1
            await may_answer.wait()
            if failures:
                raise failures.pop()
            cancelled.add(request_id)

        async def close(self) -> None:
            pass

    server, state = Server(), Shared(tmp_path, 2)

    def lose() -> None:
        calls = Calls(Shared(tmp_path, 1), "some")
        for id in ids:
            calls.begin(id)
        Shared(tmp_path).forget(1)

    lose()
    endpoint = Endpoint(server, lambda _: None, SharedStaleSessions(state, "some"), Calls(state, "some"))  # type: ignore[arg-type]
    watching = asyncio.create_task(endpoint.watch(0.01, HANG_S))
    await until(lambda: server.asked > 0 and server.checks > 3, "checks go on")
    assert not cancelled and "cancelled" not in caplog.text
    may_answer.set()
    await until(lambda: cancelled == ids, "all are cancelled")
    await until(lambda: not state.run("SELECT * FROM calls").fetchall(), "nothing is left")
    assert "could not be cancelled" in caplog.text and "own" in caplog.text and "were cancelled" in caplog.text

    may_answer.clear()
    asked = server.asked
    lose()
    await until(lambda: server.asked > asked, "it is asked again")
    watching.cancel()
    await endpoint.close()
    assert len(Calls(Shared(tmp_path, 3), "some").take_lost()) == len(ids), "another worker can"


async def test_a_request_that_is_left_is_known_until_its_server_has_been_told(tmp_path: Path) -> None:
    create(tmp_path)
    state = Shared(tmp_path, 1)

    def known() -> int:
        return len(state.run("SELECT * FROM calls").fetchall())

    told: list[int] = []

    class Server:
        target = "some:1"

        async def generate(self, *_: Any, **__: Any) -> AsyncIterator[GenerateResponse]:
            try:
                yield GenerateResponse("a")
                await asyncio.Event().wait()
            finally:
                told.append(known())

        async def check(self, timeout_s: float) -> None:
            pass

        async def close(self) -> None:
            pass

    async with Pool(["some:1"], connect=lambda _: Server(), shared=state) as servers:  # type: ignore[arg-type,return-value]
        answer = await servers.begin(ask(stream=True), "left later")
        await answer.aclose()
        waiting = asyncio.create_task(servers.begin(ask(), "left before its end"))
        await until(lambda: known() == 1, "it is asked")
        waiting.cancel()
        await asyncio.wait((waiting,))
    assert told == [1, 1] and known() == 0


def test_requests_at_a_server_that_could_not_be_written_down_are_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create(tmp_path)
    monkeypatch.setattr(shared, "_PAUSE_S", 0)
    here, there = (Shared(tmp_path, worker) for worker in (1, 2))
    ours, theirs = Calls(here, "some"), Calls(there, "some")
    ours.begin("ended")
    other = Shared(tmp_path)
    other.run("BEGIN IMMEDIATE")
    ours.begin("runs")
    ours.begin("was short")
    ours.end("was short")
    ours.end("ended")
    here.write_late()
    other.run("ROLLBACK")
    here.write_late()
    other.forget(1)
    assert Calls(there, "another").take_lost() == []
    assert theirs.take_lost() == ["runs"] and theirs.take_lost() == []
    other.run("BEGIN IMMEDIATE")
    theirs.give_back("runs")
    other.run("ROLLBACK")
    there.write_late()
    assert theirs.take_lost() == ["runs"]
    theirs.end("runs")
    other.forget(2)
    assert ours.take_lost() == []


async def test_a_claim_ends_with_its_worker(tmp_path: Path) -> None:
    async with two_workers(tmp_path) as (here, there):
        first = here.servers[0]
        (session,) = here.sessions_of(first, 1)
        (stale,) = [one.stale_sessions for one in here.pool.endpoints if one.target == first.target]
        stale.remember(session, None)
        assert stale.claim(session) == "mine"
        turn = asyncio.create_task(there.text(ask(session_id=session, interactive=True)))
        Shared(tmp_path).forget(1)
        assert await asyncio.wait_for(turn, HANG_S) == first.target
        assert first.actions == [("end_session", session)]


async def test_a_server_that_comes_back_waits_for_the_end_that_its_worker_is_telling(tmp_path: Path) -> None:
    """It has another object, which knows of that by the claim alone."""
    create(tmp_path)
    told, may_end = asyncio.Event(), asyncio.Event()

    class Server:
        target = "some:1"

        async def end_session(self, session_id: str) -> None:
            told.set()
            await may_end.wait()

    one = Shared(tmp_path, 1)
    before, after = (
        Endpoint(Server(), lambda _: None, SharedStaleSessions(one, "some"))  # type: ignore[arg-type]
        for _ in range(2)
    )
    before.stale_sessions.remember("a", None)
    telling = asyncio.create_task(before.forget_stale_session("a"))
    await told.wait()
    assert after.stale_sessions.claim("a") == "theirs" and not after.stale_sessions.take("a")
    waiting = asyncio.create_task(after.forgotten("a"))
    await asyncio.sleep(0)
    assert not waiting.done()
    may_end.set()
    await asyncio.wait_for(asyncio.gather(telling, waiting), HANG_S)
    assert not after.stale_sessions


def test_a_claim_that_nobody_ends_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    create(tmp_path)
    here, there = (SharedStaleSessions(Shared(tmp_path, worker), "some") for worker in (1, 2))
    monkeypatch.setattr(sessions, "_CLAIM_S", -1.0)
    here.remember("a", None)
    assert here.claim("a") == "mine" and there.claim("a") == "mine" and there.take("a")


def test_what_cannot_be_written_is_kept_and_written_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    create(tmp_path)
    monkeypatch.setattr(shared, "_PAUSE_S", 0)
    here, there = (SharedStaleSessions(Shared(tmp_path, worker), "some") for worker in (1, 2))
    for name in "abc":
        here.remember(name, None)
    other = Shared(tmp_path)
    other.run("BEGIN IMMEDIATE")
    here.remember("d", None)
    del here["a"]
    assert here.claim("b") == "mine" and here.take("b")
    here.release("b")
    assert sorted(here) == ["c", "d"] and len(here) == 2 and "a" not in here and "d" in here
    assert sorted(there) == ["a", "b", "c"]
    other.run("ROLLBACK")
    here.remember("e", None)
    assert sorted(here) == sorted(there) == ["c", "d", "e"]


def test_what_is_beyond_the_limit_is_found_by_the_index_alone(tmp_path: Path) -> None:
    """Of 100,000 entries it takes 5 ms then and 150 otherwise, in which no other worker could write."""
    create(tmp_path)
    plan = Shared(tmp_path).run(f"EXPLAIN QUERY PLAN {sessions.BEYOND}", ("some", 1)).fetchall()
    assert [row[-1] for row in plan] == ["SEARCH recent USING COVERING INDEX recent_used (space=?)"]


def test_what_is_written_later_takes_the_place_of_nothing_newer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create(tmp_path)
    monkeypatch.setattr(shared, "_PAUSE_S", 0)
    states = [Shared(tmp_path, worker) for worker in (1, 2)]
    here, there = (SharedSessions(state, "some") for state in states)
    old, new = (Affinity(f"{name}:1", answered=True) for name in ("old", "new"))
    there.update({"moved": old, "answered": old, "ended": old, "begun anew": old, "ended there": old})
    other = Shared(tmp_path)
    other.run("BEGIN IMMEDIATE")
    for name in ("moved", "answered", "ended there", "new here, ended there"):
        here.remember(name, old)
    here["only here"] = old
    del here["ended"]
    del here["begun anew"]
    other.run("ROLLBACK")
    del there["ended there"]
    del there["new here, ended there"]
    there.remember("moved", new)
    there["answered"] = new
    there.remember("begun anew", new)
    expected = {"moved": new, "answered": new, "begun anew": new, "only here": old}
    assert dict(here) == expected, "also before it is written"
    states[0].write_late()
    assert dict(here) == dict(there) == expected
    assert not here._kept


def test_what_servers_were_not_told_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    create(tmp_path)
    monkeypatch.setattr(pool, "_MAX_TARGETS", 2)
    monkeypatch.setattr(pool, "_PRUNE_EVERY", 1)
    monkeypatch.setattr(pool, "MAX_SESSIONS", 3)
    monkeypatch.setattr(sessions, "_PRUNE_EVERY", 1)
    state = Shared(tmp_path, 1)
    servers = Pool([], shared=state)
    for name in "abcde":
        servers._stale_at("some:1")
        servers._stale_at("some:1").remember(name, None)
    assert sorted(servers._stale_at("some:1")) == ["c", "d", "e"]
    for target in ("two:1", "three:1", "four:1", "five:1"):
        servers._stale_at(target).remember("a", None)
    spaces = state.run("SELECT DISTINCT space FROM recent ORDER BY space").fetchall()
    assert spaces == [("stale ensemble five:1",), ("stale ensemble four:1",), ("stale ensemble three:1",)]


def test_the_sessions_that_were_not_used_for_longest_are_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create(tmp_path)
    stale = SharedStaleSessions(Shared(tmp_path, 1), "some", limit=3)
    for name in "abcde":
        stale.remember(name, None)
    stale.remember("a", None)
    del stale["b"]
    stale.prune()
    assert sorted(stale) == ["a", "d", "e"] and len(stale) == 3
    assert "a" in stale and "b" not in stale and stale.pop("b", "none") == "none"
    assert not list(SharedStaleSessions(Shared(tmp_path, 1), "others"))
    state = Shared(tmp_path, 1)
    assert stale.claim("e") == "mine" and not stale.take("e")
    stale.release("e")
    assert stale.take("e") and stale.claim("e") == "gone" and not stale.take("e") and sorted(stale) == ["a", "d"]
    stale.prune()
    assert state.run("SELECT name FROM recent WHERE value IS NULL").fetchall() == [("e",)]
    monkeypatch.setattr(sessions, "_DELETED_S", -1.0)
    stale.prune()
    assert state.run("SELECT name FROM recent ORDER BY name").fetchall() == [("a",), ("d",)]
