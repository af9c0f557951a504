"""The log of requests, /v1/replay, and the comparison of `charonia replay`."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import httpx
import pytest
from charonia_gateway import request_log
from charonia_gateway.request_log import RequestLog
from gateway_in_process import MODEL, gateway
from triton_double import error, input_number, input_text, part, says

from charonia.errors import ModelError
from charonia.replay import Outcome, difference, read_log, replay, replayed, stateless, summary

ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": "hi"},
    "/v1/completions": {"prompt": ["hi", "you"], "stream": True},
    "/v1/responses": {"input": "hi", "stream": True},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5},
    "/v1/chat/interactive": {"prompt": "hi", "stream": True},
}


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_bytes().splitlines()] if file.exists() else []


async def test_complete_requests_are_logged_with_their_tokens(tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    file.touch(0o644)
    async with gateway(info={"fingerprint": "f"}, log_requests=file) as (web, server):
        for path, body in ROUTES.items():
            sent = json.dumps({"model": MODEL, **body})
            server.behaviour = says(part("a"), part("b", "length"))
            assert (await web.post(path, content=sent, headers={"x-request-id": "shop"})).status_code == 200
            *_, line = lines_of(file)
            assert (line["path"], line["body"], line["request_id"]) == (path, sent, "shop")
            count = len(body.get("prompt", [])) if isinstance(body.get("prompt"), list) else 1
            assert line["choices"] == [{"token_ids": [1, 1], "finish_reason": "length"}] * count
            assert list(line["seeds"].values()) == [input_number(one, "seed") for one in server.requests[-count:]]
            assert line["system_fingerprint"].startswith("fp_")
        server.behaviour = says(part("a"), error("[500] it fails"))
        for path, body in ROUTES.items():
            await web.post(path, json={"model": MODEL, **body})
        await web.post("/tokenize", json={"prompt": "hi"})
    assert len(lines_of(file)) == len(ROUTES)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


async def test_no_request_is_logged_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    async with gateway() as (web, _):
        await web.post("/v1/completions", json={"model": MODEL, "prompt": "hi"})
    assert not list(tmp_path.iterdir())


def test_a_full_log_is_rotated_and_a_lost_line_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(request_log, "_LOG_BYTES", 20)
    file = tmp_path / "requests.jsonl"
    for number in range(7):
        RequestLog(file).write({"number": number})
    names = ["requests.jsonl", *(f"requests.jsonl.{number}" for number in range(1, 5))]
    assert sorted(one.name for one in tmp_path.iterdir()) == names
    assert [lines_of(tmp_path / name) for name in names] == [[{"number": number}] for number in (6, 5, 4, 3, 2)]
    RequestLog(tmp_path / "missing" / "requests.jsonl").write({})
    assert "a request could not be written to" in caplog.text


@pytest.mark.parametrize("path", ROUTES)
async def test_a_replay_has_the_logged_seeds_and_returns_tokens(path: str, tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    async with gateway(info={"fingerprint": "f"}, log_requests=file) as (web, server):
        server.behaviour = says(part("a"), part("b", "stop"))
        await web.post(path, json={"model": MODEL, **ROUTES[path]})
        (line,) = lines_of(file)
        assert {input_text(one, "prompt_time") for one in server.requests} <= {"", line["prompt_time"]}
        line["prompt_time"] = "2020-01-01T23:59:59"
        seeds = [input_number(one, "seed") for one in server.requests]
        replayed = await web.post("/v1/replay", json=line)
        assert replayed.status_code == 200
        times = {input_text(one, "prompt_time") for one in server.requests[len(seeds) :]}
        assert times == {"" if path == "/v1/completions" else line["prompt_time"]}, "only chats have a template"
        assert [input_number(one, "seed") for one in server.requests] == seeds * 2
        assert difference(line["choices"], replayed.json()["choices"]) is None
        assert {name: line[name] for name in replayed.json()} == replayed.json()
        assert len(lines_of(file)) == 1, "a replay is not logged"

        server.behaviour = says(part("a"), error("[500] it fails"))
        assert (await web.post("/v1/replay", json=line)).status_code in (500, 502, 503)
        wrong = await web.post("/v1/replay", json={**line, "body": json.dumps({"model": "another"})})
        assert wrong.status_code in (400, 404) and set(wrong.json()["error"]) == {"message", "type", "param", "code"}
    assert (await _status(line, path="/health/live")) == 400


async def _status(line: dict[str, Any], **changes: Any) -> int:
    async with gateway() as (web, _):
        return (await web.post("/v1/replay", json={**line, **changes})).status_code


def choices(*responses: tuple[list[int], str]) -> list[dict[str, Any]]:
    return [{"token_ids": ids, "finish_reason": reason} for ids, reason in responses]


@pytest.mark.parametrize(
    ("now", "found"),
    [
        (choices(([1, 2], "stop"), ([3], "length")), None),
        (choices(([1, 2], "stop")), "1 responses, logged: 2"),
        (choices(([1, 2], "stop"), ([4], "length")), "response 1, token 0: 4, logged: 3"),
        (choices(([1], "stop"), ([3], "length")), "response 0, token 1: the end, logged: 2"),
        (choices(([1, 2, 5], "stop"), ([3], "length")), "response 0, token 2: 5, logged: the end"),
        (choices(([1, 2], "stop"), ([3], "stop")), "response 1: ends with stop, logged: length"),
    ],
)
def test_the_first_different_token_is_named(now: list[dict[str, Any]], found: str | None) -> None:
    assert difference(choices(([1, 2], "stop"), ([3], "length")), now) == found


def test_a_request_is_replayed_without_the_state_of_the_server() -> None:
    chat, interactive = "/v1/chat/completions", "/v1/chat/interactive"
    assert stateless(chat, '{ "a":1}') == '{ "a":1}'
    assert stateless(chat, '{"a": 1, "session_id": "s", "store": true}') == '{"a": 1}'
    assert stateless("/v1/responses", '{"previous_response_id": "r"}') is None
    assert stateless(interactive, '{"session_id": 7}') is None
    assert stateless(interactive, '{"session_id": -1}') == "{}"


def test_different_tokens_break_the_promise_only_with_equal_fingerprints() -> None:
    found = summary(
        [Outcome(1, "a", "/", "equal", "", "f", "f"), Outcome(2, "b", "/", "different", "x", "f", "g")]
        + [Outcome(number, "c", "/", "different", "x", "f", "f") for number in (3, 4)]
    )
    assert [found[name] for name in ("requests", "equal", "different", "failed", "broken")] == [4, 1, 3, 0, 2]
    assert (found["logged_fingerprints"], found["fingerprints"]) == (["f"], ["f", "g"])
    assert [one["line"] for one in found["not_equal"]] == [2, 3, 4]


async def test_replay_waits_for_the_time_of_retry_after() -> None:
    same = {"system_fingerprint": "f", "choices": choices(([1], "stop"))}
    responses = [httpx.Response(429, headers={"retry-after": "0"}), httpx.Response(200, json=same)]
    entry = {"path": "/v1/completions", "body": "{}", "choices": same["choices"]}
    transport = httpx.MockTransport(lambda _: responses.pop(0))
    async with httpx.AsyncClient(transport=transport, base_url="http://g") as client:
        assert (await replayed(client, 1, entry)).result == "equal" and not responses


@pytest.mark.parametrize("url", ["localhost:23333", "http://", "ftp://h", "http://h:port", ""])
async def test_a_url_that_is_no_address_of_a_gateway_is_named(url: str) -> None:
    with pytest.raises(ModelError, match=f"--url {url} is not an address"):
        await replay([], url, None, None, 1)


def test_a_file_that_is_no_request_log_is_rejected(tmp_path: Path) -> None:
    file = tmp_path / "log"
    with pytest.raises(ModelError, match="cannot be read: No such file"):
        list(read_log(file))
    file.touch()
    with pytest.raises(ModelError, match="has no requests"):
        list(read_log(file))
    odd = [("x", []), ("[]", []), ({}, []), ("{}", 5), ("{}", [5]), ("{}", [{}])]
    made = [json.dumps({"path": "/v1/completions", "body": body, "choices": choices}) for body, choices in odd]
    for text in ("INFO: hello", "[]", '{"path": "/v1/completions"}', *made):
        file.write_text(text)
        with pytest.raises(ModelError, match=r"line 1 of .* is not from a request log"):
            list(read_log(file))
