"""The choice of a server for a request, the state of servers (up, down), and the names of servers in the setting."""

from __future__ import annotations

import asyncio
import socket
from types import SimpleNamespace
from typing import Any, cast

import pytest
from charonia_client import Client, GenerateRequest
from charonia_gateway.endpoints.choice import KEY_CHARACTERS, MIN_CHARACTERS, choose, prefix_key, ranked
from charonia_gateway.endpoints.discovery import Discovery, entries
from charonia_gateway.endpoints.endpoint import MISSED_UNTIL_DOWN, PASSED_UNTIL_UP, Endpoint
from charonia_gateway.settings import Settings
from charonia_gateway.usage import estimated_tokens
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

LONG = "You are a patient teacher of marine biology. " * 40


def endpoint(
    name: str, requests: int = 0, *, up: bool = True, doubtful: bool = False, removed: bool = False
) -> Endpoint:
    made = Endpoint(cast(Client, SimpleNamespace(target=name)))
    made.up, made.doubtful, made.removed, made.requests = up, doubtful, removed, requests
    return made


def ask(text: str = "hi", **fields: Any) -> GenerateRequest:
    return GenerateRequest(text=text, **fields)


def chat(*texts: str) -> GenerateRequest:
    roles = ["system", *["user", "assistant"] * len(texts)]
    return GenerateRequest(messages=[{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)])


def name_of(chosen: Endpoint | None) -> str:
    assert chosen is not None
    return chosen.target


@given(st.lists(st.sampled_from(["passed", "missed", "failed", "doubt"])))
def test_health_changes_only_by_its_rules(events: list[str]) -> None:
    one = endpoint("a", up=False)
    history: list[str] = []
    for event in events:
        before = one.up
        method = getattr(one, event)
        method("why") if event in ("missed", "failed") else method()
        checks = [past for past in [*history, event] if past != "doubt"]
        history.append(event)
        if one.up and not before:
            needed = 1 if checks == ["passed"] else PASSED_UNTIL_UP
            assert checks[-needed:] == ["passed"] * needed
        if before and not one.up:
            assert event == "failed" or checks[-MISSED_UNTIL_DOWN:] == ["missed"] * MISSED_UNTIL_DOWN
        assert one.up or one.reason
        assert event != "passed" or not one.doubtful
        assert event not in ("missed", "doubt") or one.doubtful


SERVERS = st.lists(
    st.tuples(st.integers(0, 9), st.booleans(), st.booleans(), st.booleans(), st.booleans()), min_size=2, max_size=6
)


@given(
    SERVERS, st.sampled_from([None, "a", "b"]), st.sampled_from(["hi", LONG]), st.sampled_from([None, "0", "1", "x"])
)
def test_choose_takes_a_server_that_may_be_chosen(
    kinds: list[tuple[int, bool, bool, bool, bool]], session: str | None, text: str, owner: str | None
) -> None:
    servers = [
        endpoint(str(at), requests, up=up, doubtful=doubtful, removed=removed)
        for at, (requests, up, doubtful, removed, _) in enumerate(kinds)
    ]
    tried = [one for one, kind in zip(servers, kinds, strict=True) if kind[-1]]
    request = ask(text, session_id=session)
    chosen = choose(servers, request, tried, owner if session else None)
    can = [one for one in servers if one.usable and one not in tried]
    if not can:
        assert chosen is None
        return
    assert chosen in can
    if session and owner in [one.target for one in can]:
        assert name_of(chosen) == owner
    else:
        assert not chosen.doubtful or all(one.doubtful for one in can)
        least = min(one.requests for one in can if one.doubtful is chosen.doubtful)
        if session is None:
            assert chosen.requests <= (1.5 * least + 4 if text is LONG else least)


def test_a_short_request_goes_to_the_fewest_requests_and_ties_take_turns() -> None:
    servers = [endpoint("a", 3), endpoint("b"), endpoint("c")]
    chosen = []
    for turn in range(4):
        one = choose(servers, ask())
        assert one
        one.turn = turn + 1
        chosen.append(one.target)
    assert chosen == ["b", "c", "b", "c"]
    servers[1].requests = servers[2].requests = 4
    assert name_of(choose(servers, ask())) == "a"


def test_all_turns_of_a_conversation_go_to_the_same_server() -> None:
    servers = [endpoint(name) for name in "abc"]
    chosen = {user: name_of(choose(servers, chat(f"{user} {LONG}", "What is a conch?"))) for user in range(20)}
    assert set(chosen.values()) == set("abc")
    for user, name in chosen.items():
        assert name_of(choose(servers, chat(f"{user} {LONG}", "What is a conch?", "A snail.", "Where?"))) == name


def test_a_prefix_does_not_outweigh_any_load() -> None:
    servers = [endpoint("a"), endpoint("b")]
    first = choose(servers, ask(LONG))
    assert first
    other = next(one for one in servers if one is not first)
    other.requests = 2
    first.requests = 7
    assert choose(servers, ask(LONG)) is first
    first.requests = 8
    assert choose(servers, ask(LONG)) is other


def test_the_only_server_gets_every_request() -> None:
    only = endpoint("a", up=False)
    assert choose([only], ask(session_id="s")) is only
    assert choose([only], ask(), [only]) is None
    only.removed = True
    assert choose([only], ask()) is None


@given(st.sets(st.text("abcdef", min_size=1), min_size=2, max_size=6), st.text(max_size=5), st.data())
def test_removing_a_server_moves_only_its_own_keys(targets: set[str], key: str, data: st.DataObject) -> None:
    servers = [endpoint(name) for name in targets]
    gone = data.draw(st.sampled_from(servers))
    before = ranked(key, servers)
    assert ranked(key, [one for one in servers if one is not gone]) == [one for one in before if one is not gone]


@given(st.text(max_size=3000), st.text(max_size=3000))
def test_prefix_keys_are_equal_if_the_beginnings_are(one: str, other: str) -> None:
    keys = [prefix_key(ask(text)) for text in (one, other)]
    assert [key is None for key in keys] == [len(text) < MIN_CHARACTERS for text in (one, other)]
    if None not in keys:
        assert (keys[0] == keys[1]) is (one[:KEY_CHARACTERS] == other[:KEY_CHARACTERS])


def test_prefix_keys_separate_salts_and_tools_and_read_token_ids() -> None:
    assert len({prefix_key(ask(LONG, cache_salt=salt)) for salt in (None, "alice", "bob")}) == 3
    ids = list(range(1000, 1600))
    one, other, early = (
        prefix_key(GenerateRequest(prompt_token_ids=found)) for found in (ids, [*ids[:-1], 7], [7, *ids[1:]])
    )
    assert one == other != early
    tools: list[Any] = [{"type": "function", "function": {"name": "f", "description": "x" * 300}}]
    messages = [{"role": "user", "content": "hi"}]
    assert prefix_key(GenerateRequest(messages=messages)) is None
    assert prefix_key(GenerateRequest(messages=messages, tools=tools))


def test_tokens_of_prompts_are_estimated() -> None:
    assert estimated_tokens(ask("x" * 400)) == 101
    assert estimated_tokens(ask("海" * 400)) == 201
    assert estimated_tokens(GenerateRequest(prompt_token_ids=[1] * 400)) == 400
    assert estimated_tokens(chat("x" * 40, "y" * 40)) == 22


def test_entries_of_servers_are_read() -> None:
    text = "a:1, [::1]:2,\ndns:///triton.example:3"
    assert entries(text) == ["a:1", "[::1]:2", "dns:///triton.example:3"]
    assert entries(" ") == []
    assert Settings(triton_host="::1", grpc_port=5, triton_endpoints=" , ").endpoints == "[::1]:5"
    assert Settings(triton_endpoints="a:1,b:2").endpoints == "a:1,b:2"


@pytest.mark.parametrize(
    "entry", ["a", "a:", ":1", "a:b", "a:70000", "a:0", "http://a:1", "a:1/x", "me@a:1", "dns:///a", "file:///a"]
)
def test_a_wrong_entry_is_named(entry: str) -> None:
    with pytest.raises(ValidationError, match="is not a server"):
        Settings(triton_endpoints=f"good:1,{entry}")


async def test_a_dns_name_keeps_its_addresses_while_it_cannot_be_resolved(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found: list[str] | OSError = ["10.0.0.2", "10.0.0.1", "::1"]

    async def getaddrinfo(host: str, port: int, **_: Any) -> list[Any]:
        if isinstance(found, OSError):
            raise found
        return [(0, 0, 0, "", (address, port)) for address in found]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    discovery = Discovery("a:1,dns:///triton:5")
    assert await discovery.targets() == ["a:1", "10.0.0.1:5", "10.0.0.2:5", "[::1]:5"]
    found = socket.gaierror("no such name")
    for _ in range(2):
        assert await discovery.targets() == ["a:1", "10.0.0.1:5", "10.0.0.2:5", "[::1]:5"]
    assert caplog.text.count("cannot resolve dns:///triton:5") == 1
    found = ["10.0.0.3"]
    seen: list[list[str]] = []
    following = asyncio.create_task(discovery.follow(lambda targets: seen.append(list(targets)), 0.001))
    while not seen:
        await asyncio.sleep(0)
    following.cancel()
    assert seen[0] == ["a:1", "10.0.0.3:5"]
    await Discovery("a:1").follow(lambda _: None, 0)  # returns: nothing can change
