"""Which endpoint a request goes to, and what makes a server up or down: the rules, over every order of events."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from charonia_client import Client, GenerateRequest, GenerateResponse
from charonia_gateway.endpoints import load
from charonia_gateway.endpoints.affinity import CHUNK_CHARACTERS, Prefixes, Recent, prefix_keys, rendezvous
from charonia_gateway.endpoints.chooser import Chooser
from charonia_gateway.endpoints.discovery import Discovery, entries
from charonia_gateway.endpoints.endpoint import Endpoint, InFlight
from charonia_gateway.endpoints.health import ANSWERS_UNTIL_UP, TIMEOUTS_UNTIL_DOWN, Health, State
from charonia_gateway.endpoints.sessions import StaleSessions
from charonia_gateway.settings import Settings
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

LONG = "You are a patient teacher of marine biology. " * 40


def endpoint(name: str, state: State = State.UP, outstanding_tokens: int = 0, removed: bool = False) -> Endpoint:
    made = Endpoint(cast(Client, SimpleNamespace(target=name)), lambda _: None, StaleSessions(10))
    made.health.state = state
    made.outstanding_tokens = outstanding_tokens
    made.removed = removed
    return made


def ask(text: str = "hi", **fields: Any) -> GenerateRequest:
    return GenerateRequest(text=text, **fields)


def chat(*texts: str) -> GenerateRequest:
    roles = ["system", *["user", "assistant"] * len(texts)]
    return GenerateRequest(messages=[{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)])


def name_of(choice: Any) -> str:
    assert choice is not None
    return str(choice.endpoint.target)


@given(st.lists(st.sampled_from(["well", "unresponsive", "away", "not_ready", "suspect"])))
def test_health_turns_only_on_what_its_rules_name(events: list[str]) -> None:
    health, history = Health(), []
    for event in events:
        before = health.state
        method = getattr(health, event)
        method() if event == "well" else method("why")
        checks = [past for past in [*history, event] if past != "suspect"]
        history.append(event)
        unusable = State.DOWN, State.NOT_READY
        if before in unusable and health.state not in unusable:
            needed = 1 if checks == ["well"] else ANSWERS_UNTIL_UP
            assert checks[-needed:] == ["well"] * needed
            assert health.state is State.UP
        if before is not State.DOWN and health.state is State.DOWN:
            assert event == "away" or checks[-TIMEOUTS_UNTIL_DOWN:] == ["unresponsive"] * TIMEOUTS_UNTIL_DOWN
        assert (event == "not_ready") <= (health.state is State.NOT_READY)
        assert (event == "not_ready" or before is State.NOT_READY) >= (health.state is State.NOT_READY)
        assert health.usable is (health.state not in unusable)
        if event in ("unresponsive", "suspect"):
            assert health.state is not State.UP
        assert bool(health.reason) is (health.state is not State.UP)


def test_a_suspect_server_is_up_with_one_good_check_and_one_that_was_down_with_two() -> None:
    health = Health()
    health.well()
    health.suspect("a request failed")
    assert health.state is State.SUSPECT
    health.well()
    assert health.state is State.UP
    health.away("closed")
    health.well()
    assert health.state is State.DOWN
    health.well()
    assert health.state is State.UP


ENDPOINTS = st.lists(
    st.tuples(st.sampled_from(State), st.integers(0, 5000), st.booleans(), st.booleans()), min_size=2, max_size=6
)


@given(ENDPOINTS, st.sampled_from([None, "a", "b"]), st.sampled_from(["hi", LONG]), st.booleans())
def test_no_choice_breaks_a_rule(
    kinds: list[tuple[State, int, bool, bool]], session_id: str | None, text: str, interactive: bool
) -> None:
    endpoints = [endpoint(str(at), state, tokens, removed) for at, (state, tokens, removed, _) in enumerate(kinds)]
    tried = {str(at) for at, (*_, was_tried) in enumerate(kinds) if was_tried}
    request = ask(text, session_id=session_id, interactive=interactive and session_id is not None)
    chooser = Chooser()
    for _ in range(3):
        choice = chooser.choose(request, endpoints, tried)
        can = [one for one in endpoints if one.usable and one.target not in tried]
        best = [one for one in can if one.health.state is State.UP] or can
        if choice is None:
            assert not can
            continue
        assert choice.endpoint in best
        if choice.reason == "load":
            assert choice.endpoint.outstanding_tokens == min(one.outstanding_tokens for one in best)
        assert (choice.reason == "session") is (session_id is not None)


def test_the_least_outstanding_tokens_are_first_and_equals_take_turns() -> None:
    endpoints = [endpoint("a", outstanding_tokens=50), endpoint("b"), endpoint("c")]
    chooser = Chooser()
    assert [name_of(chooser.choose(ask(), endpoints)) for _ in range(4)] == ["b", "c", "b", "c"]
    endpoints[1].outstanding_tokens = endpoints[2].outstanding_tokens = 51
    assert name_of(chooser.choose(ask(), endpoints)) == "a"


def test_a_server_that_said_when_it_takes_requests_again_is_left_alone_till_then() -> None:
    now = [100.0]
    chooser = Chooser(lambda: now[0])
    endpoints = [endpoint("a"), endpoint("b", outstanding_tokens=4000)]
    endpoints[0].busy_until = 105.0
    assert name_of(chooser.choose(ask(), endpoints)) == "b"
    now[0] = 105.0
    assert name_of(chooser.choose(ask(), endpoints)) == "a"


def test_the_next_turn_of_a_conversation_goes_where_its_beginning_was_computed() -> None:
    chooser = Chooser()
    endpoints = [endpoint(name) for name in "abc"]
    assigned_to = {}
    for user in range(6):
        assigned_to[user] = name_of(chooser.choose(chat(f"{user} {LONG}", "What is a conch?"), endpoints))
    assert set(assigned_to.values()) == set("abc")
    for user, assigned in assigned_to.items():
        choice = chooser.choose(chat(f"{user} {LONG}", "What is a conch?", "A snail.", "Where?"), endpoints)
        assert (name_of(choice), choice and choice.reason) == (assigned, "prefix")


def test_a_prefix_is_not_worth_any_load() -> None:
    chooser = Chooser()
    endpoints = [endpoint("a"), endpoint("b")]
    request = ask(LONG, max_tokens=10)
    own = load.prompt_tokens(request) + 10
    assert name_of(chooser.choose(request, endpoints)) == "a"
    endpoints[0].outstanding_tokens = own
    assert name_of(chooser.choose(request, endpoints)) == "a"
    endpoints[0].outstanding_tokens = own + 1
    choice = chooser.choose(request, endpoints)
    assert (name_of(choice), choice and choice.reason) == ("b", "load")


def test_a_session_stays_at_home_whatever_comes_and_goes_elsewhere() -> None:
    chooser = Chooser()
    endpoints = [endpoint(name) for name in "abc"]
    assigned_to = {str(at): name_of(chooser.choose(ask(session_id=str(at)), endpoints)) for at in range(60)}
    assert set(assigned_to.values()) == set("abc")
    more = [endpoint("d"), *reversed(endpoints)]
    for one in more:
        one.outstanding_tokens = 100_000 if one.target == "a" else 0
    for session_id, assigned in assigned_to.items():
        choice = chooser.choose(ask(session_id=session_id), more)
        assert (name_of(choice), choice and choice.moved_from) == (assigned, None)


def test_a_session_whose_home_is_down_has_a_new_one_and_keeps_it() -> None:
    chooser = Chooser()
    endpoints = [endpoint(name) for name in "abc"]
    assigned = name_of(chooser.choose(ask(session_id="s"), endpoints))
    (gone,) = [one for one in endpoints if one.target == assigned]
    gone.health.away("killed")
    moved = chooser.choose(ask(session_id="s"), endpoints)
    assert moved is not None and moved.moved_from == assigned and moved.endpoint is not gone
    gone.health.well()
    gone.health.well()
    again = chooser.choose(ask(session_id="s"), endpoints)
    assert again is not None and again.endpoint is moved.endpoint and again.moved_from is None


def test_a_turn_that_its_home_does_not_take_goes_elsewhere_only_with_its_whole_conversation() -> None:
    chooser = Chooser()
    endpoints = [endpoint(name) for name in "abc"]
    assigned = name_of(chooser.choose(ask(session_id="s"), endpoints))
    whole = chooser.choose(ask(session_id="s"), endpoints, {assigned})
    assert whole is not None and whole.endpoint.target != assigned and whole.reason == "load"
    assert chooser.choose(ask(session_id="s", interactive=True), endpoints, {assigned}) is None
    assert name_of(chooser.choose(ask(session_id="s"), endpoints)) == assigned


def test_a_gateway_with_one_server_uses_it_whatever_is_thought_of_it() -> None:
    only = endpoint("a", State.DOWN)
    choice = Chooser().choose(ask(session_id="s"), [only])
    assert choice is not None and choice.endpoint is only and choice.reason == "only"
    assert Chooser().choose(ask(), [only], {"a"}) is None


def test_sessions_of_the_only_server_stay_when_there_are_more() -> None:
    chooser, only = Chooser(), endpoint("a")
    more = [only, endpoint("b"), endpoint("c")]
    for number in range(20):
        chooser.choose(ask(session_id=str(number)), [only])
        assert name_of(chooser.choose(ask(session_id=str(number)), more)) == "a"


@given(st.sets(st.text("abcdef", min_size=1), min_size=2, max_size=6), st.integers(0, 10_000), st.data())
def test_a_server_that_goes_moves_no_sessions_but_its_own(targets: set[str], session: int, data: st.DataObject) -> None:
    gone = data.draw(st.sampled_from(sorted(targets)))
    assigned = rendezvous(str(session), targets)
    assert assigned in targets
    if assigned != gone:
        assert rendezvous(str(session), targets - {gone}) == assigned


def test_prefix_keys_of_token_ids_are_equal_as_far_as_the_ids_are() -> None:
    ids = list(range(1000, 1500))
    one, other = (prefix_keys(GenerateRequest(prompt_token_ids=found)) for found in (ids, [*ids[:300], 7, *ids[301:]]))
    assert len(one) == len(other) > 5 and one[:5] == other[:5] and one[-1] != other[-1]


def test_prompts_of_another_salt_have_no_prefix_in_common() -> None:
    plain, alice, again, bob = (prefix_keys(ask(LONG, cache_salt=salt)) for salt in (None, "alice", "alice", "bob"))
    assert alice == again and len({*plain, *alice, *bob}) == 3 * len(plain)


@given(st.text(max_size=3000), st.text(max_size=3000))
def test_prefix_keys_are_equal_as_far_as_the_texts_are(one: str, other: str) -> None:
    found = [prefix_keys(ask(text)) for text in (one, other)]
    for text, keys in zip((one, other), found, strict=True):
        assert len(keys) == len(text) // CHUNK_CHARACTERS
    for at, (mine, its) in enumerate(zip(*found, strict=False)):
        end = (at + 1) * CHUNK_CHARACTERS
        assert (mine == its) is (one[:end] == other[:end])


def test_the_longest_known_beginning_wins() -> None:
    prefixes = Prefixes()
    text = "".join(f"{number:07} " for number in range(CHUNK_CHARACTERS))
    long, short = prefix_keys(ask(text)), prefix_keys(ask(text[: 2 * CHUNK_CHARACTERS]))
    prefixes.remember(long, "long")
    prefixes.remember(short, "short")
    assert prefixes.find(long, {"long": 1, "short": 2}) == 1
    assert prefixes.find(long, {"short": 2}) == 2
    assert prefixes.find(long, {"another": 3}) is None
    assert prefixes.find([], {"long": 1}) is None


@given(st.lists(st.integers(0, 9)), st.integers(1, 5))
def test_what_is_remembered_is_the_last_used(keys: list[int], limit: int) -> None:
    recent: Recent[int, int] = Recent(limit)
    for key in keys:
        recent.remember(key, key)
    assert list(recent) == list(dict.fromkeys(reversed(keys)))[:limit][::-1]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 400))))
def test_outstanding_tokens_are_those_of_the_requests_that_run(events: list[tuple[int, int]]) -> None:
    one = endpoint("a")
    entries = [InFlight(one, str(at), ask("x" * 40 * at, max_tokens=100 * at)) for at in range(4)]
    for number, tokens in events:
        entry = entries[number]
        before = one.outstanding_tokens
        entry.note(GenerateResponse("", tuple(range(tokens))))
        assert one.outstanding_tokens <= before and entry.tokens >= 1
        one.check_integrity()
    for entry in entries:
        entry.close()
        entry.close()
        one.check_integrity()
    assert one.outstanding_tokens == 0 and not one.in_flight


def test_work_is_prompt_and_answers() -> None:
    assert load.prompt_tokens(ask("x" * 400)) == 101
    assert load.prompt_tokens(ask("海" * 400)) == 201
    assert load.prompt_tokens(GenerateRequest(prompt_token_ids=[1] * 400)) == 400
    assert load.prompt_tokens(chat("x" * 40, "y" * 40)) == 22
    assert load.answer_tokens(ask(max_tokens=7)) == 7
    assert load.answer_tokens(ask(max_tokens=7, n=2, best_of=3)) == 21
    assert load.answer_tokens(ask(max_tokens=2**31 - 1)) < load.answer_tokens(ask(max_tokens=2**31 - 1, n=2)) < 10_000


def test_entries_of_servers_are_read() -> None:
    text = "a:1, [::1]:2,\n# a comment\ndns:///triton.example:3  # all of them\n\nfile:///etc/servers,"
    assert entries(text) == ["a:1", "[::1]:2", "dns:///triton.example:3", "file:///etc/servers"]
    assert entries(" ") == []


@pytest.mark.parametrize(
    "entry", ["a", "a:", ":1", "a:b", "a:70000", "a:0", "http://a:1", "a:1/x", "me@a:1", "dns:///a"]
)
def test_an_entry_that_is_none_is_named(entry: str) -> None:
    with pytest.raises(ValueError, match="is no endpoint"):
        entries(entry)
    with pytest.raises(ValidationError, match="is no endpoint"):
        Settings(triton_endpoints=f"good:1,{entry}")


def test_without_a_list_there_is_the_one_server_of_host_and_port() -> None:
    assert Settings(triton_host="::1", grpc_port=5, triton_endpoints="").endpoints == "[::1]:5"
    assert Settings(triton_host="t", grpc_port=5, triton_endpoints=" , ").endpoints == "t:5"
    assert Settings(triton_endpoints="a:1,b:2").endpoints == "a:1,b:2"


async def test_a_file_of_endpoints_is_read_again_and_a_bad_one_changes_nothing(tmp_path: Any) -> None:
    file = tmp_path / "servers"
    discovery = Discovery(f"file://{file}, a:1")
    assert await discovery.targets() == ["a:1"]
    file.write_text("b:2\nc:3, a:1 # again\n")
    assert await discovery.targets() == ["b:2", "c:3", "a:1"]
    for bad in ("b:x\n", f"file://{file}\n"):
        file.write_text(bad)
        assert await discovery.targets() == ["b:2", "c:3", "a:1"]
    file.write_text("c:3\n")
    await discovery.targets()
    assert await discovery.targets() == ["c:3", "a:1"]


@pytest.mark.parametrize(
    ("cut", "says"),
    [("", "has no entry"), ("\n# none\n", "has no entry"), ("b:2", "no line end"), ("b:2\nc:33", "no line end")],
)
async def test_an_empty_or_cut_file_of_endpoints_removes_no_server(
    cut: str, says: str, tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "servers"
    file.write_text("b:2\nc:33337\n")
    discovery = Discovery(f"file://{file}")
    assert await discovery.targets() == ["b:2", "c:33337"]
    file.write_text(cut)
    for _ in range(3):
        assert await discovery.targets() == ["b:2", "c:33337"]
    (warning,) = caplog.records
    assert says in warning.getMessage() and "until they are: b:2, c:33337" in warning.getMessage()
    file.write_text("c:33337\nd:4\n")
    assert await discovery.targets() == ["c:33337", "d:4", "b:2"]
    assert await discovery.targets() == ["c:33337", "d:4"]


async def test_a_file_of_endpoints_that_is_being_written_removes_no_server(tmp_path: Any) -> None:
    """A reading may find any number of whole lines."""
    file = tmp_path / "servers"
    file.write_text("a:1\nb:2\nc:3\n")
    discovery = Discovery(f"file://{file}")
    whole = await discovery.targets()
    for written in ("a:1\n", "a:1\nb:2\n", "a:1\nb:2\nc:3\n"):
        file.write_text(written)
        assert sorted(await discovery.targets()) == whole
    assert await discovery.targets() == whole


async def test_the_file_is_read_again_after_an_error_of_the_gateways_own(tmp_path: Any) -> None:
    file = tmp_path / "servers"
    file.write_text("a:1\n")
    seen: list[list[str]] = []
    enough = asyncio.Event()

    def use(targets: Iterable[str]) -> None:
        seen.append(list(targets))
        if len(seen) == 1:
            raise RuntimeError("a bug")
        enough.set()

    following = asyncio.create_task(Discovery(f"file://{file}").follow(use, 0.01))
    await asyncio.wait_for(enough.wait(), 60)
    following.cancel()
    assert seen[:2] == [["a:1"], ["a:1"]]


async def test_a_name_stands_for_all_its_addresses() -> None:
    targets = await Discovery("dns:///localhost:7").targets()
    assert "127.0.0.1:7" in targets or "[::1]:7" in targets
    assert await Discovery("dns:///no-such-name.invalid:7").targets() == []
