"""The logs of a whole stack: one JSON object per line, lines with the request id, and no text of prompts unless
enabled."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import httpx
import pytest
from stack import DEMO_MODEL, HANG_S, Stack, running
from waiting import wait_until

# This text is in a prompt, and in no other logged text.
SECRET = "quokka"
CHAT = {"messages": [{"role": "user", "content": f'Is "{SECRET}" an animal?\nSay it.'}], "max_tokens": 12}
WRONG: list[dict[str, Any]] = [
    {"messages": [{"role": SECRET, "content": SECRET}]},
    {"messages": [{"role": "user", "content": [{"type": SECRET}]}], "temperature": SECRET},
    {"messages": SECRET, "tools": [SECRET], "bad_words": [SECRET * 200]},
    {"messages": f"{SECRET}\ud800", "stop": [f"{SECRET}\ud800"], "session_id": f"{SECRET}\ud800"},
    {"messages": CHAT["messages"], f"say {SECRET}": 1},
]
LEVELS = {"debug", "info", "warning", "error", "critical"}


def logs_of(stack: Stack) -> dict[str, list[str]]:
    """The lines of the terminal and of each log file, without an incomplete last line."""
    files = [stack.log_file, *stack.run_dir.glob("port-*/*.log")]
    return {file.name: file.read_bytes().rpartition(b"\n")[0].decode().splitlines() for file in files}


def events_of(stack: Stack) -> list[dict[str, Any]]:
    return [json.loads(line) for lines in logs_of(stack).values() for line in lines]


def post(stack: Stack, route: str, body: dict[str, Any], request_id: str) -> httpx.Response:
    headers = {"x-request-id": request_id}
    return httpx.post(f"{stack.gateway}/v1/{route}", json={"model": "demo", **body}, headers=headers, timeout=HANG_S)


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    env = {"CHARONIA_LOG_FORMAT": "json", "CHARONIA_ACCESS_LOG": "1", "CHARONIA_GATEWAY_LOG_LEVEL": "debug"}
    with running(Stack(DEMO_MODEL, tmp_path_factory.mktemp("logged"), env)) as served:
        yield served


@pytest.fixture(scope="module")
def with_prompts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    env = {"CHARONIA_ACCESS_LOG": "1", "CHARONIA_LOG_PROMPTS": "1"}
    with running(Stack(DEMO_MODEL, tmp_path_factory.mktemp("with_prompts"), env)) as served:
        yield served


def of_request(stack: Stack, request_id: str, *components: str) -> dict[str, dict[str, Any]]:
    """Wait until each of `components` has a line of the request, and return the lines by component. For the gateway it
    is the line about the request's end; other lines may precede it."""

    def found() -> dict[str, dict[str, Any]]:
        own = [event for event in events_of(stack) if event.get("request_id") == request_id]
        return {event["component"]: event for event in own if event["component"] != "gateway" or "status" in event}

    wait_until(lambda: set(components) <= set(found()))
    return found()


def test_every_line_has_time_level_component_and_message(logged: Stack) -> None:
    post(logged, "chat/completions", CHAT, "shape")
    of_request(logged, "shape", "gateway", "preprocessing", "engine")
    logs = logs_of(logged)
    assert {"serve.log", "triton.log", "gateway.log"} <= set(logs)
    components = set()
    for name, lines in logs.items():
        assert lines, name
        for line in lines:
            event = json.loads(line)
            assert event["level"] in LEVELS and event["message"].strip(), line
            components.add(event["component"])
            said = datetime.fromisoformat(event["time"])
            assert abs((datetime.now(timezone.utc) - said).total_seconds()) < 3600, line
    assert components >= {"serve", "triton", "engine", "preprocessing", "gateway"}


def test_request_id_is_in_logs_of_all_components(logged: Stack) -> None:
    answer = post(logged, "chat/completions", CHAT, "shop-42")
    assert answer.headers["x-request-id"] == "shop-42"
    usage = answer.json()["usage"]
    events = of_request(logged, "shop-42", "gateway", "preprocessing", "engine")
    gateway, engine = events["gateway"], events["engine"]
    assert (gateway["level"], gateway["method"], gateway["route"]) == ("info", "POST", "/v1/chat/completions")
    assert (gateway["status"], gateway["model"]) == (200, "demo")
    for event in (gateway, engine):
        assert event["prompt_tokens"] == usage["prompt_tokens"]
        assert event["completion_tokens"] == usage["completion_tokens"]
        assert 0 <= event["queue_ms"] <= event["first_token_ms"] <= event["total_ms"]
    assert gateway["finish_reasons"] == [answer.json()["choices"][0]["finish_reason"]]
    assert engine["finish_reasons"] == gateway["finish_reasons"][0]
    assert gateway["duration_ms"] >= gateway["total_ms"]
    assert events["preprocessing"]["prompt_tokens"] == usage["prompt_tokens"]


def test_rejected_requests_are_logged(logged: Stack) -> None:
    assert post(logged, "chat/completions", {**CHAT, "temperature": 9}, "refused-1").status_code == 400
    gateway = of_request(logged, "refused-1", "gateway")["gateway"]
    assert (gateway["status"], gateway["error"]) == (400, "invalid_value")
    body = {"prompt": f"{SECRET} " * 4000, "max_tokens": 1}
    assert post(logged, "completions", body, "refused-2").status_code == 400
    events = of_request(logged, "refused-2", "gateway", "engine")
    assert events["engine"]["error"] == "invalid_argument"
    assert events["gateway"]["error"] == "context_length_exceeded"
    body = {"prompt": f"{SECRET} " * 8000, "max_tokens": 1}  # too long to be tokenized completely
    assert post(logged, "completions", body, "refused-3").status_code == 400
    events = of_request(logged, "refused-3", "gateway", "preprocessing")
    assert events["preprocessing"]["error"] == "invalid_argument"
    assert events["gateway"]["error"] == "context_length_exceeded"


def test_logs_contain_no_prompt_text(logged: Stack, stack: Stack) -> None:
    for served in (logged, stack):
        post(served, "chat/completions", CHAT, "private-1")
        post(served, "chat/completions", {**CHAT, "stream": True, "stop": [SECRET, ""]}, "private-2")
        post(served, "completions", {"prompt": f"A {SECRET}", "max_tokens": 4, "echo": True}, "private-3")
        post(served, "completions", {"prompt": [1, SECRET]}, "private-4")
        for wrong in WRONG:
            body = json.dumps({"model": "demo", "max_tokens": 1, **wrong})
            headers = {"Content-Type": "application/json"}
            httpx.post(f"{served.gateway}/v1/chat/completions", content=body, headers=headers, timeout=HANG_S)
            tensors = {"messages": json.dumps(wrong["messages"]), "stop_words": [SECRET * 500], "tools": SECRET}
            httpx.post(f"{served.http}/v2/models/ensemble/generate", json=tensors, timeout=HANG_S)
        post(served, "chat/interactive", {"prompt": SECRET, "request_output_len": 4}, "private-5")
    of_request(logged, "private-5", "gateway", "engine")
    for served in (logged, stack):
        for name, lines in logs_of(served).items():
            assert not [line for line in lines if SECRET in line], name
    assert not any("private-5" in line for lines in logs_of(stack).values() for line in lines), "no access log"


def test_prompts_and_responses_are_logged_if_enabled(with_prompts: Stack) -> None:
    body = {"prompt": f"A {SECRET}", "max_tokens": 4, "ignore_eos": True}
    assert post(with_prompts, "completions", body, "open-1").status_code == 200

    def said(name: str, *parts: str) -> bool:
        return any(all(part in line for part in parts) for line in logs_of(with_prompts).get(name, ()))

    wait_until(lambda: said("gateway.log", "[open-1]", SECRET, "answers=['"))
    wait_until(lambda: said("triton.log", "preprocessing: ", "[open-1]", f"A {SECRET}"))
    wait_until(lambda: said("triton.log", " + 4 tokens in ", "[open-1]"))
    assert not said("serve.log", SECRET), "the terminal has warnings and errors only"


def test_start_failure_is_json_object(tmp_path: Path) -> None:
    served = Stack(tmp_path / "no-such-model", tmp_path / "run", {"CHARONIA_LOG_FORMAT": "json"})
    served.launch()
    try:
        assert served.wait() == 1
    finally:
        served.stop()
    *_, last = [json.loads(line) for line in served.log_file.read_text().splitlines()]
    assert (last["level"], last["component"]) == ("error", "serve")
    assert "no-such-model" in last["message"]
