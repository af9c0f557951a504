"""Limits, session owners and stored responses: in memory, and in a Redis that processes share."""

from __future__ import annotations

import asyncio
import contextlib
import math
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from charonia_gateway import state
from charonia_gateway.errors import ApiError
from charonia_gateway.keys import Key
from charonia_gateway.limiter import Limiter, LimitExceeded
from charonia_gateway.settings import Settings
from charonia_gateway.state import Bounds, MemoryState, RedisState, State, StateUnavailable
from charonia_gateway.stored import ResponseStore, Stored
from free_ports import free_ports
from key_files import PAST
from redis_server import redis_server

DEFAULT = Bounds()
HANG_S = 120
Make = Callable[[Bounds], tuple[State, State]]


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with redis_server(tmp_path_factory.mktemp("redis")) as url:
        yield url


@pytest.fixture(params=["memory", "redis"])
async def make(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Make]:
    """Create two users of the state: with the same memory, or with the same Redis from two processes."""
    monkeypatch.setattr(state, "_TIMEOUT_S", 120)
    made: list[State] = []

    def two(bounds: Bounds) -> tuple[State, State]:
        if request.param == "memory":
            one = MemoryState(bounds)
            made.append(one)
            return one, one
        url, prefix = request.getfixturevalue("redis"), uuid.uuid4().hex
        found = RedisState(url, bounds, prefix), RedisState(url.replace("redis", "valkey"), bounds, prefix)
        made.extend(found)
        return found

    yield two
    for one in made:
        await one.close()


def key(**limits: int) -> Key:
    return Key(id="0123456789ab", name="one", sha256="0" * 64, created=PAST, **limits)


def entry(id: str, text: str = "x", session: str = "s", owner: str | None = None) -> Stored:
    return Stored({"id": id}, [{"role": "user", "content": text}], session, owner)


def store_of(one: State, bounds: Bounds = DEFAULT) -> ResponseStore:
    return ResponseStore(one, bounds.count, bounds.bytes)


# --- limits


async def test_processes_share_requests_and_tokens_per_minute(make: Make) -> None:
    here, there = (Limiter(one) for one in make(DEFAULT))
    asked = key(requests_per_minute=3, tokens_per_minute=50)
    left = []
    for at, limiter in enumerate((here, there, here)):
        headers = await limiter.begin(asked, str(at))
        left.append([headers[f"x-ratelimit-remaining-{of}"] for of in ("requests", "tokens")])
        await limiter.charge(asked, 10)
    assert left == [["2", "50"], ["1", "40"], ["0", "30"]]
    with pytest.raises(LimitExceeded) as exceeded:
        await there.begin(asked, "more")
    assert exceeded.value.limit == "requests" and 0 < int(exceeded.value.headers["Retry-After"]) <= 60
    await here.charge(asked, 30)
    with pytest.raises(LimitExceeded) as exceeded:
        await there.begin(asked, "more")
    assert exceeded.value.limit == "tokens"


async def test_processes_share_concurrent_requests(make: Make) -> None:
    here, there = (Limiter(one) for one in make(DEFAULT))
    asked = key(max_concurrent=2, requests_per_minute=3)
    await here.begin(asked, "one")
    await there.begin(asked, "two")
    for full in (here, there):
        with pytest.raises(LimitExceeded, match="may have 2 sequences running"):
            await full.begin(asked, "more")
    await here.end(asked, "one")
    await there.begin(asked, "three")
    await there.end(asked, "three")
    for _ in range(2):  # a request that another limit rejects does not run
        with pytest.raises(LimitExceeded, match="3 requests per minute"):
            await here.begin(asked, "four")
    await there.end(asked, "two")


async def test_each_sequence_of_a_request_counts(make: Make) -> None:
    here, there = (Limiter(one) for one in make(DEFAULT))
    asked = key(max_concurrent=3)
    await here.begin(asked, "one")
    await here.add(asked, "one", 2)
    await there.begin(asked, "two")
    with pytest.raises(LimitExceeded):
        await there.add(asked, "two", 2)
    await here.end(asked, "one", 2)
    await there.add(asked, "two", 3)
    with pytest.raises(LimitExceeded):
        await here.begin(asked, "three")
    await there.end(asked, "two", 3)
    await here.begin(asked, "three")
    with pytest.raises(ApiError, match="asks for 4 sequences") as refused:
        await here.add(asked, "three", 4)
    assert refused.value.status == 400


async def test_a_window_ends_after_a_minute() -> None:
    now = [100.0]
    one = MemoryState(clock=lambda: now[0])
    assert await one.count("a", 3) == (3, 60)
    now[0] = 150
    assert await one.count("a", 2) == (5, 10)
    now[0] = 160
    assert await one.count("a", 1) == (1, 60)
    now[0] = 84.43645994768245  # (now + 60) - now is 60.00000000000001.
    assert await one.count("b", 1) == (1, 60)


async def test_concurrent_requests_of_a_process_that_died_end_with_their_lease(
    redis: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = (RedisState(redis, prefix="lease") for _ in range(2))
    assert await one.acquire("k", ["dead"], 2) and await two.acquire("k", ["alive"], 2)
    await one._redis.zadd("leaseholders:k", {"dead": 1, "alive": 1})  # the leases have ended
    monkeypatch.setattr(state, "_RENEW_S", 0)
    renewing = asyncio.create_task(two.follow())
    while await two._redis.zscore("leaseholders:k", "alive") == 1:
        await asyncio.sleep(0.01)
    renewing.cancel()
    assert await one.acquire("k", ["more"], 2) and not await one.acquire("k", ["too many"], 2)
    await two.release("k", ["alive"])
    await two._renew(["leaseholders:k"], [60, "alive"])  # it was about to be renewed when it was released
    assert await one.acquire("k", ["another"], 2)
    await one.close()
    await two.close()


async def test_without_redis_a_process_applies_limits_alone_and_logs_it_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (port,) = free_ports(1)
    one = RedisState(f"redis://127.0.0.1:{port}")
    limiter, asked = Limiter(one), key(requests_per_minute=3, max_concurrent=9)
    begun = await asyncio.gather(*(limiter.begin(asked, str(at)) for at in range(9)), return_exceptions=True)
    assert sum(isinstance(headers, dict) for headers in begun) == 3
    assert caplog.text.count("Redis cannot be reached (ConnectionError)") == 1
    await one.set_owner("s", "a:1")
    assert await one.owner("s") == "a:1"
    store = store_of(one)
    assert not await store.add(entry("a")) and not await store.try_continue(entry("a"))
    assert await store.has_session("s")
    for action in (store.get("a"), store.remove(entry("a"))):
        with pytest.raises(ApiError) as refused:
            await action
        assert refused.value.status == 503
    with redis_server(tmp_path, port):
        monkeypatch.setattr(one, "_away_until", 0.0)
        assert await one.owner("s") == "a:1" and await one._redis.get("charonia:owner:s") == b"a:1"
        assert await store.add(entry("a")) and await store.get("a")
        for at in range(3):
            await limiter.end(asked, str(at))
        assert await limiter.begin(asked, "b")
    with pytest.raises(StateUnavailable):
        await one.response("a")
    await one.close()


@contextlib.asynccontextmanager
async def silent_redis() -> AsyncIterator[tuple[RedisState, asyncio.Event]]:
    """A user of a Redis that accepts connections but does not respond, and whether there was a connection."""
    connected = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connected.set()
        await reader.read()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    one = RedisState(f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    yield one, connected
    await one.close()
    server.close()


async def test_one_request_at_a_time_waits_for_a_redis_that_was_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "_TIMEOUT_S", HANG_S)
    async with silent_redis() as (one, connected):
        one._is_away, one._away_until = True, math.inf
        await one.set_owner("s", "a:1")
        one._away_until = 0
        first = asyncio.create_task(one.owner("t"))  # writes the owner of s, too
        await connected.wait()
        assert await asyncio.wait_for(one.count("a", 1), HANG_S) == (1, 60)
        assert await asyncio.wait_for(one.owner("s"), HANG_S) == "a:1"
        await one.set_owner("s", "b:1")
        assert await one.owner("s") == "b:1" and not first.done()
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        assert not one._is_tried
        one._away_until = math.inf
        assert await one.owner("s") == "b:1"


async def test_one_time_limit_holds_for_an_action_with_its_tries(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(state, "_TIMEOUT_S", 0.01)
    async with silent_redis() as (one, _):
        assert await asyncio.wait_for(one.count("a", 1), HANG_S) == (1, 60)
        assert one._is_away and "Redis cannot be reached (TimeoutError)" in caplog.text


async def test_an_old_failure_does_not_count_after_redis_has_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "_TIMEOUT_S", HANG_S)
    one = RedisState("redis://127.0.0.1:1")
    fail = asyncio.Event()

    async def late() -> None:
        await fail.wait()
        raise OSError

    async def well() -> str:
        return "well"

    old = asyncio.create_task(one._run(late))
    await asyncio.sleep(0)
    with pytest.raises(StateUnavailable):
        await one.response("a")
    assert one._is_away
    one._away_until = 0
    assert await one._run(well) == "well"
    fail.set()
    with pytest.raises(StateUnavailable):
        await old
    assert await one._run(well) == "well"
    await one.close()


async def test_more_requests_than_connections_do_not_fail(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    one, _ = make(DEFAULT)
    totals = await asyncio.gather(*(one.count("burst", 1) for _ in range(300)))
    assert sorted(total for total, _ in totals) == list(range(1, 301)) and not caplog.records


# --- sessions


async def test_processes_share_the_owners_of_sessions(make: Make) -> None:
    one, two = make(DEFAULT)
    assert await two.owner("s") is None
    for target in ("a:1", "", "[::1]:2"):
        await one.set_owner("s", target)
        assert await two.owner("s") == target
    await two.set_owner("s", None)
    assert await one.owner("s") is None


async def test_memory_forgets_the_oldest_owners(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "_MAX_SESSIONS", 2)
    one = MemoryState()
    for session in "abac":
        await one.set_owner(session, "x")
    assert [await one.owner(session) for session in "abc"] == ["x", None, "x"]


# --- stored responses


async def test_the_oldest_responses_are_removed_beyond_the_count(make: Make) -> None:
    one, two = (store_of(made) for made in make(Bounds(count=2)))
    for id in "abc":
        assert await one.add(entry(id))
    assert [await two.get(id) is not None for id in "abc"] == [False, True, True]


async def test_the_oldest_responses_are_removed_beyond_the_bytes(make: Make) -> None:
    bounds = Bounds(bytes=500)
    one, two = (store_of(made, bounds) for made in make(bounds))
    for id in "abc":
        assert await one.add(entry(id, "x" * 150))
    assert [await two.get(id) is not None for id in "abc"] == [False, True, True]
    assert not await one.add(entry("d", "x" * 500)), "larger than all"
    for id in "bc":
        found = await two.get(id)
        assert found and await two.remove(found) and not await one.remove(found)
    for id in "ef":  # there is room again
        assert await one.add(entry(id, "x" * 150))
    assert await two.get("e") and await two.get("f")


async def test_old_responses_are_removed(redis: str) -> None:
    now = [100.0]
    one = MemoryState(Bounds(age_s=60), clock=lambda: now[0])
    store = store_of(one)
    await store.add(entry("a"))
    now[0] = 150
    await store.add(entry("b"))
    now[0] = 161
    assert await store.get("a") is None and await store.get("b") and one._bytes == len(entry("b").to_json())
    shared = RedisState(redis, Bounds(age_s=0.001), "old")
    await store_of(shared).add(entry("a"))
    while await store_of(shared).get("a"):
        await asyncio.sleep(0.01)
    assert not await store_of(shared).has_session("s")
    await store_of(shared).add(entry("b"))
    assert await shared._redis.zcard("oldresponses") <= 1
    await shared.close()


async def test_a_stored_response_belongs_to_its_owner_and_is_unchanged(make: Make) -> None:
    one, two = (store_of(made) for made in make(DEFAULT))
    message = {"role": "user", "content": 'a \u2028 "text" \0', "parts": [1, 2.5, None, True, {}]}
    given = Stored({"id": "a", "output": [message]}, [message], "s", owner="me")
    assert await one.add(given)
    found = await two.get("a", "me")
    assert found and (found.response, found.conversation, found.session_id) == (given.response, [message], "s")
    assert await two.get("a") is None and await two.get("a", "you") is None


async def test_a_response_that_is_no_json_is_not_stored(make: Make) -> None:
    deep: dict[str, Any] = {}
    for _ in range(300):
        deep = {"a": deep}
    store = store_of(make(DEFAULT)[0])
    for message in (deep, {"content": "\ud800"}):
        assert not await store.add(Stored({"id": "a"}, [message], "s"))
    assert await store.get("a") is None


async def test_a_session_is_known_while_a_response_of_it_is_stored(make: Make) -> None:
    one, two = (store_of(made) for made in make(DEFAULT))
    for id in "ab":
        assert await one.add(entry(id, session="response-1"))
    for id, left in (("a", True), ("b", False)):
        found = await two.get(id)
        assert found and await two.remove(found) and await one.has_session("response-1") is left


async def test_one_response_at_a_time_continues_a_session(make: Make) -> None:
    one, two = (store_of(made) for made in make(DEFAULT))
    await one.add(entry("a"))
    assert await one.try_continue(entry("a")) and not await two.try_continue(entry("a"))
    await one.continued(entry("a"), stored=False)
    assert await two.try_continue(entry("a"))
    await two.continued(entry("a"), stored=True)
    assert not await one.try_continue(entry("a"))


# --- settings


@pytest.mark.parametrize("url", ["memcached://h:1", "redis", "http://user:secret@h"])
def test_a_url_of_another_service_is_rejected_without_its_password(url: str) -> None:
    with pytest.raises(ValueError, match="redis://HOST:PORT") as refused:
        Settings(_env_file=None, redis_url=url)
    assert "secret" not in refused.value.errors()[0]["msg"]  # type: ignore[attr-defined]


@pytest.mark.parametrize("url", ["redis://user:sec/ret@h", "redis://h:secret", "valkey://u:secret/@h:x"])
def test_a_url_that_cannot_be_used_is_rejected_without_its_password(url: str) -> None:
    with pytest.raises(ValueError, match="CHARONIA_GATEWAY_REDIS_URL cannot be used") as refused:
        RedisState(url)
    assert "ret" not in str(refused.value) and refused.value.__suppress_context__


@pytest.mark.parametrize("scheme", ["redis", "valkey"])
async def test_the_password_and_the_host_of_a_url_are_used(scheme: str) -> None:
    one = RedisState(f"{scheme}://:valkey-password@valkey:6379")
    options: Any = one._redis.connection_pool.connection_kwargs
    assert (options["host"], options["password"]) == ("valkey", "valkey-password")
